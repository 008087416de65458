"""The waiting line: who is next, and whose claim is stronger.

What makes a claim strong is a policy's business; the policies are in headway.core.orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from headway.core.request import Request


class Claim(NamedTuple):
    """How strong a request's claim is; smaller is stronger.

    Only a strictly smaller `rank` justifies preempting a running request for a waiting one;
    `place` orders requests of equal rank and never changes while a request lives.
    """

    rank: float
    place: tuple[int, ...]


class WaitingQueue(Protocol):
    """The waiting requests, strongest claim first. Each operation is O(log n)."""

    def claim(self, request: Request) -> Claim: ...

    def push(self, request: Request) -> None: ...

    def pop(self) -> Request | None: ...

    def remove(self, request: Request) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class HeapQueue:
    """A heap over fixed claims. Removal leaves a tombstone; when tombstones outnumber the
    living, the heap is rebuilt, so the amortized cost stays O(log n)."""

    def __init__(self, claim: Callable[[Request], Claim]) -> None:
        self._claim = claim
        self._heap: list[tuple[Claim, Request]] = []
        self._waiting: dict[str, Request] = {}

    def claim(self, request: Request) -> Claim:
        return self._claim(request)

    def push(self, request: Request) -> None:
        if request.id in self._waiting:
            raise RuntimeError(f"request {request.id} is already waiting")
        self._waiting[request.id] = request
        heappush(self._heap, (self._claim(request), request))

    def pop(self) -> Request | None:
        while self._heap:
            _, request = heappop(self._heap)
            # A tombstone's request is absent, or is a newer object under the same id.
            if self._waiting.get(request.id) is request:
                del self._waiting[request.id]
                return request
        return None

    def remove(self, request: Request) -> None:
        if self._waiting.get(request.id) is not request:
            raise RuntimeError(f"request {request.id} is not waiting")
        del self._waiting[request.id]
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [(self._claim(alive), alive) for alive in self._waiting.values()]
            heapify(self._heap)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())
