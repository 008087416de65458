"""Checks grammars before their requests are sent to an engine.

A grammar is compiled in a thread, with the limits of the engine, and refused if that fails. So an
engine only gets grammars that have been compiled once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from headway.engine.client.async_engine import AsyncEngine
from headway.engine.process.tenant_turns import TenantTurns
from headway.errors import InvalidRequestError
from headway.text.matchers import Matchers

logger = logging.getLogger(__name__)

IDLE_S = 5.0
"""Time without requests after which the process prepares for its first grammar, which stops all
streams for about half a second."""
NUM_WORKERS = 2
"""Grammars that are compiled at a time, beside the engine's own threads."""


class CompileWorkers:
    """Threads that compile for tenants in turn, for each tenant one grammar at a time.

    The threads are not those of `asyncio.to_thread`: slow grammars would keep them from reading
    requests.
    """

    def __init__(self, num_workers: int = NUM_WORKERS) -> None:
        self._num_workers = num_workers
        self._pool = ThreadPoolExecutor(num_workers, "grammars")
        self._waiting: TenantTurns[tuple[Callable[[], None], asyncio.Future[None]]] = TenantTurns()
        self._busy: set[str] = set()
        """Tenants with work in a thread. It stays there if its request is cancelled."""

    async def run(self, tenant: str, work: Callable[[], None]) -> None:
        """Do the work of a tenant when it is the tenant's turn; raise what it raises."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(tenant, (work, done))
        self._start_next()
        await done

    def _start_next(self) -> None:
        while len(self._busy) < self._num_workers:
            found = self._waiting.take(self._busy)
            if found is None:
                return
            tenant, (work, done) = found
            if not done.cancelled():
                self._busy.add(tenant)
                running = asyncio.get_running_loop().run_in_executor(self._pool, work)
                running.add_done_callback(partial(self._end, tenant, done))

    def _end(self, tenant: str, done: asyncio.Future[None], running: asyncio.Future[None]) -> None:
        self._busy.remove(tenant)
        error = None if running.cancelled() else running.exception()
        if not done.done():
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
        self._start_next()


class GrammarChecks:
    """Compiles the grammars of requests; keeps the most recent ones."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._matchers: Matchers | None = None
        self._workers = CompileWorkers()

    async def check(self, grammar: str, tenant: str, *, is_kept: bool = True) -> None:
        """Raise InvalidRequestError if a grammar cannot be honoured."""
        matchers = self._ready_matchers()
        if not matchers.is_compiled(grammar):
            await self._workers.run(tenant, partial(matchers.check, grammar, is_kept=is_kept))

    async def prepare_when_idle(self) -> None:
        """Wait until there has been no request for a while, then prepare for the first grammar."""
        idle_s = 0.0
        while idle_s < IDLE_S:
            await asyncio.sleep(1.0)
            is_idle = self._engine.is_ready and not self._engine.num_requests
            idle_s = idle_s + 1.0 if is_idle else 0.0
        try:
            await asyncio.to_thread(self._ready_matchers().prepare)
        except InvalidRequestError as error:
            logger.warning("%s", error)
        await asyncio.Event().wait()

    def _ready_matchers(self) -> Matchers:
        if self._matchers is None:
            tokenizer, vocab_size = self._engine.tokenizer, self._engine.info.vocab_size
            self._matchers = Matchers(lambda: tokenizer, vocab_size)
        return self._matchers
