"""Quotas over all frontends: counted in the router, asked for by each frontend.

A frontend counts its own requests as without a router. The router is asked once per request, by
tenants with quotas only, and hears of tokens at intervals. Without a router, or if it does not
answer in time, what the frontend has counted decides.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import count

from headway.clock import Clock
from headway.errors import QuotaError, WireError
from headway.fleet.router.messages import (
    ChargeLease,
    CloseLease,
    LeaseItem,
    LeaseOpened,
    LeaseRefused,
    OpenLease,
    RestoreLease,
    UsedQuota,
)
from headway.tenancy import Meter, QuotaLease, Quotas

ANSWER_S = 0.5
"""How long the router has to accept or refuse a request."""
NEW_S = 5.0
"""Time after its first news of a tenant in which a router takes over what was used before."""
MAX_METERS = 16_384
MAX_LEASES = 65_536
"""Leases of one frontend."""


class FleetMeters:
    """The use of every tenant over all frontends, in the router."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._meters: dict[str, Meter] = {}
        self._known_at: dict[str, float] = {}
        """When the router first heard of each tenant."""

    def handle(
        self, leases: dict[int, QuotaLease], item: LeaseItem
    ) -> LeaseOpened | LeaseRefused | None:
        """Take over what a frontend with these leases says; return the answer, if there is one."""
        match item:
            case OpenLease():
                return self._open(leases, item)
            case RestoreLease():
                meter = self._meter(item.tenant, item.quotas)
                self._add(leases, item.number, meter.restore_lease(item.num_requests))
            case UsedQuota():
                meter = self._meter(item.tenant, item.quotas)
                # A router that has counted all along knows it already.
                if self._clock.now() - self._known_at[item.tenant] < NEW_S:
                    meter.take(item.num_requests, item.num_tokens)
            case ChargeLease():
                if item.number in leases:
                    leases[item.number].charge(item.num_tokens)
            case CloseLease():
                lease = leases.pop(item.number, None)
                if lease is not None:
                    lease.release()
        return None

    def _open(self, leases: dict[int, QuotaLease], item: OpenLease) -> LeaseOpened | LeaseRefused:
        lease = QuotaLease(self._meter(item.tenant, item.quotas), self._clock)
        try:
            lease.reserve(item.num_requests, item.num_prompt_tokens)
        except QuotaError as error:
            return LeaseRefused(item.number, str(error), error.retry_after_s, error.quota)
        self._add(leases, item.number, lease)
        return LeaseOpened(item.number)

    def _add(self, leases: dict[int, QuotaLease], number: int, lease: QuotaLease) -> None:
        if number in leases or len(leases) >= MAX_LEASES:
            lease.release()
            raise WireError("the frontend has too many leases")
        leases[number] = lease

    def _meter(self, tenant: str, quotas: Quotas) -> Meter:
        meter = self._meters.get(tenant)
        if meter is None:
            if len(self._meters) >= MAX_METERS:
                self._forget_idle()
            meter = self._meters[tenant] = Meter(quotas, self._clock)
            self._known_at[tenant] = self._clock.now()
        elif meter.quotas != quotas:
            meter.set_quotas(quotas)
        return meter

    def _forget_idle(self) -> None:
        """Forget the tenants that use nothing, or else the one known longest."""
        self._meters = {name: one for name, one in self._meters.items() if not one.is_idle}
        if len(self._meters) >= MAX_METERS:
            del self._meters[next(iter(self._meters))]
        self._known_at = {name: self._known_at[name] for name in self._meters}


class SharedQuotas:
    """The leases of a frontend that the router counts too."""

    def __init__(self) -> None:
        self._tell: Callable[[LeaseItem], None] | None = None
        """Tells the router; None without one."""
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[LeaseRefused | None]] = {}
        self._leases: dict[int, tuple[str, QuotaLease]] = {}
        self._meters: dict[str, Meter] = {}
        """Meters of the tenants with quotas that were here lately."""
        self._charges: Counter[int] = Counter()
        """Tokens that the router has yet to hear of."""

    async def reserve(self, tenant: str, lease: QuotaLease) -> None:
        """Have the router count a lease, or raise QuotaError; without a router, do nothing."""
        meter, tell = lease.meter, self._tell
        if not meter.has_limits:
            return
        self._meters[tenant] = meter
        if tell is None:
            return
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        num_prompt_tokens = lease.num_prompt_tokens
        tell(OpenLease(number, tenant, meter.quotas, lease.num_requests, num_prompt_tokens))
        is_answered = False
        try:
            async with asyncio.timeout(ANSWER_S):
                refusal = await answer
            is_answered = True
        except TimeoutError:
            return
        finally:
            del self._asked[number]
            if not is_answered and self._tell is not None:
                self._tell(CloseLease(number))
        if refusal is not None:
            lease.settle(0, 0)
            raise QuotaError(refusal.message, refusal.retry_after_s, refusal.quota)
        lease.mirror = _Mirror(self, number)
        self._leases[number] = tenant, lease

    def take(self, item: LeaseOpened | LeaseRefused) -> None:
        """Take over an answer of the router."""
        answer = self._asked.get(item.number)
        if answer is not None and not answer.done():
            answer.set_result(item if isinstance(item, LeaseRefused) else None)

    def share(self, tell: Callable[[LeaseItem], None]) -> None:
        """Have a router count from now on; it is told what was used, and what is in use."""
        self._tell = tell
        self._charges.clear()
        self._meters = {name: one for name, one in self._meters.items() if not one.is_idle}
        for tenant, meter in self._meters.items():
            tell(UsedQuota(tenant, meter.quotas, *meter.used))
        for number, (tenant, lease) in self._leases.items():
            tell(RestoreLease(number, tenant, lease.meter.quotas, lease.num_requests))

    def unshare(self) -> None:
        """Count here alone from now on; what waits for an answer is accepted."""
        self._tell = None
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(None)

    def flush(self) -> None:
        """Tell the router what was charged since the last call."""
        charges, self._charges = self._charges, Counter()
        for number, num_tokens in charges.items():
            if self._tell is not None and num_tokens:
                self._tell(ChargeLease(number, num_tokens))

    def charge(self, number: int, num_tokens: int) -> None:
        if self._tell is not None:
            self._charges[number] += num_tokens

    def release(self, number: int) -> None:
        self._leases.pop(number, None)
        if self._tell is not None:
            num_tokens = self._charges.pop(number, 0)
            if num_tokens:
                self._tell(ChargeLease(number, num_tokens))
            self._tell(CloseLease(number))


class _Mirror:
    """Tells SharedQuotas what one lease takes."""

    def __init__(self, quotas: SharedQuotas, number: int) -> None:
        self._quotas = quotas
        self._number = number

    def charge(self, num_tokens: int) -> None:
        self._quotas.charge(self._number, num_tokens)

    def release(self) -> None:
        self._quotas.release(self._number)
