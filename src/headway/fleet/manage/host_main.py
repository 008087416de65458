"""The program of a host on this machine; takes the arguments of a host as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys

import msgspec

from headway.fleet.manage.host import Host, HostArguments


async def main(arguments: HostArguments) -> None:
    """Run a host until SIGTERM; the process of its member goes on."""
    running = asyncio.create_task(Host(arguments).run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=HostArguments)))
