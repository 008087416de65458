"""The policies that order the waiting line, by name.

A policy is a claim: a function from a request to a pair, smaller goes first. To add one, write
the function in a file of its own and add a line to ORDERS. A policy whose claims change while
requests wait brings its own WaitingQueue instead of HeapQueue.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.core.queue import Claim, HeapQueue, WaitingQueue
from headway.core.request import Request
from headway.errors import ConfigError


def fcfs(request: Request) -> Claim:
    """First come, first served."""
    return Claim(0, (request.place, request.index))


def priority(request: Request) -> Claim:
    """Lower priority number first, as in vLLM; first come, first served among equals."""
    return Claim(request.priority, (request.place, request.index))


ORDERS: dict[str, Callable[[], WaitingQueue]] = {
    "fcfs": lambda: HeapQueue(fcfs),
    "priority": lambda: HeapQueue(priority),
}


def make_queue(policy: str) -> WaitingQueue:
    """An empty waiting line of the policy with this name."""
    if policy not in ORDERS:
        raise ConfigError(f"scheduling_policy must be one of {', '.join(ORDERS)}, got {policy!r}")
    return ORDERS[policy]()
