"""A heap of requests with removal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from headway.core.request import Request
from headway.core.waiting.sort_key import SortKey, effective_key


class RequestHeap:
    """Requests by effective sort key.

    A key may change only while its request is outside the heap. `remove` leaves a tombstone; when
    tombstones outnumber requests the heap is rebuilt, so the amortized cost stays O(log n).
    """

    def __init__(self, key: Callable[[Request], SortKey]) -> None:
        self._key = key
        self._heap: list[tuple[SortKey, int, Request]] = []
        self._members: dict[str, tuple[int, Request]] = {}
        self._numbers = count()

    def push(self, request: Request) -> None:
        if request.id in self._members:
            raise RuntimeError(f"request {request.id} is already in the heap")
        number = next(self._numbers)
        self._members[request.id] = (number, request)
        heappush(self._heap, self._entry(number, request))

    def _entry(self, number: int, request: Request) -> tuple[SortKey, int, Request]:
        return effective_key(self._key(request), request), number, request

    def pop(self) -> Request | None:
        request = self.peek()
        if request is not None:
            heappop(self._heap)
            del self._members[request.id]
        return request

    def peek(self) -> Request | None:
        while self._heap:
            _, number, request = self._heap[0]
            # A tombstone's request is absent, or was pushed again since.
            if self._members.get(request.id, (None,))[0] == number:
                return request
            heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        if request not in self:
            raise RuntimeError(f"request {request.id} is not in the heap")
        del self._members[request.id]
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [self._entry(*member) for member in self._members.values()]
            heapify(self._heap)

    def __contains__(self, request: Request) -> bool:
        return self._members.get(request.id, (0, None))[1] is request

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._members.values())
