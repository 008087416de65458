"""Fleets of fake engines; what a test starts ends with it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.support.fleet_loads import (
    NUM_KINDS,
    Counts,
    bodies,
    check_counts,
    check_fault,
    read_counts,
    run_undisturbed,
)
from benchmarks.support.fleets import Fleet
from benchmarks.support.history import History
from benchmarks.support.servers import RunningServer

STEP_S = 0.01
NUM_BLOCKS = 2048
"""Enough for all streams in one engine: a gap is then due to the fault alone."""


@pytest.fixture
def fleet(tmp_path: Path, tokenizer_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, tokenizer_path)
    yield fleet
    fleet.close()


class Trio:
    """Three engines and a frontend, for tests that mend what they have broken."""

    def __init__(self, folder: Path, tokenizer_path: Path, requests: list[dict[str, Any]]) -> None:
        self.fleet = Fleet(folder, tokenizer_path)
        for _ in range(3):
            self.fleet.start_engine(
                {"engine_hang_s": 2.0}, step_s=2 * STEP_S, num_blocks=NUM_BLOCKS
            )
        # Every engine has requests: by predicted TTFT, engines of one fake speed are all the same.
        self.server = self.fleet.start_frontend(routing="least-loaded")
        self.requests = requests
        self.references: list[History] = []

    async def start(self) -> None:
        await asyncio.to_thread(self.server.wait_ready)
        await self.wait_up()
        self.references = await run_undisturbed(self.server, self.requests)

    async def mend(self) -> Counts:
        """Start the engines that have ended, and wait until all are up; return the counts."""
        for engine in self.fleet.engines:
            if engine.process.poll() is not None:
                engine.restart()
        await self.wait_up()
        return await read_counts(self.server)

    async def wait_up(self) -> None:
        for engine in self.fleet.engines:
            address = engine.address
            await wait_log(self.server, lambda log, address=address: is_up(log, address))

    async def check_fault(self, fault: Callable[[], Awaitable[None]]) -> list[History]:
        """Run all streams with a fault; check tokens and counts."""
        before = await self.mend()
        histories = await check_fault(self.server, self.requests, self.references, fault)
        await check_counts(self.server, histories, before=before)
        return histories


@pytest.fixture(scope="module")
def trio(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_path: Path, is_full: bool
) -> Iterator[Trio]:
    requests = bodies() if is_full else bodies(125, NUM_KINDS)
    trio = Trio(tmp_path_factory.mktemp("trio"), tokenizer_path, requests)
    try:
        asyncio.run(trio.start())
        yield trio
    finally:
        trio.fleet.close()


def is_up(log: str, address: str) -> bool:
    """Return whether an engine is up, by the last line of a frontend's log about it."""
    lines = re.findall(rf"engine {re.escape(address)}( is up|: | is lost| has failed)", log)
    return bool(lines) and lines[-1] == " is up"


async def wait_log(
    process: Any, is_there: Callable[[str], bool] | str, timeout_s: float = 30.0
) -> None:
    """Wait until the log of a process has a text, or passes a test."""
    test = is_there if callable(is_there) else lambda log: is_there in log
    deadline = time.monotonic() + timeout_s
    while not test(process.log):
        assert time.monotonic() < deadline, process.log
        await asyncio.sleep(0.02)


async def wait_up(fleet: Fleet, frontend: RunningServer) -> None:
    """Wait until a frontend has all engines."""
    await asyncio.to_thread(frontend.wait_ready)
    await wait_log(frontend, lambda log: log.count(" is up: ") >= len(fleet.engines))
