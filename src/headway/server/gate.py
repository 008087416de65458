"""Who may join the queue. Asked before a body is read, so a refusal costs next to nothing.

A request counts from the moment it is let in: while its body is read and tokenized, then while it
waits in the engine for a seat. Every bound has its refusal, and each refusal says when to come
back, from how fast the queue has been seen to drain.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from headway.clock import Clock
from headway.config import ServerConfig
from headway.engine.async_engine import AsyncEngine
from headway.engine.messages import EventBatch
from headway.engine.waiting import ByTenant, Sums
from headway.errors import OverloadedError, TenantLimitError
from headway.tenancy import Meter, Visit

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
        self._num_queued = 0

    @property
    def per_second(self) -> float | None:
        """None until enough has been seen."""
        return None if self._count < self.MIN_COUNT else self._count / max(self._seconds, 1e-6)

    def start(self, now: float) -> None:
        """The queue was empty until now, for however long nobody looked."""
        self._empty_at = self._marked_at = now

    def is_backed_up(self, now: float) -> bool:
        """Whether the queue has not been empty for a while."""
        return now - self._empty_at >= self.MIN_BACKED_UP_S

    def observe(self, now: float, num_left: int, num_queued: int) -> None:
        """So many left the queue just now, and so many are still in it."""
        if not self._num_queued:  # it was empty until now
            self.start(now)
        self._num_queued = num_queued
        if self.is_backed_up(now):
            self._count += num_left
            self._seconds += now - self._marked_at
        self._marked_at = now
        if not num_queued:
            self._empty_at = now
        if self._count > self.MAX_COUNT:
            self._count /= 2
            self._seconds /= 2


@dataclass(slots=True, eq=False)
class Place:
    """What an HTTP request holds in the queue while it is on its way to the engine."""

    tenant: str
    num_tokens: int
    num_requests: int = 1
    visit: Visit | None = None
    """What it takes of its tenant's quotas."""

    def hand_over(self) -> Visit | None:
        """The visit, which whoever asks for it then has to end."""
        visit, self.visit = self.visit, None
        return visit


class _OnTheWay:
    """The places that are held, and their sums."""

    def __init__(self) -> None:
        self.sums = ByTenant()
        self._places: set[Place] = set()

    def add(self, place: Place) -> None:
        self._places.add(place)
        self.sums.add(place.tenant, place.num_requests, place.num_tokens)

    def discard(self, place: Place) -> None:
        """Nothing happens if it is not held."""
        if place in self._places:
            self._places.remove(place)
            self.sums.add(place.tenant, -place.num_requests, -place.num_tokens)


class Ahead(NamedTuple):
    """What goes before a request that comes now."""

    num_requests: int
    num_tokens: int
    num_waiting: int
    """Of the requests, those that the engine has already."""


class Gate:
    """Counts what waits, and refuses what is too much."""

    def __init__(self, config: ServerConfig, engine: AsyncEngine, clock: Clock) -> None:
        self.is_closed = False
        self._config = config
        self._engine = engine
        self.clock = clock
        self._places = _OnTheWay()
        self._num_seated = 0
        self._rate = DrainRate(clock.now())
        engine.subscribe(self._observe)

    @property
    def num_queued(self) -> int:
        """Requests on their way to the engine, and those that wait in it for a seat."""
        return len(self._engine.waiting) + self._places.sums.total.num_requests

    def close(self) -> None:
        """Let nobody in any more; those inside stay."""
        self.is_closed = True

    @contextmanager
    def let_in(
        self, tenant: str, num_bytes: int | None, meter: Meter | None = None
    ) -> Generator[Place, None, None]:
        """Hold a place for a request of so many bytes until the engine has it, or refuse it. One
        that does not say how many may have as many tokens as fit."""
        if self.is_closed:
            raise OverloadedError("the server is shutting down", CLOSED_RETRY_AFTER_S)
        limit = self._engine.info.capacity.max_model_len
        num_tokens = limit if num_bytes is None else min(num_bytes // BYTES_PER_TOKEN, limit)
        place = Place(tenant, num_tokens)
        self._check(place)
        # The server's own refusals come first: they cost a tenant nothing.
        place.visit = meter.enter() if meter is not None else None
        self._places.add(place)
        try:
            yield place
        finally:
            self._places.discard(place)
            visit = place.hand_over()
            if visit is not None:
                visit.leave()

    def resize(self, place: Place, num_requests: int, num_tokens: int) -> None:
        """Now that it is known what is in it: hold a place for so much, or refuse it."""
        self._places.discard(place)
        place.num_requests, place.num_tokens = num_requests, num_tokens
        self._check(place)
        if place.visit is not None:
            place.visit.grow(num_requests, num_tokens)
        self._places.add(place)

    async def sweep(self) -> None:
        """Refuse those that have waited for too long after all; one that was promised a later
        time, not before it."""
        now = self.clock.now()
        for stream in list(self._engine.waiting):
            waited_s = now - stream.command.arrived_at
            if waited_s <= self._config.max_queue_age_s:
                break  # those behind it are younger
            targets = stream.command.terms.targets
            promised = [at for at in (targets.ttft_s, targets.deadline_s) if at is not None]
            if waited_s <= min(promised, default=0.0):
                continue
            reason = f"no seat became free within {waited_s:.0f} s"
            error = self._overloaded(reason, len(self._engine.waiting))
            await self._engine.refuse(stream, error)

    def _check(self, place: Place) -> None:
        config, ahead = self._config, self._ahead_of(place.tenant)
        num_own = self._own(place.tenant).num_requests
        limit = config.max_num_queued_reqs_per_key
        if limit is not None and num_own + place.num_requests > limit:
            raise TenantLimitError(
                f"{num_own} requests of this tenant are waiting already",
                self._retry_after_s(ahead.num_waiting),
            )
        # One that comes when nothing waits is never too much: it would be too much forever.
        num_requests, num_tokens, num_waiting = ahead
        if num_requests and num_requests + place.num_requests > config.max_num_queued_reqs:
            raise self._overloaded(f"{num_requests} requests are waiting already", num_waiting)
        if num_requests and num_tokens + place.num_tokens > config.max_num_queued_tokens:
            raise self._overloaded(f"{num_tokens} prompt tokens are waiting already", num_waiting)
        wait_s = self._expected_wait_s(num_waiting)
        if wait_s > config.max_queue_wait_s:
            raise self._overloaded(f"a seat is expected in {wait_s:.0f} s", num_waiting)

    def _own(self, tenant: str) -> Sums:
        waiting, coming = self._engine.waiting.sums.of(tenant), self._places.sums.of(tenant)
        return Sums(
            waiting.num_requests + coming.num_requests, waiting.num_tokens + coming.num_tokens
        )

    def _ahead_of(self, tenant: str) -> Ahead:
        """Everything that is queued; but where tenants have shares, for each of its own requests
        only one of every other tenant that waits, so that nobody's flood is anybody else's."""
        line, coming = self._engine.waiting, self._places.sums
        num_tokens = line.sums.total.num_tokens + coming.total.num_tokens
        everything = Ahead(self.num_queued, num_tokens, len(line))
        if self._engine.info.scheduling_policy != "fair":
            return everything
        known = line.sums.tenants
        num_tenants = len(known) + sum(one not in known for one in {*coming.tenants, tenant})
        own, num_waiting = self._own(tenant), line.sums.of(tenant).num_requests
        return Ahead(
            min(everything.num_requests, num_tenants * own.num_requests),
            min(everything.num_tokens, num_tenants * own.num_tokens),
            min(everything.num_waiting, num_tenants * (num_waiting + 1)),
        )

    def _expected_wait_s(self, num_waiting: int) -> float:
        """0 unless requests are backed up now: how fast they left some other time says nothing
        of a queue that has only just begun to form."""
        now = self.clock.now()
        rate = self._rate.per_second if self._rate.is_backed_up(now) else None
        return 0.0 if rate is None else num_waiting / rate

    def _overloaded(self, reason: str, num_waiting: int) -> OverloadedError:
        after_s = self._retry_after_s(num_waiting)
        return OverloadedError(f"the server is overloaded: {reason}", after_s)

    def _retry_after_s(self, num_waiting: int) -> int:
        """When those that wait now will have been seated, if it goes on as it has."""
        wait_s = self._expected_wait_s(num_waiting)
        if not wait_s:
            return UNKNOWN_RETRY_AFTER_S
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(wait_s)))

    def _observe(self, _batch: EventBatch) -> None:
        num_left, self._num_seated = (
            self._engine.num_seated - self._num_seated,
            self._engine.num_seated,
        )
        self._rate.observe(self.clock.now(), num_left, len(self._engine.waiting))
