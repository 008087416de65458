"""A waiting queue ordered by a function from request to sort key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count

from headway.core.request import Request
from headway.core.waiting.accounts import TenantAccount
from headway.core.waiting.request_heap import RequestHeap
from headway.core.waiting.sort_key import SortKey, by_arrival, effective_key

Head = tuple[SortKey, int, Request]


class KeyedQueue:
    """One lane per tenant; the smallest key among the lanes' heads is next.

    Lanes let a whole tenant be suspended in O(1), however many requests it has waiting. The heap
    of heads is corrected lazily: an entry counts only while its request is the head of its lane.
    """

    def __init__(self, key: Callable[[Request], SortKey]) -> None:
        self._key = key
        self._lanes: dict[str, RequestHeap] = {}
        self._suspended: set[str] = set()
        self._heads: list[Head] = []
        self._numbers = count()
        self._num_requests = 0

    def sort_key(self, request: Request) -> SortKey:
        return self._key(request)

    def push(self, request: Request) -> None:
        tenant = request.terms.tenant
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = RequestHeap(self._key)
        lane.push(request)
        self._num_requests += 1
        if lane.peek() is request:
            self._list_head(tenant)

    def pop(self) -> Request | None:
        request = self.peek()
        if request is not None:
            heappop(self._heads)
            self._lanes[request.terms.tenant].pop()
            self._removed(request.terms.tenant)
        return request

    def peek(self) -> Request | None:
        while self._heads:
            request = self._heads[0][2]
            if self._is_head(request):
                return request
            heappop(self._heads)
        return None

    def peek_lanes(self, num_lanes: int) -> list[Request]:
        """Return the heads of the first lanes, at most so many."""
        entries: list[Head] = []
        while len(entries) < num_lanes and self.peek() is not None:
            entry = heappop(self._heads)
            if all(entry[2] is not other for _, _, other in entries):
                entries.append(entry)
        for entry in entries:
            heappush(self._heads, entry)
        return [request for _, _, request in entries]

    def remove(self, request: Request) -> None:
        lane = self._lanes.get(request.terms.tenant)
        if lane is None:
            raise RuntimeError(f"request {request.id} is not waiting")
        lane.remove(request)
        self._removed(request.terms.tenant)

    def suspend(self, tenant: str) -> None:
        """Skip the tenant's requests until `resume`."""
        self._suspended.add(tenant)

    def resume(self, tenant: str) -> None:
        self._suspended.discard(tenant)
        self._list_head(tenant)

    def peek_tenant(self, tenant: str) -> Request | None:
        """Return the first request of a tenant, suspended or not."""
        lane = self._lanes.get(tenant)
        return lane.peek() if lane is not None else None

    def is_early(self, request: Request) -> bool:
        return False

    def least_two(self) -> list[TenantAccount]:
        return []

    def order_prefill(self, prefilling: list[Request], aged_before: float) -> list[Request]:
        """Return running requests in prefill; those that have aged go first, by arrival."""
        return sorted(prefilling, key=lambda request: self._prefill_key(request, aged_before))

    def goes_before(self, request: Request, other: Request, aged_before: float) -> bool:
        """Whether a waiting request has a smaller key than a running prefill."""
        key = effective_key(self._key(request), request)
        return key < self._prefill_key(other, aged_before)

    def _prefill_key(self, request: Request, aged_before: float) -> SortKey:
        if request.state_since > aged_before:
            return effective_key(self._key(request), request)
        return by_arrival(request)

    def _is_head(self, request: Request) -> bool:
        tenant = request.terms.tenant
        return tenant not in self._suspended and self.peek_tenant(tenant) is request

    def _removed(self, tenant: str) -> None:
        self._num_requests -= 1
        if len(self._lanes[tenant]):
            self._list_head(tenant)
        else:
            del self._lanes[tenant]

    def _list_head(self, tenant: str) -> None:
        request = self.peek_tenant(tenant)
        if request is None or tenant in self._suspended:
            return
        heappush(self._heads, self._entry(request))
        if len(self._heads) > 2 * len(self._lanes) + 64:
            heads = [self.peek_tenant(name) for name in self._lanes.keys() - self._suspended]
            self._heads = [self._entry(head) for head in heads if head is not None]
            heapify(self._heads)

    def _entry(self, request: Request) -> Head:
        return effective_key(self._key(request), request), next(self._numbers), request

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        return (request for lane in self._lanes.values() for request in lane)
