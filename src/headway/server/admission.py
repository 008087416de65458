"""Admission to the queue, checked before a body is read.

So a refusal is cheap. A request counts from its admission: while its body is read and tokenized,
then while it waits in the engine. Every limit has its refusal, and each refusal has a Retry-After,
computed from the drain rate of the queue.

Under the policy `fair`, twice each limit is the hard limit, and a tenant may have as much queued as
is left free below the hard limit. A tenant alone fills half of the hard limit, which is the limit
itself; a flood from any number of tenants leaves room for the next tenant. All tenants that one
gateway names may together have three times what is free, so a flood of invented names leaves room
for tenants with a key.

Spot requests run after all ordinary ones, so under `fair` they count toward no limit of ordinary
requests, and no ordinary request is expected to wait for one.
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
from headway.tenancy import Meter, QuotaLease, SharedMeters

BYTES_PER_TOKEN = 4
MAX_RETRY_AFTER_S = 60
UNKNOWN_RETRY_AFTER_S = 2
CLOSED_RETRY_AFTER_S = 5
HARD_BOUND = 2
"""Hard limit as a multiple of each limit."""
GATEWAY_PARTS = 3
"""Limit of one gateway's tenants together, as a multiple of what is free."""
NUM_BODIES = 32
"""Limit of request bodies in memory, as a multiple of max_body_bytes."""
_KINDS = {
    "requests": "max_num_queued_reqs",
    "prompt tokens": "max_num_queued_tokens",
    "bytes of request bodies": "max_body_bytes",
}
"""The kinds of a QueueLoad, each with the setting that limits it."""


class DrainRate:
    """Requests per second that leave the queue for the running set.

    Measured only while the queue is backed up. At other times requests leave as fast as they
    arrive, which says nothing about how fast they could leave.
    """

    MIN_BACKED_UP_S = 1.0
    MIN_COUNT = 4
    MAX_MIN_S = 5.0
    """Longest time to measure before a rate is known; MAX_COUNT / 2 requests are enough too."""
    MAX_COUNT = 64
    """Count above which older observations lose half of their weight."""

    def __init__(self, now: float, max_wait_s: float) -> None:
        """Start without a rate; it is to judge waits of `max_wait_s`, and measured half as long.

        The first requests leave slowly, as their prefixes are in no cache.
        """
        self._min_s = min(self.MAX_MIN_S, max_wait_s / 2)
        self._empty_at = now
        self._observed_at = now
        self._count = 0.0
        self._seconds = 0.0
        self._num_queued = 0

    @property
    def per_second(self) -> float | None:
        """The rate; None until it was measured for long enough, or enough requests have left."""
        least = self.MIN_COUNT if self._seconds >= self._min_s else self.MAX_COUNT / 2
        return None if self._count < least else self._count / max(self._seconds, 1e-6)

    def start(self, now: float) -> None:
        """Record that the queue was empty until now."""
        self._empty_at = self._observed_at = now

    def is_backed_up(self, now: float) -> bool:
        """Return whether the queue has not been empty for a while."""
        return now - self._empty_at >= self.MIN_BACKED_UP_S

    def observe(self, now: float, num_left: int, num_queued: int) -> None:
        """Record that `num_left` requests left the queue, and `num_queued` are still in it."""
        if not self._num_queued:  # the queue was empty until now
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
    """Queued requests, prompt tokens and body bytes, of one tenant or of all."""

    num_requests: int = 0
    num_tokens: int = 0
    """Prompt tokens of these requests."""
    num_bytes: int = 0
    """Bytes of bodies that stay in memory until they are tokenized."""

    def plus(self, other: QueueLoad) -> QueueLoad:
        return QueueLoad(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    def minus(self, other: QueueLoad) -> QueueLoad:
        return QueueLoad(self[0] - other[0], self[1] - other[1], self[2] - other[2])


NOTHING = QueueLoad()


@dataclass(slots=True, eq=False)
class Reservation:
    """What an HTTP request holds in the queue until the engine has it."""

    tenant: str
    load: QueueLoad
    gateway: str | None = None
    """The gateway tenant that named this tenant, if it is in no file."""
    lease: QuotaLease | None = None
    """The request's lease of its tenant's quotas."""
    is_spot: bool = False

    def take_lease(self) -> QuotaLease | None:
        """Return the lease; the caller must then release it."""
        lease, self.lease = self.lease, None
        return lease


class _PendingRequests:
    """The reservations in force, and their sums."""

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
        """Remove a reservation; do nothing if it is not in force."""
        if reservation in self._pending:
            self._pending.remove(reservation)
            self.total = self.total.minus(reservation.load)
            left = self.of.pop(reservation.tenant).minus(reservation.load)
            if left.num_requests:
                self.of[reservation.tenant] = left


class AdmissionController:
    """Counts queued requests, and refuses requests above the limits."""

    def __init__(self, config: ServerConfig, engine: AsyncEngine, clock: Clock) -> None:
        self.is_closed = False
        """Whether the server stops: it accepts no further request."""
        self.is_paused = False
        """Whether an administrator drains the server: it may accept requests again."""
        self.shared_meters: SharedMeters | None = None
        """Counts the quotas over several frontends, if something does."""
        self._config = config
        self._engine = engine
        self.clock = clock
        self._limits = QueueLoad(
            config.max_num_queued_reqs,
            config.max_num_queued_tokens,
            NUM_BODIES * config.max_body_bytes,
        )
        self._hard = QueueLoad(*(HARD_BOUND * limit for limit in self._limits))
        self._pending = {False: _PendingRequests(), True: _PendingRequests()}
        """Ordinary requests and spot requests."""
        self._gateways: dict[str, str] = {}
        """Gateway of each unlisted tenant that has requests queued, or recently had."""
        self._num_admitted = 0
        self._rate = DrainRate(clock.now(), config.max_queue_wait_s)
        engine.subscribe(self._observe)

    @property
    def num_queued(self) -> int:
        """Requests on their way to the engine, and requests that wait in the engine."""
        num_pending = sum(one.total.num_requests for one in self._pending.values())
        return len(self._engine.waiting) + num_pending

    def close(self) -> None:
        """Refuse every new request; queued requests stay."""
        self.is_closed = True

    @contextmanager
    def admit(
        self,
        tenant: str,
        num_bytes: int | None,
        meter: Meter | None = None,
        gateway: str | None = None,
        is_spot: bool = False,
    ) -> Generator[Reservation, None, None]:
        """Reserve a position for a request until the engine has it, or refuse it.

        A body of unknown length counts as the longest, with as many tokens as fit.
        """
        if self.is_closed or self.is_paused:
            doing = "shutting down" if self.is_closed else "draining"
            raise OverloadedError(
                f"the server is {doing}; send the request to another server",
                CLOSED_RETRY_AFTER_S,
            )
        limit = self._engine.info.capacity.max_model_len
        num_tokens = limit if num_bytes is None else min(num_bytes // BYTES_PER_TOKEN, limit)
        # A longer body is refused while it is read.
        longest = self._config.max_body_bytes
        num_bytes = longest if num_bytes is None else min(num_bytes, longest)
        load = QueueLoad(1, num_tokens, num_bytes)
        reservation = Reservation(tenant, load, gateway, is_spot=is_spot)
        pending = self._pending[is_spot]
        self._check(reservation)
        # The server's own refusals come first: they use no quota of the tenant.
        reservation.lease = meter.open_lease() if meter is not None else None
        pending.add(reservation)
        self._remember_gateway(reservation)
        try:
            yield reservation
        finally:
            pending.discard(reservation)
            lease = reservation.take_lease()
            if lease is not None:
                lease.release()

    def resize(self, reservation: Reservation, num_requests: int, num_tokens: int) -> None:
        """Update a reservation to the request's true size, or refuse the request."""
        pending = self._pending[reservation.is_spot]
        pending.discard(reservation)
        reservation.load = QueueLoad(num_requests, num_tokens, reservation.load.num_bytes)
        self._check(reservation)
        if reservation.lease is not None:
            reservation.lease.reserve(num_requests, num_tokens)
        pending.add(reservation)

    async def reserve_shared(self, reservation: Reservation) -> None:
        """Refuse a request that is over a quota by the use of all frontends together."""
        if reservation.lease is not None and self.shared_meters is not None:
            await self.shared_meters.reserve(reservation.tenant, reservation.lease)

    async def refuse_expired(self) -> None:
        """Refuse requests that have waited longer than `max_queue_age_s`.

        A request with a TTFT target or deadline that is longer is not refused before it.
        """
        now = self.clock.now()
        for stream in list(self._engine.waiting):
            waited_s = now - stream.command.arrived_at
            if waited_s <= self._config.max_queue_age_s:
                break  # the requests after it are younger
            targets = stream.command.terms.targets
            target_times = [at for at in (targets.ttft_s, targets.deadline_s) if at is not None]
            if waited_s <= min(target_times, default=0.0):
                continue
            reason = f"not admitted to the running set within {waited_s:.0f} s (max_queue_age_s)"
            error = self._overloaded(reason, len(self._engine.waiting))
            await self._engine.refuse(stream, error)

    def _check(self, reservation: Reservation) -> None:
        counts_spot = self._counts_spot(reservation)
        own = self._load_of(reservation.tenant, counts_spot)
        num_ahead = self._num_ahead_of(reservation.tenant, counts_spot)
        limit = self._config.max_num_queued_reqs_per_key
        if limit is not None and own.num_requests + reservation.load.num_requests > limit:
            raise TenantLimitError(
                f"{own.num_requests} requests of this tenant are waiting; "
                f"max_num_queued_reqs_per_key is {limit}",
                self._retry_after_s(num_ahead),
            )
        total = self._total(counts_spot)
        # A request to an empty queue is never too large: it would be refused forever.
        if total.num_requests:
            is_full = self._is_full_for(reservation, own, total)
            for (kind, setting), amount, is_too_much in zip(
                _KINDS.items(), total, is_full, strict=True
            ):
                if is_too_much:
                    raise self._overloaded(f"{amount} {kind} are waiting ({setting})", num_ahead)
        wait_s = self._expected_wait_s(num_ahead)
        if wait_s > self._config.max_queue_wait_s:
            reason = f"admission is expected in {wait_s:.0f} s (max_queue_wait_s)"
            raise self._overloaded(reason, num_ahead)

    def _is_full_for(
        self, reservation: Reservation, own: QueueLoad, total: QueueLoad
    ) -> list[bool]:
        """Return, for each kind of load, whether there is no room for the request."""
        after = total.plus(reservation.load)
        if not self._is_shared:
            return [amount > limit for amount, limit in zip(after, self._limits, strict=True)]
        group = self._load_of_gateway(reservation, total)
        if not own.num_requests:
            # The first request of a tenant needs some room only, however large it is. Otherwise
            # many small requests of others could keep it out forever.
            free = self._hard.minus(total)
            return [
                room <= 0 or of_gateway >= GATEWAY_PARTS * room
                for room, of_gateway in zip(free, group, strict=True)
            ]
        free = self._hard.minus(after)
        own_after, group_after = own.plus(reservation.load), group.plus(reservation.load)
        return [
            amount > room or of_gateway > GATEWAY_PARTS * room
            for room, amount, of_gateway in zip(free, own_after, group_after, strict=True)
        ]

    @property
    def _is_shared(self) -> bool:
        return self._engine.info.scheduling_policy == "fair"

    def _counts_spot(self, reservation: Reservation) -> bool:
        """Return whether spot requests are ahead of a request, or beside it."""
        return reservation.is_spot or not self._is_shared

    def _total(self, counts_spot: bool) -> QueueLoad:
        waiting = self._engine.waiting
        total = self._pending[False].total.plus(QueueLoad(*waiting.totals.total))
        if counts_spot:
            spot = self._pending[True].total.plus(QueueLoad(*waiting.spot_totals.total))
            total = total.plus(spot)
        return total

    def _load_of(self, tenant: str, counts_spot: bool) -> QueueLoad:
        waiting = self._engine.waiting
        load = self._pending[False].of.get(tenant, NOTHING)
        load = load.plus(QueueLoad(*waiting.totals.of(tenant)))
        if counts_spot:
            load = load.plus(self._pending[True].of.get(tenant, NOTHING))
            load = load.plus(QueueLoad(*waiting.spot_totals.of(tenant)))
        return load

    def _load_of_gateway(self, reservation: Reservation, total: QueueLoad) -> QueueLoad:
        """Return what a gateway and the tenants that it names have queued."""
        gateway = reservation.tenant if reservation.gateway is None else reservation.gateway
        counts_spot = self._counts_spot(reservation)
        load = self._load_of(gateway, counts_spot)
        # Below this total no gateway can exceed its limit, so its tenants need not be summed.
        if all(
            (GATEWAY_PARTS + 1) * amount < GATEWAY_PARTS * bound
            for amount, bound in zip(total.plus(reservation.load), self._hard, strict=True)
        ):
            return load
        num_requests, num_tokens, num_bytes = load
        for name, by in self._gateways.items():
            if by == gateway:
                of_tenant = self._load_of(name, counts_spot)
                num_requests += of_tenant[0]
                num_tokens += of_tenant[1]
                num_bytes += of_tenant[2]
        return QueueLoad(num_requests, num_tokens, num_bytes)

    def _remember_gateway(self, reservation: Reservation) -> None:
        """Record the gateway of an unlisted tenant; drop tenants with no requests now and then."""
        if reservation.gateway is None:
            return
        self._gateways[reservation.tenant] = reservation.gateway
        if len(self._gateways) > 2 * self._hard.num_requests:
            self._gateways = {
                name: gateway
                for name, gateway in self._gateways.items()
                if self._load_of(name, True).num_requests
            }

    def _num_ahead_of(self, tenant: str, counts_spot: bool) -> int:
        """Return how many requests the engine will admit before the next one of this tenant.

        Under `fair`, for each request of this tenant one of every other waiting tenant, so that a
        flood of one tenant does not delay another tenant.
        """
        if counts_spot:
            return len(self._engine.waiting)
        totals = self._engine.waiting.totals
        known = totals.tenants
        pending = self._pending[False].of
        num_tenants = len(known) + sum(one not in known for one in {*pending, tenant})
        num_ahead = num_tenants * (totals.of(tenant).num_requests + 1)
        return min(totals.total.num_requests, num_ahead)

    def _expected_wait_s(self, num_waiting: int) -> float:
        """Return the expected wait; 0 unless the queue is backed up now.

        An earlier drain rate says nothing about a queue that has only begun to form.
        """
        now = self.clock.now()
        rate = self._rate.per_second if self._rate.is_backed_up(now) else None
        return 0.0 if rate is None else num_waiting / rate

    def _overloaded(self, reason: str, num_waiting: int) -> OverloadedError:
        after_s = self._retry_after_s(num_waiting)
        return OverloadedError(f"the server is overloaded: {reason}", after_s)

    def _retry_after_s(self, num_waiting: int) -> int:
        """Return the seconds until the waiting requests are admitted, at the current rate."""
        wait_s = self._expected_wait_s(num_waiting)
        if not wait_s:
            return UNKNOWN_RETRY_AFTER_S
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(wait_s)))

    def _observe(self, _batch: EventBatch) -> None:
        num_left, self._num_admitted = (
            self._engine.num_admitted - self._num_admitted,
            self._engine.num_admitted,
        )
        num_waiting = self._engine.waiting.totals.total.num_requests
        self._rate.observe(self.clock.now(), num_left, num_waiting)
