"""Sends a workload to an endpoint, open or closed loop, and records it.

Open loop: each request is sent at its own time. Closed loop: each of N clients sends its next
request after the previous response.

A client whose request was refused or failed pauses first, or a dead server would get requests as
fast as errors can be counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from headway.bench.load.http import HttpClient
from headway.bench.load.openai import Target, ask
from headway.bench.load.records import LoadRecord, Outcome
from headway.bench.steal import Steal, StealMeter
from headway.clock import Clock, SystemClock
from headway.errors import ConfigError
from headway.workload import WorkItem

Progress = Callable[[int, int], None]
PAUSE_AFTER_FAILURE_S = 0.1


class Requests(Protocol):
    """What `run_load` needs of a workload."""

    @property
    def concurrency(self) -> int | None:
        """Number of clients of a closed loop; None for an open loop."""
        ...

    def items(self, seed: int) -> Iterator[WorkItem]: ...


@dataclass(frozen=True, slots=True)
class RunLimits:
    """When a run stops sending; requests in flight are always awaited.

    At least one limit is needed.
    """

    num_requests: int | None = None
    duration_s: float | None = None
    max_concurrency: int = 1024
    """Most requests in flight; a request beyond waits, and its wait counts as latency."""

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration_s is None:
            raise ConfigError("a run needs a number of requests, a duration, or both")


@dataclass(slots=True)
class LoadRun:
    """Result of a run; partial if the run is interrupted."""

    records: list[LoadRecord] = field(default_factory=list[LoadRecord])
    started_at: float = 0.0
    """Time of the system clock from which the times of the records count."""
    elapsed_s: float = 0.0
    cpu_share: float = 0.0
    """CPU time of the client over wall time; near 1 the client is the bottleneck."""
    steal: Steal | None = None
    """Steal of the machine of the client, which may be another than the server's."""


async def run_load(
    target: Target,
    workload: Requests,
    limits: RunLimits,
    seed: int = 0,
    run: LoadRun | None = None,
    progress: Progress | None = None,
) -> LoadRun:
    """Send the workload until a limit is reached, and await the responses.

    A caller that may cancel passes `run`, which holds the partial result. Calls `progress` with
    (requests done, total or 0).
    """
    run = LoadRun() if run is None else run
    client = HttpClient(target.origin)
    sender = _Sender(client, target, limits, run, progress or (lambda done, total: None))
    run.started_at = sender.clock.started_at
    items = islice(workload.items(seed), limits.num_requests)
    cpu_s, meter = time.process_time(), StealMeter()
    try:
        if workload.concurrency is None:
            await sender.open_loop(items)
        else:
            await sender.closed_loop(items, min(workload.concurrency, limits.max_concurrency))
    finally:
        run.elapsed_s = sender.now()
        run.cpu_share = (time.process_time() - cpu_s) / run.elapsed_s
        run.steal = meter.read()
        client.close()
    return run


class _RelativeClock:
    """A clock that starts at 0 when created."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.started_at = clock.now()

    def now(self) -> float:
        return self._clock.now() - self.started_at


@dataclass(slots=True)
class _Sender:
    client: HttpClient
    target: Target
    limits: RunLimits
    run: LoadRun
    progress: Progress
    clock: _RelativeClock = field(default_factory=lambda: _RelativeClock(SystemClock()))
    num_done: int = 0

    def now(self) -> float:
        return self.clock.now()

    async def open_loop(self, items: Iterator[WorkItem]) -> None:
        slots = asyncio.Semaphore(self.limits.max_concurrency)

        async def send(item: WorkItem, record: LoadRecord) -> None:
            try:
                await self._send(item, record)
            finally:
                slots.release()

        async with asyncio.TaskGroup() as group:
            # Make the next item before its time, not after.
            for item in items:
                if self._is_over(item.at):
                    break
                # A timer may fire early by its resolution; no request may be sent early.
                while (wait_s := item.at - self.now()) > 0:
                    await asyncio.sleep(wait_s)
                await slots.acquire()
                group.create_task(send(item, self._add(item, item.at)))

    async def closed_loop(self, items: Iterator[WorkItem], concurrency: int) -> None:
        async def caller() -> None:
            while not self._is_over(self.now()):
                item = next(items, None)
                if item is None:
                    return
                record = self._add(item, self.now())
                await self._send(item, record)
                if record.outcome is not Outcome.COMPLETED:
                    await asyncio.sleep(PAUSE_AFTER_FAILURE_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(caller())

    def _is_over(self, at: float) -> bool:
        return self.limits.duration_s is not None and at >= self.limits.duration_s

    def _add(self, item: WorkItem, scheduled_at: float) -> LoadRecord:
        records = self.run.records
        record = LoadRecord(len(records), item.tenant, scheduled_at, len(item.prompt_token_ids))
        records.append(record)
        return record

    async def _send(self, item: WorkItem, record: LoadRecord) -> None:
        await ask(self.client, self.target, item, record, self.clock)
        self.num_done += 1
        self.progress(self.num_done, self.limits.num_requests or 0)
