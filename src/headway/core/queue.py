"""The waiting line of a policy: who is next, and whose claim is stronger.

What makes a claim strong is a policy's business; the policies are in headway.core.orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple, Protocol

from headway.core.request import Request


class Claim(NamedTuple):
    """How strong a request's claim is; smaller is stronger.

    Only a strictly smaller `rank` justifies preempting a running request for a waiting one, or,
    between requests of one `tenant`, a smaller `grade`. `place` orders requests of equal rank and
    never changes while a request lives. A policy that knows no tenants leaves the rest alone.
    """

    rank: float
    place: tuple[int, ...]
    tenant: str | None = None
    grade: float = 0


def standing(claim: Claim, request: Request) -> Claim:
    """The claim with what waiting has added to it.

    One that has waited too long is stronger than all that have not, and among its like the place
    in line decides. Where tenants have shares this holds within the tenant, and it is no longer
    one that only takes what others leave.
    """
    if not request.is_aged:
        return claim
    if claim.tenant is None:
        return Claim(-inf, (request.place, request.index))
    return Claim(0, claim.place, claim.tenant, -inf)


def due_us(request: Request) -> int:
    """By when it should be begun, as part of a place; one that was promised nothing, last."""
    return int(1e6 * min(request.due_at, 1e12))


class WaitingQueue(Protocol):
    """The waiting requests, strongest first. Each operation is O(log n)."""

    def claim(self, request: Request) -> Claim: ...

    def push(self, request: Request) -> None: ...

    def pop(self) -> Request | None: ...

    def peek(self) -> Request | None: ...

    def remove(self, request: Request) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class HeapQueue:
    """A heap over claims that change only by ageing, and not while a request is in here. Removal
    leaves a tombstone; when tombstones outnumber the living, the heap is rebuilt, so the
    amortized cost stays O(log n)."""

    def __init__(self, claim: Callable[[Request], Claim]) -> None:
        self._claim = claim
        self._heap: list[tuple[Claim, int, Request]] = []
        self._waiting: dict[str, tuple[int, Request]] = {}
        self._numbers = count()

    def claim(self, request: Request) -> Claim:
        return self._claim(request)

    def push(self, request: Request) -> None:
        if request.id in self._waiting:
            raise RuntimeError(f"request {request.id} is already waiting")
        number = next(self._numbers)
        self._waiting[request.id] = (number, request)
        heappush(self._heap, self._entry(number, request))

    def _entry(self, number: int, request: Request) -> tuple[Claim, int, Request]:
        return standing(self._claim(request), request), number, request

    def pop(self) -> Request | None:
        request = self.peek()
        if request is not None:
            heappop(self._heap)
            del self._waiting[request.id]
        return request

    def peek(self) -> Request | None:
        while self._heap:
            _, number, request = self._heap[0]
            # A tombstone's request is absent, or was pushed again since.
            if self._waiting.get(request.id, (None,))[0] == number:
                return request
            heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        if request not in self:
            raise RuntimeError(f"request {request.id} is not waiting")
        del self._waiting[request.id]
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [self._entry(*alive) for alive in self._waiting.values()]
            heapify(self._heap)

    def __contains__(self, request: Request) -> bool:
        return self._waiting.get(request.id, (0, None))[1] is request

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._waiting.values())
