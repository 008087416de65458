"""Threads that compile grammars: tenants in turn, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headway.errors import InvalidRequestError
from headway.server.grammars import CompileWorkers

NUM_DEFAULT_THREADS = 32
"""Most threads that `asyncio.to_thread` has."""


class SlowWork:
    """Work of tenants that ends when the test says so."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_end = threading.Event()

    def of(self, name: str) -> None:
        self.begun.append(name)
        assert self.may_end.wait(10)


async def until_begun(work: SlowWork, count: int) -> None:
    async with asyncio.timeout(10):
        while len(work.begun) < count:
            await asyncio.sleep(0.001)


async def run(workers: CompileWorkers, work: SlowWork, tenant: str, name: str) -> None:
    await workers.run(tenant, lambda: work.of(name))


async def test_a_tenant_has_one_worker_and_others_have_their_turn() -> None:
    workers, work = CompileWorkers(2), SlowWork()
    async with asyncio.TaskGroup() as group:
        for at in range(10):
            group.create_task(run(workers, work, "hostile", f"hostile-{at}"))
        await until_begun(work, 1)
        group.create_task(run(workers, work, "other", "other-0"))
        await until_begun(work, 2)
        assert work.begun == ["hostile-0", "other-0"], "a worker is free for it"
        group.create_task(run(workers, work, "third", "third-0"))
        await asyncio.sleep(0)
        work.may_end.set()
    assert work.begun.index("third-0") <= 3, "it waits for one of each other tenant at most"
    assert len(work.begun) == 12


async def test_requests_are_read_while_many_tenants_compile() -> None:
    workers, work = CompileWorkers(), SlowWork()
    async with asyncio.TaskGroup() as group:
        for at in range(2 * NUM_DEFAULT_THREADS):
            group.create_task(run(workers, work, f"tenant-{at}", f"{at}"))
        await until_begun(work, 1)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "read"), 5) == "read"
        work.may_end.set()


async def test_work_that_nobody_waits_for_is_not_begun_and_keeps_its_thread() -> None:
    workers, work = CompileWorkers(1), SlowWork()
    begun = asyncio.create_task(run(workers, work, "a", "a-0"))
    await until_begun(work, 1)
    waiting = asyncio.create_task(run(workers, work, "a", "a-1"))
    last = asyncio.create_task(run(workers, work, "b", "b-0"))
    await asyncio.sleep(0)
    begun.cancel()
    waiting.cancel()
    await asyncio.gather(begun, waiting, return_exceptions=True)
    assert work.begun == ["a-0"], "the thread is not free yet"
    work.may_end.set()
    await asyncio.wait_for(last, 10)
    assert work.begun == ["a-0", "b-0"]


async def test_a_refusal_is_raised() -> None:
    def refuse() -> None:
        raise InvalidRequestError("no such keyword")

    workers = CompileWorkers()
    with pytest.raises(InvalidRequestError, match="no such keyword"):
        await workers.run("a", refuse)
    await workers.run("a", lambda: None)
