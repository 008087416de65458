"""Who may join the queue. Asked before a body is read, so a refusal costs next to nothing.

A request counts from the moment it is let in: while its body is read and tokenized, then while it
waits in the engine for a seat. Every bound has its refusal, and each refusal says when to come
back, from how fast the queue has been seen to drain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from headway.clock import Clock
from headway.config import ServerConfig
from headway.engine.async_engine import AsyncEngine
from headway.engine.messages import EventBatch
from headway.errors import OverloadedError, TenantLimitError

BYTES_PER_TOKEN = 4
MAX_RETRY_AFTER_S = 60
UNKNOWN_RETRY_AFTER_S = 2
CLOSED_RETRY_AFTER_S = 5


class DrainRate:
    """Requests per second that leave the queue for a seat, measured only while it is backed up:
    at other times they leave as fast as they come, which says nothing of how fast they could."""

    MIN_BACKED_UP_S = 1.0
    MIN_COUNT = 4
    MAX_COUNT = 64
    """Beyond it, old times lose half their weight."""

    def __init__(self, now: float) -> None:
        self._empty_at = now
        self._marked_at = now
        self._count = 0.0
        self._seconds = 0.0

    @property
    def per_second(self) -> float | None:
        """None until enough has been seen."""
        return None if self._count < self.MIN_COUNT else self._count / max(self._seconds, 1e-6)

    def start(self, now: float) -> None:
        """The queue was empty until now, for however long nobody looked."""
        self._empty_at = self._marked_at = now

    def observe(self, now: float, num_left: int, num_queued: int) -> None:
        """So many left the queue just now, and so many are still in it."""
        if now - self._empty_at >= self.MIN_BACKED_UP_S:
            self._count += num_left
            self._seconds += now - self._marked_at
        self._marked_at = now
        if not num_queued:
            self._empty_at = now
        if self._count > self.MAX_COUNT:
            self._count /= 2
            self._seconds /= 2


@dataclass(slots=True)
class _Entry:
    tenant: str
    num_tokens: int


class Gate:
    """Counts what waits, and refuses what is too much."""

    def __init__(self, config: ServerConfig, engine: AsyncEngine, clock: Clock) -> None:
        self.is_closed = False
        self._config = config
        self._engine = engine
        self._clock = clock
        self._entries: dict[int, _Entry] = {}
        self._num_let_in = 0
        self._rate = DrainRate(clock.now())
        engine.subscribe(self._observe)

    @property
    def num_queued(self) -> int:
        """Requests on their way to the engine, and those that wait in it for a seat."""
        return self._engine.num_waiting + len(self._entries)

    def close(self) -> None:
        """Let nobody in any more; those inside stay."""
        self.is_closed = True

    @contextmanager
    def let_in(self, tenant: str, num_bytes: int) -> Generator[None, None, None]:
        """Hold a place for a request of so many bytes until the engine has it, or refuse it."""
        if self.is_closed:
            raise OverloadedError("the server is shutting down", CLOSED_RETRY_AFTER_S)
        limit = self._engine.info.capacity.max_model_len
        num_tokens = min(num_bytes // BYTES_PER_TOKEN, limit)
        self._check(tenant, num_tokens)
        if not self._engine.num_waiting and not self._entries:
            self._rate.start(self._clock.now())
        self._num_let_in += 1
        number = self._num_let_in
        self._entries[number] = _Entry(tenant, num_tokens)
        try:
            yield
        finally:
            del self._entries[number]

    async def sweep(self) -> None:
        """Refuse those that have waited for too long after all."""
        now = self._clock.now()
        for stream in list(self._engine.waiting):
            waited_s = now - stream.command.arrived_at
            if waited_s <= self._config.max_queue_age_s:
                break  # those behind it are younger
            error = self._overloaded(f"no seat became free within {waited_s:.0f} s")
            await self._engine.refuse(stream, error)

    def _check(self, tenant: str, num_tokens: int) -> None:
        config = self._config
        num_queued = self.num_queued
        if config.max_num_queued_reqs_per_key is not None:
            counts = Counter(entry.tenant for entry in self._entries.values())
            counts.update(stream.command.tenant for stream in self._engine.waiting)
            if counts[tenant] >= config.max_num_queued_reqs_per_key:
                raise TenantLimitError(
                    f"{counts[tenant]} requests of this key are waiting already",
                    self._retry_after_s(),
                )
        if num_queued >= config.max_num_queued_reqs:
            raise self._overloaded(f"{num_queued} requests are waiting already")
        num_queued_tokens = self._engine.num_waiting_tokens
        num_queued_tokens += sum(entry.num_tokens for entry in self._entries.values())
        # One that is alone is never too much: it would be too much forever.
        if num_queued and num_queued_tokens + num_tokens > config.max_num_queued_tokens:
            raise self._overloaded(f"{num_queued_tokens} prompt tokens are waiting already")
        rate = self._rate.per_second
        if rate is not None and num_queued > rate * config.max_queue_wait_s:
            raise self._overloaded(f"a seat is expected in {num_queued / rate:.0f} s")

    def _overloaded(self, reason: str) -> OverloadedError:
        return OverloadedError(f"the server is overloaded: {reason}", self._retry_after_s())

    def _retry_after_s(self) -> int:
        """When the queue of now will have drained, if it goes on as it has."""
        rate = self._rate.per_second
        if rate is None:
            return UNKNOWN_RETRY_AFTER_S
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(self.num_queued / rate)))

    def _observe(self, batch: EventBatch) -> None:
        num_admitted = sum(not event.is_resumed for event in batch.admitted)
        self._rate.observe(self._clock.now(), num_admitted, self._engine.num_waiting)
