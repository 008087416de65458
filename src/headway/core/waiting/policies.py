"""The policies that order the waiting queue, by name.

A policy is a function from a request to a SortKey; the smallest key is admitted first. To add one,
write the function in a file of its own and add a line to POLICIES. KeyedQueue brings aging and
suspension of tenants at their KV quota. A policy whose keys change while requests wait brings its
own PolicyQueue, as the fair policy does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from headway.core.request import Request
from headway.core.waiting.accounts import Accounts, TenantAccount
from headway.core.waiting.fair import FairQueue
from headway.core.waiting.keyed import KeyedQueue
from headway.core.waiting.sort_key import SortKey, by_arrival, start_by_us
from headway.errors import ConfigError


class TenantLanes(Protocol):
    """Waiting requests by tenant; a tenant at its KV quota is skipped."""

    def peek_tenant(self, tenant: str) -> Request | None: ...

    def suspend(self, tenant: str) -> None: ...

    def resume(self, tenant: str) -> None: ...

    def is_early(self, request: Request) -> bool:
        """Whether the head goes before its tenant's turn because of its SLO."""
        ...

    def least_two(self) -> list[TenantAccount]:
        """Return the two least served tenants that wait; none if tenants have no shares."""
        ...


class PrefillOrder(Protocol):
    """Order of running requests in prefill, and of waiting SLO requests among them."""

    def order_prefill(self, prefilling: list[Request], aged_before: float) -> list[Request]:
        """Return running requests in prefill, the next to get tokens first.

        A prefill that has run since `aged_before` must not be starved.
        """
        ...

    def goes_before(self, request: Request, other: Request, aged_before: float) -> bool:
        """Whether a waiting SLO request goes before a running prefill."""
        ...


class PolicyQueue(TenantLanes, PrefillOrder, Protocol):
    """Waiting requests in the order of a policy. Each operation is O(log n)."""

    def sort_key(self, request: Request) -> SortKey: ...

    def push(self, request: Request) -> None: ...

    def pop(self) -> Request | None: ...

    def peek(self) -> Request | None: ...

    def remove(self, request: Request) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


def fcfs(request: Request) -> SortKey:
    """First come, first served. No request outranks another, not even an aged one."""
    return by_arrival(request)


def priority(request: Request) -> SortKey:
    """Lower priority number first, as in vLLM; first come, first served among equals."""
    return SortKey(request.priority, (request.arrival_order, request.index))


def deadline(request: Request) -> SortKey:
    """Earliest planned start first; requests without SLO by arrival."""
    return SortKey(0, (start_by_us(request), request.arrival_order, request.index))


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy may read besides the request."""

    accounts: Accounts = field(default_factory=Accounts)
    is_cached: Callable[[Request], bool] = lambda request: False
    """Whether the start of the prompt is in the prefix cache."""


POLICIES: dict[str, Callable[[PolicyContext], PolicyQueue]] = {
    "deadline": lambda context: KeyedQueue(deadline),
    "fair": lambda context: FairQueue(context.accounts, context.is_cached),
    "fcfs": lambda context: KeyedQueue(fcfs),
    "priority": lambda context: KeyedQueue(priority),
}
PRIORITY_AWARE_POLICIES = frozenset({"fair", "priority"})
"""Policies under which the priority of a request makes a difference."""
SLO_AWARE_POLICIES = frozenset({"deadline", "fair"})
"""Policies that order by SLO, and so admit or refuse by it."""


def make_queue(policy: str, context: PolicyContext | None = None) -> PolicyQueue:
    """Return an empty queue of the policy with this name."""
    if policy not in POLICIES:
        raise ConfigError(f"scheduling_policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    return POLICIES[policy](context or PolicyContext())
