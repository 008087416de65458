"""Whether requests got what they were promised, and tenants what they were due. Pure counting.

A sample with targets is good if it ended by itself and met every one of them. One whose client left
while all was well counts neither way. Service is counted in weighted tokens, with the weights that
the scheduler charges by, divided by the tenant's own; blocks held over time are left out.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from headway.core.request import FinishReason
from headway.core.slo.targets import met
from headway.core.terms import NO_TARGETS, Terms
from headway.observe.metrics.lifetimes import Timings

NUM_LATEST = 256
_GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class Verdict(StrEnum):
    """How a request with targets ended."""

    MET = "met"
    MISSED = "missed"
    UNKNOWN = "unknown"
    """There were no targets, or its client left before one was missed."""


def verdict_on(timings: Timings) -> Verdict:
    """Hold a request against its targets."""
    targets = timings.terms.targets
    if targets == NO_TARGETS:
        return Verdict.UNKNOWN
    ttft_s = timings.ttft_s
    if ttft_s is None and timings.reason is FinishReason.ABORT:
        ttft_s = timings.e2e_s  # no first token came for at least so long
    if not met(targets, ttft_s, timings.time_per_output_token_s, timings.e2e_s):
        return Verdict.MISSED
    if timings.reason in _GOOD_ENDS:
        return Verdict.MET
    return Verdict.UNKNOWN if timings.reason is FinishReason.ABORT else Verdict.MISSED


class GoodputWindow:
    """The share of the latest requests with targets that met them."""

    def __init__(self) -> None:
        self._latest: deque[bool] = deque(maxlen=NUM_LATEST)

    def add(self, is_met: bool) -> None:
        self._latest.append(is_met)

    @property
    def share(self) -> float:
        """1 while there is nothing to say."""
        return sum(self._latest) / len(self._latest) if self._latest else 1.0


@dataclass(slots=True, eq=False)
class _TenantService:
    service: float = 0.0
    num_live: int = 0
    num_waiting: int = 0


class Fairness:
    """The gap in service between tenants that all have something waiting.

    A tenant that comes back from having nothing is lifted to the least served of the others: time
    in which it asked for nothing is no debt. Tenants with nothing live are forgotten.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantService] = {}
        self._least: list[tuple[float, int, _TenantService]] = []
        """Heap by service. Service only grows, so an entry may be too low; it is corrected when
        it comes up. Entries of tenants that are gone are dropped then, or when they are most."""
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._tenants)

    @property
    def gap(self) -> float:
        """Between the most and the least served; 0 unless two tenants have something waiting."""
        backlogged = [one.service for one in self._tenants.values() if one.num_waiting]
        return max(backlogged) - min(backlogged) if len(backlogged) > 1 else 0.0

    def arrive(self, terms: Terms, is_waiting: bool = True) -> None:
        tenant = self._tenants.get(terms.tenant)
        if tenant is None:
            tenant = self._tenants[terms.tenant] = _TenantService(self._least_service())
            self._push(tenant)
        tenant.num_live += 1
        tenant.num_waiting += is_waiting

    def wait(self, terms: Terms, change: int) -> None:
        """One more of its requests waits, or one fewer."""
        if tenant := self._tenants.get(terms.tenant):
            tenant.num_waiting = max(0, tenant.num_waiting + change)

    def serve(self, terms: Terms, weighted_tokens: float) -> None:
        if tenant := self._tenants.get(terms.tenant):
            tenant.service += weighted_tokens / terms.weight

    def leave(self, terms: Terms, is_waiting: bool) -> None:
        if tenant := self._tenants.get(terms.tenant):
            tenant.num_live -= 1
            tenant.num_waiting = max(0, tenant.num_waiting - is_waiting)
            if tenant.num_live <= 0:
                del self._tenants[terms.tenant]

    def _least_service(self) -> float:
        """Least service of the tenants here, 0 if there are none; O(log n) amortized."""
        heap = self._least
        while heap:
            service, number, tenant = heap[0]
            if tenant.num_live <= 0:
                heapq.heappop(heap)
            elif service < tenant.service:
                heapq.heapreplace(heap, (tenant.service, number, tenant))
            else:
                return service
        return 0.0

    def _push(self, tenant: _TenantService) -> None:
        if len(self._least) > 2 * len(self._tenants):
            self._least = [entry for entry in self._least if entry[2].num_live > 0]
            heapq.heapify(self._least)
        self._num_pushed += 1
        heapq.heappush(self._least, (tenant.service, self._num_pushed, tenant))
