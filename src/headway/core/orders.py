"""The policies that order the waiting line, by name.

A policy is a claim: a function from a request to a pair, smaller goes first. To add one, write
the function in a file of its own and add a line to ORDERS. Ageing comes with HeapQueue. A policy
whose claims change while requests wait brings its own WaitingQueue, as the fair one does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class Facts:
    """What a policy may look at besides the request."""

    accounts: Accounts = field(default_factory=Accounts)
    is_cached: Callable[[Request], bool] = lambda request: False
    """Is the start of its prompt in the prefix cache?"""


ORDERS: dict[str, Callable[[Facts], WaitingQueue]] = {
    "deadline": lambda facts: HeapQueue(deadline),
    "fair": lambda facts: FairQueue(facts.accounts, facts.is_cached),
    "fcfs": lambda facts: HeapQueue(fcfs),
    "priority": lambda facts: HeapQueue(priority),
}
HEEDING_PRIORITY = frozenset({"fair", "priority"})
"""The policies under which a request's priority makes a difference."""
HEEDING_TARGETS = frozenset({"deadline", "fair"})
"""The policies that order by what was promised, and so may promise something."""


def make_queue(policy: str, facts: Facts | None = None) -> WaitingQueue:
    """An empty waiting line of the policy with this name."""
    if policy not in ORDERS:
        raise ConfigError(f"scheduling_policy must be one of {', '.join(ORDERS)}, got {policy!r}")
    return ORDERS[policy](facts or Facts())
