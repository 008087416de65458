"""Who may join the queue. Asked before a body is read, so a refusal costs next to nothing.

A request counts from the moment it is let in: while its body is read and tokenized, then while it
waits in the engine for a seat. Every bound has its refusal, and each refusal says when to come
back, from how fast the queue has been seen to drain.

Where tenants have shares, twice each limit is the hard bound, and a tenant may have as much queued
as is left free below it. A tenant alone fills half of the hard bound, which is the limit; a flood
of any number of tenants leaves room for the next one. All guests of a gateway together may have
three times what is free, so a flood of made-up names leaves room for those with a key.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from headway.clock import Clock
from headway.config import ServerConfig
from headway.engine.client.async_engine import AsyncEngine
from headway.engine.process.messages import EventBatch
from headway.errors import OverloadedError, TenantLimitError
from headway.tenancy import Meter, QuotaLease

BYTES_PER_TOKEN = 4
MAX_RETRY_AFTER_S = 60
UNKNOWN_RETRY_AFTER_S = 2
CLOSED_RETRY_AFTER_S = 5
HARD_BOUND = 2
"""Times a limit: the most that is ever queued, but for the last request let in."""
GATEWAY_PARTS = 3
"""Times what is free: the most that the guests of one gateway have queued together."""
NUM_BODIES = 32
"""Bodies of the largest size that may be held at a time; twice as many are the hard bound."""
_KINDS = ("requests", "prompt tokens", "bytes of request bodies")


class DrainRate:
    """Requests per second that leave the queue for a seat, measured only while it is backed up:
    at other times they leave as fast as they come, which says nothing of how fast they could."""

    MIN_BACKED_UP_S = 1.0
    MIN_COUNT = 4
    MAX_COUNT = 64
    """Beyond it, old times lose half their weight."""

    def __init__(self, now: float) -> None:
        self._empty_at = now
        self._observed_at = now
        self._count = 0.0
        self._seconds = 0.0
        self._num_queued = 0

    @property
    def per_second(self) -> float | None:
        """None until enough has been seen."""
        return None if self._count < self.MIN_COUNT else self._count / max(self._seconds, 1e-6)

    def start(self, now: float) -> None:
        """The queue was empty until now, for however long nobody looked."""
        self._empty_at = self._observed_at = now

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
            self._seconds += now - self._observed_at
        self._observed_at = now
        if not num_queued:
            self._empty_at = now
        if self._count > self.MAX_COUNT:
            self._count /= 2
            self._seconds /= 2


class QueueLoad(NamedTuple):
    """What is queued of somebody, or of all."""

    num_requests: int = 0
    num_tokens: int = 0
    """Of their prompts."""
    num_bytes: int = 0
    """Of bodies that are held until their tokens are known."""

    def plus(self, other: QueueLoad) -> QueueLoad:
        return QueueLoad(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    def minus(self, other: QueueLoad) -> QueueLoad:
        return QueueLoad(self[0] - other[0], self[1] - other[1], self[2] - other[2])


NOTHING = QueueLoad()


@dataclass(slots=True, eq=False)
class Reservation:
    """What an HTTP request holds in the queue while it is on its way to the engine."""

    tenant: str
    load: QueueLoad
    gateway: str | None = None
    """The tenant that named this one, if it has no key of its own."""
    lease: QuotaLease | None = None
    """What it takes of its tenant's quotas."""

    def take_lease(self) -> QuotaLease | None:
        """The visit, which whoever asks for it then has to end."""
        lease, self.lease = self.lease, None
        return lease


class _PendingRequests:
    """The places that are held, and their sums."""

    def __init__(self) -> None:
        self.total = NOTHING
        self.of: dict[str, QueueLoad] = {}
        self._pending: set[Reservation] = set()

    def add(self, reservation: Reservation) -> None:
        self._pending.add(reservation)
        self.total = self.total.plus(reservation.load)
        self.of[reservation.tenant] = self.of.get(reservation.tenant, NOTHING).plus(
            reservation.load
        )

    def discard(self, reservation: Reservation) -> None:
        """Nothing happens if it is not held."""
        if reservation in self._pending:
            self._pending.remove(reservation)
            self.total = self.total.minus(reservation.load)
            left = self.of.pop(reservation.tenant).minus(reservation.load)
            if left.num_requests:
                self.of[reservation.tenant] = left


class AdmissionController:
    """Counts what waits, and refuses what is too much."""

    def __init__(self, config: ServerConfig, engine: AsyncEngine, clock: Clock) -> None:
        self.is_closed = False
        self._config = config
        self._engine = engine
        self.clock = clock
        self._limits = QueueLoad(
            config.max_num_queued_reqs,
            config.max_num_queued_tokens,
            NUM_BODIES * config.max_body_bytes,
        )
        self._hard = QueueLoad(*(HARD_BOUND * limit for limit in self._limits))
        self._pending = _PendingRequests()
        self._gateways: dict[str, str] = {}
        """Which gateway named a guest; of those that are queued, and some that were."""
        self._num_admitted = 0
        self._rate = DrainRate(clock.now())
        engine.subscribe(self._observe)

    @property
    def num_queued(self) -> int:
        """Requests on their way to the engine, and those that wait in it for a seat."""
        return len(self._engine.waiting) + self._pending.total.num_requests

    def close(self) -> None:
        """Let nobody in any more; those inside stay."""
        self.is_closed = True

    @contextmanager
    def admit(
        self,
        tenant: str,
        num_bytes: int | None,
        meter: Meter | None = None,
        gateway: str | None = None,
    ) -> Generator[Reservation, None, None]:
        """Hold a place for a request until the engine has it, or refuse it.

        A body of unknown length counts as the longest, with as many tokens as fit.
        """
        if self.is_closed:
            raise OverloadedError("the server is shutting down", CLOSED_RETRY_AFTER_S)
        limit = self._engine.info.capacity.max_model_len
        num_tokens = limit if num_bytes is None else min(num_bytes // BYTES_PER_TOKEN, limit)
        # A longer body is refused when it is read.
        longest = self._config.max_body_bytes
        num_bytes = longest if num_bytes is None else min(num_bytes, longest)
        reservation = Reservation(tenant, QueueLoad(1, num_tokens, num_bytes), gateway)
        self._check(reservation)
        # The server's own refusals come first: they cost a tenant nothing.
        reservation.lease = meter.open_lease() if meter is not None else None
        self._pending.add(reservation)
        self._remember_gateway(reservation)
        try:
            yield reservation
        finally:
            self._pending.discard(reservation)
            lease = reservation.take_lease()
            if lease is not None:
                lease.release()

    def resize(self, reservation: Reservation, num_requests: int, num_tokens: int) -> None:
        """Now that it is known what is in it: hold a place for so much, or refuse it."""
        self._pending.discard(reservation)
        reservation.load = QueueLoad(num_requests, num_tokens, reservation.load.num_bytes)
        self._check(reservation)
        if reservation.lease is not None:
            reservation.lease.reserve(num_requests, num_tokens)
        self._pending.add(reservation)

    async def refuse_expired(self) -> None:
        """Refuse those that have waited for too long after all; one that was promised a later
        time, not before it."""
        now = self.clock.now()
        for stream in list(self._engine.waiting):
            waited_s = now - stream.command.arrived_at
            if waited_s <= self._config.max_queue_age_s:
                break  # those behind it are younger
            targets = stream.command.terms.targets
            target_times = [at for at in (targets.ttft_s, targets.deadline_s) if at is not None]
            if waited_s <= min(target_times, default=0.0):
                continue
            reason = f"not admitted to the running set within {waited_s:.0f} s"
            error = self._overloaded(reason, len(self._engine.waiting))
            await self._engine.refuse(stream, error)

    def _check(self, reservation: Reservation) -> None:
        own = self._load_of(reservation.tenant)
        num_ahead = self._num_ahead_of(reservation.tenant)
        limit = self._config.max_num_queued_reqs_per_key
        if limit is not None and own.num_requests + reservation.load.num_requests > limit:
            raise TenantLimitError(
                f"{own.num_requests} requests of this tenant are waiting already",
                self._retry_after_s(num_ahead),
            )
        total = self._total
        # One that comes when nothing waits is never too much: it would be too much forever.
        if total.num_requests:
            is_full = self._is_full_for(reservation, own, total)
            for kind, amount, is_too_much in zip(_KINDS, total, is_full, strict=True):
                if is_too_much:
                    raise self._overloaded(f"{amount} {kind} are waiting already", num_ahead)
        wait_s = self._expected_wait_s(num_ahead)
        if wait_s > self._config.max_queue_wait_s:
            raise self._overloaded(f"admission is expected in {wait_s:.0f} s", num_ahead)

    def _is_full_for(
        self, reservation: Reservation, own: QueueLoad, total: QueueLoad
    ) -> list[bool]:
        """Whether there is no room for it, of each kind."""
        after = total.plus(reservation.load)
        if not self._is_shared:
            return [amount > limit for amount, limit in zip(after, self._limits, strict=True)]
        group = self._load_of_gateway(reservation, total)
        if not own.num_requests:
            # However large, it needs only some room: else others, all of them small, would keep
            # it out forever.
            free = self._hard.minus(total)
            return [
                room <= 0 or of_gateway >= GATEWAY_PARTS * room
                for room, of_gateway in zip(free, group, strict=True)
            ]
        free = self._hard.minus(after)
        mine, guests = own.plus(reservation.load), group.plus(reservation.load)
        return [
            amount > room or of_gateway > GATEWAY_PARTS * room
            for room, amount, of_gateway in zip(free, mine, guests, strict=True)
        ]

    @property
    def _is_shared(self) -> bool:
        return self._engine.info.scheduling_policy == "fair"

    @property
    def _total(self) -> QueueLoad:
        return self._pending.total.plus(QueueLoad(*self._engine.waiting.totals.total))

    def _load_of(self, tenant: str) -> QueueLoad:
        waiting = QueueLoad(*self._engine.waiting.totals.of(tenant))
        return self._pending.of.get(tenant, NOTHING).plus(waiting)

    def _load_of_gateway(self, reservation: Reservation, total: QueueLoad) -> QueueLoad:
        """What the guests of the same gateway have queued, and the gateway itself."""
        gateway = reservation.tenant if reservation.gateway is None else reservation.gateway
        load = self._load_of(gateway)
        # Below this they cannot have too much, and need not be added up.
        if all(
            (GATEWAY_PARTS + 1) * amount < GATEWAY_PARTS * bound
            for amount, bound in zip(total.plus(reservation.load), self._hard, strict=True)
        ):
            return load
        num_requests, num_tokens, num_bytes = load
        waiting, pending = self._engine.waiting.totals.of, self._pending.of.get
        for name, by in self._gateways.items():
            if by == gateway:
                here, there = waiting(name), pending(name, NOTHING)
                num_requests += here[0] + there[0]
                num_tokens += here[1] + there[1]
                num_bytes += there[2]
        return QueueLoad(num_requests, num_tokens, num_bytes)

    def _remember_gateway(self, reservation: Reservation) -> None:
        """Note who named a guest; those with nothing queued are forgotten now and then."""
        if reservation.gateway is None:
            return
        self._gateways[reservation.tenant] = reservation.gateway
        if len(self._gateways) > 2 * self._hard.num_requests:
            self._gateways = {
                name: gateway
                for name, gateway in self._gateways.items()
                if self._load_of(name).num_requests
            }

    def _num_ahead_of(self, tenant: str) -> int:
        """Requests that the engine has and will seat before the next one of this tenant.

        Where tenants have shares, for each of its own one of every other tenant that waits, so
        that nobody's flood is anybody else's.
        """
        waiting = self._engine.waiting
        if not self._is_shared:
            return len(waiting)
        known = waiting.totals.tenants
        num_tenants = len(known) + sum(one not in known for one in {*self._pending.of, tenant})
        return min(len(waiting), num_tenants * (waiting.totals.of(tenant).num_requests + 1))

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
        num_left, self._num_admitted = (
            self._engine.num_admitted - self._num_admitted,
            self._engine.num_admitted,
        )
        self._rate.observe(self.clock.now(), num_left, len(self._engine.waiting))
