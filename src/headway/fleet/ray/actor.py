"""A host as a Ray actor."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import msgspec
import ray
from ray.util import get_node_ip_address

from headway.errors import ConfigError
from headway.fleet.manage.host import Host, HostArguments

logger = logging.getLogger(__name__)

RETRY_S = 2.0


class HostActor:
    """Runs a host in a thread, for as long as Ray runs the actor.

    Its argument is JSON text, so that nothing of Headway is unpickled.
    """

    def __init__(self, arguments: str) -> None:
        given: dict[str, Any] = msgspec.json.decode(arguments)
        node = get_node_ip_address()
        node = f"[{node}]" if ":" in node else node
        self._arguments = msgspec.convert({**given, "node": node}, HostArguments)
        self._problem = ""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                asyncio.run(_run_host(self._arguments))
            except ConfigError as error:
                self._problem = f"on {self._arguments.node}: {error}"
            except Exception as error:
                logger.exception("a host failed")
                self._problem = f"on {self._arguments.node}: {error}"
            time.sleep(RETRY_S)

    def problem(self) -> str:
        """Return why this host cannot work; empty if it can."""
        return self._problem


async def _run_host(arguments: HostArguments) -> None:
    await Host(arguments).run()


def start_actor(name: str, cpus: float, arguments: str) -> None:
    """Have Ray start a host, unless it has one of this name."""
    make = ray.remote(HostActor).options(  # pyright: ignore[reportAttributeAccessIssue]
        name=name,
        lifetime="detached",
        num_cpus=cpus,
        max_restarts=-1,
        scheduling_strategy="SPREAD",
        get_if_exists=True,
    )
    make.remote(arguments)
