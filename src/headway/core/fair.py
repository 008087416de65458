"""Fair shares: the tenant that has been given least, for its weight, is next.

Each tenant has a virtual counter of the service it was given (headway.core.service), after
"Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). A tenant that comes back
from idleness is lifted to the least counter among those that wait, so that idleness is not saved
up. Within a tenant the lower priority number goes first, then what must be begun first to keep a
promise, then the earlier place.

Between tenants a promise counts within a bound of its own: the tenant of whoever must be begun
first goes first while its counter exceeds the least by at most URGENT_LEAD. Short requests that
were promised a quick start need that much at most; a flood of them exhausts it, and waits for its
turn like anybody else's.

The bound: let two tenants wait without a break. Then the services given to them in that time,
each divided by its weight, differ by at most

    2 max(w_p L, w_q M) / the smaller weight

where L is the longest prompt, M the most tokens that requests of one tenant that run at a time
come to, each at its end, w_p the cost of a prompt token and w_q that of an output token. For a
tenant is given a seat only while its counter is the least; from then on the counter grows by that
prompt and by what its running requests still put out, and the other's does not fall. Requests that
overtake one that does not fit add what they are given: at most `max_bypasses` requests. Where
promises were made, URGENT_LEAD is added to the bound. Twice what all blocks cost for as long as a
request runs is added too, over the smaller weight; it is small beside the rest.

Prefixes: among tenants whose counters are within SLACK of the least, one whose request finds the
start of its prompt cached goes first, since it is cheaper now than later. This adds SLACK to the
bound, and no more: what it is given counts.

Spot requests come after all others, by the same rule among themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush, heapreplace
from math import inf

from headway.core.queue import Claim, HeapQueue, due_us, standing
from headway.core.request import Request
from headway.core.service import Account, Accounts

URGENT_LEAD = 16384.0
"""By how much service a tenant may be ahead and still go first for a promise, in weighted tokens
over its weight: what two prompts of 8,192 tokens come to, and about what the bound above allows
for such prompts."""
SLACK = 512.0
"""The same for a cached prefix."""
MAX_LOOKS = 4
"""How many are looked at for one that may go first."""


def _by_due(request: Request) -> Claim:
    return Claim(0, (due_us(request), request.place, request.index))


def _within_tenant(request: Request) -> Claim:
    return Claim(request.priority, (due_us(request), request.place, request.index))


class _Lane:
    """The waiting requests of one tenant, or its spot requests."""

    __slots__ = ("account", "is_listed", "requests")

    def __init__(self, account: Account) -> None:
        self.account = account
        self.requests = HeapQueue(_within_tenant)
        self.is_listed = False


class FairQueue:
    """A heap of tenants, and for each a heap of its requests. Counters only grow, so a tenant
    whose entry is out of date is found when it comes to the top, and listed again."""

    def __init__(
        self, accounts: Accounts, is_cached: Callable[[Request], bool] = lambda request: False
    ) -> None:
        self._accounts = accounts
        self._is_cached = is_cached
        self._lanes: dict[tuple[float, str], _Lane] = {}
        self._heaps: dict[float, list[tuple[float, int, str, _Lane]]] = {0: [], 1: []}
        self._least: dict[float, float] = {0: 0.0, 1: 0.0}
        """The least counter when somebody was last taken."""
        self._urgent: dict[float, HeapQueue] = {0: HeapQueue(_by_due), 1: HeapQueue(_by_due)}
        """Those who were promised something, over all tenants."""
        self._num_waiting = 0

    def claim(self, request: Request) -> Claim:
        terms = request.terms
        place = (due_us(request), request.place, request.index)
        return Claim(1 if terms.is_spot else 0, place, terms.tenant, request.priority)

    def push(self, request: Request) -> None:
        rank, key = self._key(request)
        account = self._accounts.of(request)
        if account.num_in_line == 0:
            account.counter = max(account.counter, self.least_counter(rank))
        lane = self._lanes.get(key)
        # The account of a tenant that was away for long may have been forgotten and made anew.
        if lane is None or lane.account is not account:
            lane = self._lanes[key] = _Lane(account)
        lane.requests.push(request)
        if request.due_at < inf:
            self._urgent[rank].push(request)
        self._num_waiting += 1
        if not lane.is_listed:
            lane.is_listed = True
            entry = (account.counter, request.place, account.tenant, lane)
            heappush(self._heaps[rank], entry)

    def pop(self) -> Request | None:
        for rank in self._heaps:
            lane = self._first(rank)
            if lane is not None:
                self._least[rank] = max(self._least[rank], lane.account.counter)
                self._num_waiting -= 1
                chosen = self._preferred(rank, lane)
                if chosen is lane:
                    chosen = self._prefer_cached(rank, lane)
                request = chosen.requests.pop()
                if request is not None and request.due_at < inf:
                    self._urgent[rank].remove(request)
                return request
        return None

    def _prefer_cached(self, rank: float, first: _Lane) -> _Lane:
        """The first lane, or one hardly behind it whose request has its prefix in the cache."""
        head, heap = first.requests.peek(), self._heaps[rank]
        if head is None or head.is_aged or head.due_at < inf or len(heap) == 1:
            return first
        if self._is_cached(head):
            return first
        limit = first.account.counter + SLACK
        found, passed = first, list[tuple[float, int, str, _Lane]]()
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

    def peek(self) -> Request | None:
        for rank in self._heaps:
            lane = self._first(rank)
            if lane is not None:
                return self._preferred(rank, lane).requests.peek()
        return None

    def remove(self, request: Request) -> None:
        rank, key = self._key(request)
        if key not in self._lanes:
            raise RuntimeError(f"request {request.id} is not waiting")
        self._lanes[key].requests.remove(request)
        if request.due_at < inf:
            self._urgent[rank].remove(request)
        self._num_waiting -= 1

    def is_early(self, request: Request) -> bool:
        """Is this one, the first, before the turn of its tenant for what it was promised?"""
        rank, key = self._key(request)
        return self._first(rank) is not self._lanes.get(key)

    def _key(self, request: Request) -> tuple[float, tuple[float, str]]:
        rank = standing(self.claim(request), request).rank
        return rank, (rank, request.terms.tenant)

    def least_counter(self, rank: float) -> float:
        """Of those that wait; if nobody does, of the last that was taken."""
        lane = self._first(rank)
        return self._least[rank] if lane is None else lane.account.counter

    def least_two(self) -> list[Account]:
        """Of the tenants that have anybody in line who is not spot, those given least; one if
        there are no two."""
        heap, first = self._heaps[0], self._first(0)
        if first is None:
            return []
        entry = heappop(heap)
        second = self._first(0)
        heappush(heap, entry)
        return [lane.account for lane in (first, second) if lane is not None]

    def _first(self, rank: float) -> _Lane | None:
        """The lane of the least counter that has anybody in it."""
        heap = self._heaps[rank]
        while heap:
            counter, _, tenant, lane = heap[0]
            first = lane.requests.peek()
            if first is None:
                heappop(heap)
                lane.is_listed = False
                if self._lanes.get((rank, tenant)) is lane:
                    del self._lanes[rank, tenant]
            elif lane.account.counter > counter:
                heapreplace(heap, (lane.account.counter, first.place, tenant, lane))
            else:
                return lane
        return None

    def _preferred(self, rank: float, least: _Lane) -> _Lane:
        """The lane of whoever must be begun first, if its tenant is not too far ahead of the
        least; else the least."""
        urgent, limit = self._urgent[rank], least.account.counter + URGENT_LEAD
        found, passed = least, list[Request]()
        while len(passed) < MAX_LOOKS and (request := urgent.peek()) is not None:
            lane = self._lanes[rank, request.terms.tenant]
            if lane.account.counter <= limit:
                found = lane
                break
            urgent.remove(request)
            passed.append(request)
        for request in passed:
            urgent.push(request)
        return found

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        return (request for lane in self._lanes.values() for request in lane.requests)
