"""Who starts the hosts: this machine, or a child process that knows Ray.

A placer is told again and again which hosts there should be, and makes it so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from headway.config import ray_environment
from headway.errors import ConfigError
from headway.fleet.manage.folders import FleetFolder
from headway.fleet.manage.host import HostArguments
from headway.fleet.manage.members import HostPlace
from headway.fleet.manage.processes import end_process, find_alive, read_record, start_daemon

logger = logging.getLogger(__name__)

HOST_MAIN = "headway.fleet.manage.host_main"
RAY_PLACER = "headway.fleet.ray.placer"
MIN_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
MAX_SILENCE_S = 15.0
"""Time after which Ray counts as out of reach."""
KILL_S = 90.0
"""Time without an answer after which the child is replaced."""
CLOSE_S = 20.0


class PlacerReport(msgspec.Struct, frozen=True):
    """What a placer has done, as one line of JSON from its process."""

    hosts: list[str] = []
    """Hosts that Ray has, started or waiting for room."""
    problem: str = ""


class PlacerRequest(msgspec.Struct, frozen=True):
    """Which hosts there should be, as one line of JSON to the process of a placer."""

    hosts: dict[str, float]
    """CPUs of each host."""


class Placer(Protocol):
    """Starts and ends hosts."""

    problem: str
    """Why hosts cannot be started now; empty if they can."""

    async def place(self, places: Sequence[HostPlace]) -> None:
        """Have these hosts run, and no others; called again and again."""
        ...

    async def close(self) -> None:
        """Leave the hosts as they are, and release what the placer has."""
        ...


class LocalPlacer:
    """Runs hosts on this machine, as processes without a parent."""

    def __init__(self, folder: FleetFolder, arguments: HostArguments) -> None:
        self.problem = ""
        self._arguments = arguments
        self._hosts = folder.machine / "hosts"
        self._hosts.mkdir(mode=0o700, exist_ok=True)

    async def place(self, places: Sequence[HostPlace]) -> None:
        await asyncio.to_thread(self._place, {place.name for place in places})

    def _place(self, names: set[str]) -> None:
        for path in self._hosts.glob("*.json"):
            if path.stem not in names:
                record = read_record(path)
                if record is not None:
                    end_process(record, 5.0)
                path.unlink(missing_ok=True)
        for name in sorted(names):
            path = self._hosts / f"{name}.json"
            if find_alive(path) is None:
                arguments = msgspec.json.encode(replace(self._arguments, host=name)).decode()
                command = [sys.executable, "-m", HOST_MAIN, arguments]
                try:
                    start_daemon(command, path, path.with_suffix(".log"))
                    self.problem = ""
                except (ConfigError, OSError) as error:
                    self.problem = str(error)

    async def close(self) -> None:
        pass


class RayPlacer:
    """Has a child process place hosts by Ray.

    A process that has joined a Ray cluster is ended 60 s after the head is lost; this one is not.
    """

    def __init__(self, address: str, namespace: str, arguments: HostArguments) -> None:
        self.problem = "Ray is not connected yet"
        given = msgspec.json.encode(arguments).decode()
        self._command = [sys.executable, "-m", RAY_PLACER, address, namespace, given]
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._hosts: set[str] = set()
        self._answered_at = 0.0
        self._next_start_at = 0.0
        self._backoff_s = MIN_BACKOFF_S

    async def place(self, places: Sequence[HostPlace]) -> None:
        now = time.monotonic()
        process = self._process
        if process is None or process.returncode is not None:
            if now < self._next_start_at:
                return
            process = await self._start(now)
        elif now - self._answered_at > KILL_S:
            process.kill()
        elif now - self._answered_at > MAX_SILENCE_S:
            self.problem = f"Ray has not answered for {now - self._answered_at:.0f} s"
        request = PlacerRequest({place.name: place.cpus for place in places})
        if process.stdin is not None:
            with contextlib.suppress(ConnectionError):
                process.stdin.write(msgspec.json.encode(request) + b"\n")
                await process.stdin.drain()

    async def _start(self, now: float) -> Process:
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, start_new_session=True, env=ray_environment()
        )
        self._answered_at, self._next_start_at = now, now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        self._reader = asyncio.create_task(self._read(process))
        return process

    async def _read(self, process: Process) -> None:
        if process.stdout is None:
            return
        while line := await process.stdout.readline():
            try:
                report = msgspec.json.decode(line, type=PlacerReport)
            except (msgspec.DecodeError, ValueError):
                continue  # Ray itself has printed it
            self._hosts, self.problem = set(report.hosts), report.problem
            self._answered_at = time.monotonic()
            if not report.problem:
                self._backoff_s = MIN_BACKOFF_S
        code = await process.wait()
        self.problem = self.problem or f"the process that knows Ray ended with {code}"
        logger.warning("%s", self.problem)

    async def close(self) -> None:
        """Wait until Ray has no host left, and end the child."""
        deadline = time.monotonic() + CLOSE_S
        while self._hosts and not self.problem and time.monotonic() < deadline:
            await self.place([])
            await asyncio.sleep(0.2)
        process = self._process
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
        if self._reader is not None:
            self._reader.cancel()
