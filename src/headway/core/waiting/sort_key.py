"""The order of two requests, in the waiting queue and among running requests."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from headway.core.request import Request

EvictionKey = tuple[float | tuple[int, ...], ...]
"""Orders running requests for preemption; the highest is preempted first."""


class SortKey(NamedTuple):
    """Sort key of a request under a policy; the smallest is admitted first.

    A waiting request may preempt a running one only if its `rank` is strictly smaller, or if both
    are of one `tenant` and its `tenant_priority` is smaller. `order` breaks ties and never changes
    while a request lives. A policy that ignores tenants leaves the last two fields alone.
    """

    rank: float
    order: tuple[int, ...]
    tenant: str | None = None
    tenant_priority: float = 0


def by_arrival(request: Request) -> SortKey:
    """Sort key of rank -inf: before all others, in order of arrival."""
    return SortKey(-inf, (request.arrival_order, request.index))


def effective_key(key: SortKey, request: Request) -> SortKey:
    """Sort key after aging.

    An aged request goes before all that have not aged. Where tenants have shares, it goes before
    the others of its tenant, and a spot request stays spot.
    """
    if not request.is_aged:
        return key
    if key.tenant is None:
        return by_arrival(request)
    return SortKey(key.rank, key.order, key.tenant, -inf)


def start_by_us(request: Request) -> int:
    """Planned start for its SLO in microseconds, as part of an order; requests without SLO last."""
    return int(1e6 * min(request.start_by, 1e12))
