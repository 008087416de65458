"""How long until every stream goes on after its engine was killed.

    python -m tests.faults.recovery MODEL [--kills 3] [--streams 16]

Prints the seconds of each kill, from the signal until the last stream has got another token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from tests.faults.engine_faults import start
from tests.faults.streams import Answer, Crowd, make_jobs

SETTLE_S = 300.0


async def run(model: Path, num_kills: int, num_streams: int, folder: Path) -> list[float]:
    server = start(model, folder)
    took_s: list[float] = []
    try:
        await asyncio.to_thread(server.wait_ready)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            jobs = make_jobs(32)
            crowd = Crowd(client, jobs, [Answer()] * len(jobs), num_streams)
            for _ in range(num_kills):
                await crowd.settle(time.monotonic(), SETTLE_S)
                await asyncio.sleep(3.0)
                (engine,) = psutil.Process(server.process.pid).children()
                began_at = time.monotonic()
                os.kill(engine.pid, signal.SIGKILL)
                while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.5)  # what the engine had sent before has arrived
                await crowd.settle(time.monotonic(), SETTLE_S)
                took_s.append(time.monotonic() - began_at)
            if crowd.tally.errors:
                raise RuntimeError(f"streams failed: {crowd.tally.errors[:3]}")
        return took_s
    finally:
        server.process.kill()
        server.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        took_s = asyncio.run(run(args.model, args.kills, args.streams, Path(name)))
    print("all streams back after", ", ".join(f"{one:.1f}" for one in took_s), "s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
