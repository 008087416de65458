"""Checks grammars before their requests are sent to an engine.

A grammar is compiled in a thread, with the limits of the engine, and refused if that fails. So an
engine only gets grammars that have been compiled once. A tenant has one compilation at a time:
others do not wait behind its further ones.
"""

from __future__ import annotations

import asyncio
import logging
from weakref import WeakValueDictionary

from headway.engine.client.async_engine import AsyncEngine
from headway.errors import InvalidRequestError
from headway.text.matchers import Matchers

logger = logging.getLogger(__name__)

IDLE_S = 5.0
"""Time without requests after which the process prepares for its first grammar, which stops all
streams for about half a second."""


class GrammarChecks:
    """Compiles the grammars of requests; keeps the most recent ones."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._matchers: Matchers | None = None
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def check(self, grammar: str, tenant: str, *, is_kept: bool = True) -> None:
        """Raise InvalidRequestError if a grammar cannot be honoured."""
        matchers = self._ready_matchers()
        if matchers.is_compiled(grammar):
            return
        lock = self._locks.setdefault(tenant, asyncio.Lock())
        async with lock:
            await asyncio.to_thread(matchers.check, grammar, is_kept=is_kept)

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
