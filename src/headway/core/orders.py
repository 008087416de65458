"""The policies that order the waiting line, by name.

A policy is a claim: a function from a request to a pair, smaller goes first. To add one, write
the function in a file of its own and add a line to ORDERS. Ageing comes with HeapQueue. A policy
whose claims change while requests wait brings its own WaitingQueue, as the fair one does.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from headway.core.fair import FairQueue
from headway.core.queue import Claim, HeapQueue, WaitingQueue, due_us
from headway.core.request import Request
from headway.core.service import Accounts
from headway.errors import ConfigError


def fcfs(request: Request) -> Claim:
    """First come, first served. Nobody outranks anybody, not even by a long wait."""
    return Claim(-inf, (request.place, request.index))


def priority(request: Request) -> Claim:
    """Lower priority number first, as in vLLM; first come, first served among equals."""
    return Claim(request.priority, (request.place, request.index))


def deadline(request: Request) -> Claim:
    """Who must be begun first to keep a promise; those without one by when they came."""
    return Claim(0, (due_us(request), request.place, request.index))


ORDERS: dict[str, Callable[[Accounts], WaitingQueue]] = {
    "deadline": lambda accounts: HeapQueue(deadline),
    "fair": FairQueue,
    "fcfs": lambda accounts: HeapQueue(fcfs),
    "priority": lambda accounts: HeapQueue(priority),
}
HEEDING_PRIORITY = frozenset({"fair", "priority"})
"""The policies under which a request's priority makes a difference."""
HEEDING_TARGETS = frozenset({"deadline", "fair"})
"""The policies that order by what was promised, and so may promise something."""


def make_queue(policy: str, accounts: Accounts | None = None) -> WaitingQueue:
    """An empty waiting line of the policy with this name, over these accounts."""
    if policy not in ORDERS:
        raise ConfigError(f"scheduling_policy must be one of {', '.join(ORDERS)}, got {policy!r}")
    return ORDERS[policy](Accounts() if accounts is None else accounts)
