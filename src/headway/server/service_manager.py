"""Tells the service manager (systemd) when a process is ready, stops, and is alive.

The protocol of sd_notify(3): datagrams to the socket that the environment names. Without one,
nothing is sent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

logger = logging.getLogger(__name__)

SIGNS_PER_LIMIT = 3
"""Signs of life within the time after which the manager takes the process for hung."""


class ServiceManager:
    """Sends states to the service manager; never fails, and never waits."""

    def __init__(self, address: str | None, watchdog_s: float | None) -> None:
        self._address = address
        if address is not None and address.startswith("@"):  # Linux's abstract namespace
            self._address = "\0" + address[1:]
        self._watchdog_s = None if address is None else watchdog_s

    def say_ready(self, address: str) -> None:
        """Say that requests are served."""
        self._send(f"READY=1\nSTATUS=serving {address}")

    def say_stopping(self, status: str = "draining") -> None:
        """Say that the process ends, maybe after a drain."""
        self._send(f"STOPPING=1\nSTATUS={status}")

    async def show_life(self, is_alive: Callable[[], bool]) -> None:
        """Send signs of life for as long as `is_alive`, if the manager asks for them."""
        if self._watchdog_s is None:
            await asyncio.Event().wait()
            return
        while True:
            if is_alive():
                self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / SIGNS_PER_LIMIT)

    def _send(self, state: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.sendto(state.encode(), self._address)
        except OSError as error:
            logger.warning("cannot tell the service manager %r: %s", state, error)
