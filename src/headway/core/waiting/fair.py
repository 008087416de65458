"""Fair shares: the tenant with the least service for its weight is next.

Each tenant has a virtual counter of service (headway.core.waiting.accounts), after "Fairness in
Serving Large Language Models" (Sheng et al., OSDI 2024). A tenant that returns from idleness, or
from suspension at its KV quota, is lifted to the least counter among waiting tenants, so idle time
is not saved up. Within a tenant: lower priority number first, then earliest planned start by SLO,
then arrival.

SLO between tenants: the tenant of the request with the earliest planned start goes first while its
counter exceeds the least by at most URGENT_LEAD. The least is that of the tenants that wait, or
whose running requests are in prefill. A flood of urgent requests uses up that lead and then waits
for its tenant's turn. Running requests in prefill get tokens in the same order.

The bound: let two tenants wait without a break. Then the services given to them in that time,
each divided by its weight, differ by at most

    2 max(w_p L, w_q M) / the smaller weight

where L is the longest prompt, M the most tokens that the running requests of one tenant come to,
w_p the cost of a prompt token and w_q that of an output token. For a tenant is admitted only while
its counter is the least; from then on the counter grows by that prompt and by the output of its
running requests, and the other's does not fall. Three terms are added:

    overtaking   what smaller requests are given while one that does not fit waits, until it ages
    URGENT_LEAD  where requests have SLOs
    KV blocks    twice what all blocks cost for as long as a request runs, over the smaller weight

Prefix cache: among tenants whose counters are within CACHED_LEAD of the least, one whose request
hits the prefix cache goes first. This adds CACHED_LEAD to the bound.

Spot requests come after all others, by the same rule among themselves and with counters of their
own, however long they have waited.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import inf

from headway.core.request import Request
from headway.core.waiting.accounts import Accounts, TenantAccount
from headway.core.waiting.keyed import KeyedQueue
from headway.core.waiting.request_heap import RequestHeap
from headway.core.waiting.sort_key import SortKey, start_by_us

URGENT_LEAD = 16384.0
"""Lead in service, over the weight, up to which an urgent request goes before its tenant's turn:
two prompts of 8,192 tokens, about what the bound allows for such prompts."""
CACHED_LEAD = 512.0
"""The same for a request that hits the prefix cache."""
MAX_LOOKS = 4
"""Tenants looked at for an urgent request or a prefix hit."""


def _by_start(request: Request) -> SortKey:
    return SortKey(0, (start_by_us(request), request.arrival_order, request.index))


def _within_tenant(request: Request) -> SortKey:
    return SortKey(request.priority, (start_by_us(request), request.arrival_order, request.index))


class _Lane:
    """The waiting requests of one tenant in one rank, ordinary or spot."""

    __slots__ = ("account", "is_listed", "requests")

    def __init__(self, account: TenantAccount) -> None:
        self.account = account
        self.requests = RequestHeap(_within_tenant)
        self.is_listed = False


Entry = tuple[float, int, int, _Lane]
"""Counter of the tenant, arrival order of its first request, a number of its own, lane."""


class FairQueue:
    """A heap of tenants by counter, and for each a heap of its requests.

    Counters only grow, so an entry that is out of date is found when it comes to the top, and
    listed again. A lane is dropped when its last request leaves; its entry is dropped at the top,
    or when such entries outnumber lanes.
    """

    def __init__(
        self, accounts: Accounts, is_cached: Callable[[Request], bool] = lambda request: False
    ) -> None:
        self._accounts = accounts
        self._is_cached = is_cached
        self._lanes: dict[float, dict[str, _Lane]] = {0: {}, 1: {}}
        """By rank and tenant; none is empty."""
        self._suspended: set[str] = set()
        self._heaps: dict[float, list[Entry]] = {0: [], 1: []}
        self._least: dict[float, float] = {0: 0.0, 1: 0.0}
        """The least counter at the last pop."""
        self._urgent = {rank: KeyedQueue(_by_start) for rank in self._heaps}
        """Requests with a planned start, over all tenants."""
        self._prefilling: dict[float, TenantAccount] = {}
        """The least served tenant in prefill, by rank, as of the last step."""
        self._num_requests = 0
        self._numbers = count()

    def sort_key(self, request: Request) -> SortKey:
        terms = request.terms
        order = (start_by_us(request), request.arrival_order, request.index)
        return SortKey(self._rank(request), order, terms.tenant, request.priority)

    def push(self, request: Request) -> None:
        rank, account = self._rank(request), self._accounts.of(request)
        if account.num_waiting == 0:
            account.counter = max(account.counter, self.least_counter(rank))
        lane = self._lanes[rank].get(account.tenant)
        if lane is None:
            lane = self._lanes[rank][account.tenant] = _Lane(account)
        lane.requests.push(request)
        if request.start_by < inf:
            self._urgent[rank].push(request)
        self._num_requests += 1
        self._list(rank, lane)

    def pop(self) -> Request | None:
        for rank in self._heaps:
            lane = self._first(rank)
            if lane is not None:
                self._least[rank] = max(self._least[rank], lane.account.counter)
                self._num_requests -= 1
                chosen = self._prefer_urgent(rank, lane)
                if chosen is lane:
                    chosen = self._prefer_cached(rank, lane)
                request = chosen.requests.pop()
                self._drop_if_empty(rank, chosen)
                if request is not None and request.start_by < inf:
                    self._urgent[rank].remove(request)
                return request
        return None

    def peek(self) -> Request | None:
        for rank in self._heaps:
            lane = self._first(rank)
            if lane is not None:
                return self._prefer_urgent(rank, lane).requests.peek()
        return None

    def peek_tenant(self, tenant: str) -> Request | None:
        """Return the first request of a tenant, suspended or not."""
        for lanes in self._lanes.values():
            if tenant in lanes:
                return lanes[tenant].requests.peek()
        return None

    def tenants_beside(self, request: Request) -> tuple[Collection[str], int]:
        """Return the waiting tenants of a request's rank, and how many requests its own has."""
        lanes = self._lanes[self._rank(request)]
        lane = lanes.get(request.terms.tenant)
        return lanes.keys(), 0 if lane is None else len(lane.requests)

    def remove(self, request: Request) -> None:
        rank = self._rank(request)
        lane = self._lanes[rank].get(request.terms.tenant)
        if lane is None:
            raise RuntimeError(f"request {request.id} is not waiting")
        lane.requests.remove(request)
        self._drop_if_empty(rank, lane)
        if request.start_by < inf:
            self._urgent[rank].remove(request)
        self._num_requests -= 1

    def suspend(self, tenant: str) -> None:
        """Skip the tenant's requests until `resume`."""
        self._suspended.add(tenant)
        for urgent in self._urgent.values():
            urgent.suspend(tenant)

    def resume(self, tenant: str) -> None:
        self._suspended.discard(tenant)
        for rank, urgent in self._urgent.items():
            urgent.resume(tenant)
            lane = self._lanes[rank].get(tenant)
            if lane is not None:
                account = lane.account
                account.counter = max(account.counter, self.least_counter(rank))
                self._list(rank, lane)

    def is_early(self, request: Request) -> bool:
        """Whether the head goes before its tenant's turn because of its SLO."""
        rank = self._rank(request)
        return self._first(rank) is not self._lanes[rank].get(request.terms.tenant)

    def least_counter(self, rank: float) -> float:
        """Return the least counter of waiting tenants, or the one at the last pop."""
        lane = self._first(rank)
        return self._least[rank] if lane is None else lane.account.counter

    def least_two(self) -> list[TenantAccount]:
        """Return the two least served tenants that wait with ordinary requests."""
        heap, first = self._heaps[0], self._first(0)
        if first is None:
            return []
        entry = heappop(heap)
        second = self._first(0)
        heappush(heap, entry)
        return [lane.account for lane in (first, second) if lane is not None]

    def _rank(self, request: Request) -> float:
        return 1 if request.terms.is_spot else 0

    def _drop_if_empty(self, rank: float, lane: _Lane) -> None:
        if not len(lane.requests):
            del self._lanes[rank][lane.account.tenant]

    def _list(self, rank: float, lane: _Lane) -> None:
        """Add a lane to the heap of its rank; a suspended one waits for `resume`."""
        request = lane.requests.peek()
        account = lane.account
        if lane.is_listed or request is None or account.tenant in self._suspended:
            return
        lane.is_listed = True
        heap = self._heaps[rank]
        heappush(heap, (account.counter, request.arrival_order, next(self._numbers), lane))
        if len(heap) > 2 * len(self._lanes[rank]) + 64:
            heap[:] = [entry for entry in heap if len(entry[3].requests)]
            heapify(heap)

    def _first(self, rank: float) -> _Lane | None:
        """Return the lane with the least counter that is not empty and not suspended."""
        heap = self._heaps[rank]
        while heap:
            counter, _, number, lane = heap[0]
            head, account = lane.requests.peek(), lane.account
            if head is None or account.tenant in self._suspended:
                heappop(heap)
                lane.is_listed = False
            elif account.counter > counter:
                heapreplace(heap, (account.counter, head.arrival_order, number, lane))
            else:
                return lane
        return None

    def order_prefill(self, prefilling: list[Request], aged_before: float) -> list[Request]:
        """Return running requests in prefill, by the service of their tenants."""
        least: dict[float, TenantAccount] = {}
        self._prefilling = least
        if not prefilling:
            return prefilling
        for request in prefilling:
            rank, account = self._rank(request), self._accounts.of(request)
            if rank not in least or account.counter < least[rank].counter:
                least[rank] = account
        return sorted(prefilling, key=self._prefill_key)

    def goes_before(self, request: Request, other: Request, aged_before: float) -> bool:
        """Whether a waiting SLO request goes before a running prefill, within URGENT_LEAD."""
        return self._is_urgent(request) and self._prefill_key(request) < self._prefill_key(other)

    def _prefill_key(self, request: Request) -> tuple[float, bool, float, tuple[int, ...]]:
        """Rank, then urgent requests by planned start, then the least served tenant."""
        is_urgent, counter = self._is_urgent(request), self._accounts.of(request).counter
        start_or_counter = request.start_by if is_urgent else counter
        return self._rank(request), not is_urgent, start_or_counter, self.sort_key(request).order

    def _is_urgent(self, request: Request) -> bool:
        """Whether an SLO request is within URGENT_LEAD of the tenants in prefill."""
        counter = self._accounts.of(request).counter
        return request.start_by < inf and counter <= self._prefill_limit(self._rank(request))

    def _prefill_limit(self, rank: float) -> float:
        least = self._prefilling.get(rank)
        return inf if least is None else least.counter + URGENT_LEAD

    def _prefer_urgent(self, rank: float, least: _Lane) -> _Lane:
        """Return the lane with the earliest planned start within URGENT_LEAD, else the least."""
        limit = min(least.account.counter + URGENT_LEAD, self._prefill_limit(rank))
        for request in self._urgent[rank].peek_lanes(MAX_LOOKS):
            lane = self._lanes[rank][request.terms.tenant]
            if lane.account.counter <= limit:
                return lane
        return least

    def _prefer_cached(self, rank: float, first: _Lane) -> _Lane:
        """Return a lane within CACHED_LEAD whose head hits the prefix cache, else the first."""
        head, heap = first.requests.peek(), self._heaps[rank]
        if head is None or head.is_aged or head.start_by < inf or len(heap) == 1:
            return first
        if self._is_cached(head):
            return first
        limit = first.account.counter + CACHED_LEAD
        found = first
        passed: list[Entry] = []
        while found is first and len(passed) < MAX_LOOKS:
            passed.append(heappop(heap))
            lane = self._first(rank)
            head = lane.requests.peek() if lane is not None else None
            if lane is None or head is None or lane.account.counter > limit:
                break
            if self._is_cached(head):
                found = lane
        for entry in passed:
            heappush(heap, entry)
        return found

    def __len__(self) -> int:
        return self._num_requests

    def __iter__(self) -> Iterator[Request]:
        lanes = (lane for lanes in self._lanes.values() for lane in lanes.values())
        return (request for lane in lanes for request in lane.requests)
