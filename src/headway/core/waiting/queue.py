"""The waiting queue as the scheduler sees it: a policy's order, aging, quotas and attribution.

    aging       a request that has waited `max_wait_s` since it arrived or was last preempted goes
                before all others, or before all others of its tenant where tenants have shares.
                It then waits only for requests that aged before it, for its tenant's turn, and for
                running requests to make room. A spot request that has aged still waits for all
                ordinary requests
    KV quota    a tenant at its KV quota is suspended: the queue skips all its requests until it
                gives up blocks, or its first request can share more of them
    causes      every second of every wait has one (headway.core.waiting.attribution)

A request taken by `pop` or `take` still waits until `leave`; one that does not fit is put back.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import inf

from headway.core.causes import CauseTime, WaitCause
from headway.core.request import Request
from headway.core.waiting.accounts import NO_SHARES, Accounts, Lead, Shares
from headway.core.waiting.aging import AgingTimer
from headway.core.waiting.attribution import Head, WaitAttribution
from headway.core.waiting.fair import URGENT_LEAD
from headway.core.waiting.policies import PolicyQueue
from headway.core.waiting.sort_key import EvictionKey, SortKey, effective_key

MAX_URGENT = 4
"""Tenants whose first request a pass tries in place of their running ones of lower priority."""
SERVICE_STEP = 1024.0
"""Tenants whose service differs by less, in weighted tokens, are equal for eviction."""


class WaitingQueue:
    """All waiting requests. Each operation is O(log n)."""

    def __init__(self, queue: PolicyQueue, accounts: Accounts, max_wait_s: float) -> None:
        self._queue = queue
        self._accounts = accounts
        self._attribution = WaitAttribution()
        self._members: dict[str, Request] = {}
        self._suspended: set[str] = set()
        """Tenants at their KV quota."""
        self._num_suspended = 0
        """Requests of these tenants."""
        self._max_wait_s = max_wait_s
        self._aging = AgingTimer(max_wait_s, self.__contains__)
        self._urgent: OrderedDict[str, None] = OrderedDict()
        """Tenants that run requests of lower priority than their first waiting one, by turn."""

    def sort_key(self, request: Request) -> SortKey:
        """Return the policy's key; a waiting request preempts by this one."""
        return self._queue.sort_key(request)

    def effective_key(self, request: Request) -> SortKey:
        """Return the key after aging; running requests are ordered by this one."""
        return effective_key(self._queue.sort_key(request), request)

    def eviction_key(self, request: Request) -> EvictionKey:
        """Return the eviction key; the highest is preempted first.

        Order: spot tier, tenant with the most service, lowest priority within the tenant, latest
        arrival. Priorities are compared within a tenant only, so no tenant can protect all of its
        requests by choosing low numbers.
        """
        key = self.effective_key(request)
        if key.tenant is None:
            return key.rank, key.order
        account = self._accounts.of(request)
        excess = account.counter // SERVICE_STEP
        num_before = sum(other < request.priority for other in account.priorities)
        return key.rank, excess, -1 if request.is_aged else num_before, key.order

    def is_spot(self, request: Request) -> bool:
        """Whether the policy lets the request use spare capacity only."""
        return request.terms.is_spot and self._queue.sort_key(request).tenant is not None

    def shares(self, tenants: Iterable[str]) -> Shares:
        """Return how far each tenant is ahead of the least served tenant that waits.

        Spot requests do not count: they come after requests with SLOs.
        """
        least = self._queue.least_two()
        if not least:
            return NO_SHARES
        leads: dict[str, Lead] = {}
        for account in map(self._accounts.get, tenants):
            other = least[-1] if account is least[0] else least[0]
            if account is not None and account is not other:
                excess = account.counter - other.counter - URGENT_LEAD
                leads[account.tenant] = Lead(excess, account.weight, other.weight)
        return Shares(leads)

    def may_preempt(self, request: Request, key: SortKey, running: Sequence[Request]) -> bool:
        """Return False if no running request has a weaker key; spares a look at all of them."""
        if not running:
            return False
        if self.effective_key(running[-1]).rank > key.rank:
            return True
        return key.tenant is not None and self._runs_lower_priority(request)

    def _runs_lower_priority(self, request: Request) -> bool:
        """Whether the tenant runs a request of lower priority than this one."""
        priorities = self._accounts.of(request).priorities
        return bool(priorities) and max(priorities) > request.priority

    def join(self, request: Request) -> None:
        """Start a wait: at arrival, after a preemption, or for a sample that found no block."""
        key = self._queue.sort_key(request)
        self._queue.push(request)
        self._accounts.begin_wait(request)
        self._num_suspended += request.terms.tenant in self._suspended
        self._members[request.id] = request
        self._attribution.start(request, key)
        if not request.is_aged:
            self._aging.add(request, len(self._members))
        self._update_urgent(request.terms.tenant)
        self._try_if_first(request)

    def leave(self, request: Request, now: float) -> tuple[tuple[CauseTime, ...], str]:
        """End the wait of a request that was taken.

        Returns its causes, and the tenant that held most of what it waited for.
        """
        del self._members[request.id]
        tenant = request.terms.tenant
        self._update_urgent(tenant)
        self._accounts.end_wait(request)
        self._num_suspended -= tenant in self._suspended
        # The next request of the tenant may fit where this one did not.
        self.resume(tenant)
        return self._attribution.stop(request, now)

    def pop(self) -> Request | None:
        """Take the first request of a tenant that is not suspended."""
        return self._queue.pop()

    def peek(self) -> Request | None:
        """Return the first request by the policy; `pop` may prefer one with a prefix hit."""
        return self._queue.peek()

    def take(self, request: Request) -> None:
        """Take a certain request."""
        self._queue.remove(request)

    def put_back(self, request: Request) -> None:
        self._queue.push(request)

    # ----------------------------------------------------------------- prefill

    def order_prefill(self, prefilling: list[Request], now: float) -> list[Request]:
        """Return the running requests in prefill in the order in which they get tokens.

        The order is that of the policy, and starves none: `fair` compares the service of tenants;
        under other policies a prefill that has run for `max_wait_s` goes first, by arrival.
        """
        return self._queue.order_prefill(prefilling, now - self._max_wait_s)

    def goes_before(self, request: Request, other: Request, now: float) -> bool:
        """Whether a waiting request may be admitted before a running prefill gets its chunk.

        Only because of its SLO: any other waits until the running prefills have had their chunks.
        """
        if request.start_by == inf:
            return False
        return self._queue.goes_before(request, other, now - self._max_wait_s)

    # ---------------------------------------------------------------- KV quota

    def suspend(self, request: Request, now: float) -> None:
        """Put back a request whose tenant is at its KV quota, and skip the tenant."""
        tenant = request.terms.tenant
        self._queue.push(request)
        self._queue.suspend(tenant)
        if tenant not in self._suspended:
            self._suspended.add(tenant)
            self._num_suspended += self._accounts.num_waiting(tenant)
        self._attribution.suspend(tenant, now)

    def resume(self, tenant: str) -> None:
        """Try the tenant again: it may have given up blocks."""
        if tenant in self._suspended:
            self._suspended.discard(tenant)
            self._num_suspended -= self._accounts.num_waiting(tenant)
            self._queue.resume(tenant)
            self._attribution.resume(tenant)

    def resume_if_shared(self, request: Request, position: int) -> None:
        """Try a suspended tenant again if its first request has this block of the other request.

        The block at this position was just published. Shared blocks count once toward the quota.
        """
        tenant = request.terms.tenant
        first = self._queue.peek_tenant(tenant) if tenant in self._suspended else None
        if first is not None:
            block_hashes = first.block_hashes[position : position + 1]
            if block_hashes == request.block_hashes[position : position + 1]:
                self.resume(tenant)

    def _try_if_first(self, request: Request) -> None:
        """Try a suspended tenant again if this request is its first now; it may be smaller."""
        tenant = request.terms.tenant
        if tenant in self._suspended and self._queue.peek_tenant(tenant) is request:
            self.resume(tenant)

    # ------------------------------------------------------------------ passes

    @property
    def is_quiet(self) -> bool:
        """Whether no request waits, and none has since the last pass: a pass changes nothing."""
        return not (self._members or self._urgent or self._attribution.is_active)

    def begin_pass(self, now: float) -> None:
        """Start a scheduling pass: let requests age."""
        self._attribution.begin_pass(now)
        for request in self._aging.pop_expired(now):
            self._queue.remove(request)
            request.is_aged = True
            self._queue.push(request)
            self._try_if_first(request)

    def block(self, request: Request, cause: WaitCause, now: float) -> None:
        """Record that a request was tried and did not fit."""
        self._attribution.block(request, cause, now)

    def cause_of(self, request: Request) -> WaitCause:
        """Return why a request waits at this moment."""
        return self._attribution.cause_of(request)

    def end_pass(self, cause: WaitCause, find_holder: Callable[[], str], now: float) -> None:
        """End a pass; `cause` kept the first request left in the queue from being admitted."""
        request = self._queue.peek()
        head: Head | None = None
        if request is not None:
            is_early = request.start_by < inf and self._queue.is_early(request)
            head = Head(request, self._queue.sort_key(request), is_early)
        self._attribution.end_pass(head, cause, find_holder, now)

    def urgent(self) -> Iterator[Request]:
        """Yield a few requests whose tenant runs requests of lower priority.

        Each is the first of its tenant. Tenants take turns, so that a request that does not fit
        keeps back no other tenant.
        """
        for tenant in list(islice(self._urgent, MAX_URGENT)):
            request = self._queue.peek_tenant(tenant)
            if request is not None and self._runs_lower_priority(request):
                self._urgent.move_to_end(tenant)
                yield request
            else:
                del self._urgent[tenant]

    def _update_urgent(self, tenant: str) -> None:
        """List a tenant for `urgent` if it runs requests of lower priority than its first."""
        request = self._queue.peek_tenant(tenant)
        if request is None or self.sort_key(request).tenant is None:
            return
        if self._runs_lower_priority(request):
            self._urgent[tenant] = None

    @property
    def num_ready(self) -> int:
        """Waiting requests whose tenant is not at its KV quota."""
        return len(self._members) - self._num_suspended

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return self._members.get(request.id) is request

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())

    def check(self) -> None:
        """Every waiting request is in the policy's queue once, is counted, and has one cause."""
        queued = [id(request) for request in self._queue]
        if sorted(queued) != sorted(id(request) for request in self):
            raise AssertionError("a request waits in two places, or in none")
        if len(self._queue) != len(queued):
            raise AssertionError(f"the queue counts {len(self._queue)} of {len(queued)} requests")
        waiting = Counter(map(self._accounts.of, self))
        num_ready = sum(one.terms.tenant not in self._suspended for one in self)
        if self.num_ready != num_ready:
            raise AssertionError(f"{self.num_ready} requests are ready, and not {num_ready}")
        for request in self:
            account = self._accounts.of(request)
            if account.num_waiting != waiting[account]:
                raise AssertionError(f"{account} has {waiting[account]} waiting")
            self._attribution.cause_of(request)
