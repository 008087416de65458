"""Aging: which waiting requests have waited longer than max_wait_s."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from headway.core.request import Request

MAX_AGED_PER_STEP = 8
"""Requests that age in one step, the oldest first: a burst of arrivals must not slow one step."""


class AgingTimer:
    """A heap of the times at which waiting requests age."""

    def __init__(self, max_wait_s: float, is_waiting: Callable[[Request], bool]) -> None:
        self._max_wait_s = max_wait_s
        self._is_waiting = is_waiting
        self._heap: list[tuple[float, int, Request]] = []
        self._numbers = count()

    def add(self, request: Request, num_waiting: int) -> None:
        """Watch a request that starts to wait; `num_waiting` bounds what the heap keeps."""
        heappush(self._heap, (self._ages_at(request), next(self._numbers), request))
        if len(self._heap) > 2 * num_waiting + 64:
            valid = {id(entry[2]): entry for entry in self._heap if self._is_valid(entry)}
            self._heap = list(valid.values())
            heapify(self._heap)

    def pop_expired(self, now: float) -> Iterator[Request]:
        """Yield the requests that age now, at most MAX_AGED_PER_STEP."""
        num_left = MAX_AGED_PER_STEP
        while self._heap and self._heap[0][0] <= now and num_left:
            entry = heappop(self._heap)
            if self._is_valid(entry):
                num_left -= 1
                yield entry[2]

    def _is_valid(self, entry: tuple[float, int, Request]) -> bool:
        """Whether the entry is of the present wait of its request."""
        at, _, request = entry
        is_young = self._is_waiting(request) and not request.is_aged
        return is_young and self._ages_at(request) == at

    def _ages_at(self, request: Request) -> float:
        """Return when it ages: max_wait_s after its wait began, not before its planned start.

        A wait begins at arrival or at the last preemption; time spent running does not count.
        """
        at = request.state_since + self._max_wait_s
        return at if request.start_by == inf else max(at, request.start_by)
