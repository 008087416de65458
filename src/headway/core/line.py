"""The waiting line as the scheduler sees it: a policy's order, and what no policy may change.

    ageing     a request that has waited `max_wait_s` since it came or was last preempted goes
               first: before all others, or, where tenants have shares, before all others of its
               tenant, and it is no longer spot. From then on it waits only for those that have
               aged before it, for its tenant's turn, and for running requests to make room, and no
               waiting request takes the seat it gets
    parking    requests of a tenant that holds all the blocks it may stand aside, and everybody
               else passes them; each time the tenant gives up blocks, its strongest comes back
    the account of every wait (headway.core.waits)

A request taken by `pop` or `take` still waits until `leave`; one that does not fit is put back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count, islice
from math import inf

from headway.core.causes import CauseTime, WaitCause
from headway.core.fair import URGENT_LEAD, FairQueue
from headway.core.queue import Claim, HeapQueue, WaitingQueue, standing
from headway.core.request import Request
from headway.core.service import NO_SHARES, Accounts, Lead, Shares
from headway.core.victim import Weakness
from headway.core.waits import Head, Waits

MAX_URGENT = 4
"""How many that are not at the head are tried for the seats of weaker ones in a pass."""
MAX_LOOKS = 16
"""How many are looked at for these."""
MAX_AGED = 8
"""How many are found to have waited too long in one pass, the oldest first; so a crowd that came
together does not make one step slow."""
EXCESS_STEP = 1024.0
"""Tenants whose service differs by less, in weighted tokens, are alike when one must give way."""


class WaitingLine:
    """Everybody who waits. Each operation is O(log n)."""

    def __init__(self, queue: WaitingQueue, accounts: Accounts, max_wait_s: float) -> None:
        self.waits = Waits()
        self._queue = queue
        self._accounts = accounts
        self._max_wait_s = max_wait_s
        self._members: dict[str, Request] = {}
        self._parked: dict[str, HeapQueue] = {}
        self._full_tenants: set[str] = set()
        """Those of whom one was tried in this pass and found that its tenant holds all it may."""
        self._due: list[tuple[float, int, Request]] = []
        self._numbers = count()
        self._urgent: dict[str, Request] = {}
        self._num_aged: Counter[str] = Counter()
        """Of each tenant."""

    def claim(self, request: Request) -> Claim:
        """By the policy alone; it is what a waiting request may preempt others by."""
        return self._queue.claim(request)

    def standing(self, request: Request) -> Claim:
        """The claim with what waiting has added; it orders the running requests."""
        return standing(self._queue.claim(request), request)

    @property
    def num_in_line(self) -> int:
        """Those who wait and do not stand aside."""
        return len(self._queue)

    def weakness(self, request: Request) -> Weakness:
        """Who must give way first: spot, then those of the tenant that was given most, then the
        least urgent of a tenant's, then the last in line. Numbers of priority are compared within
        a tenant only, so that nobody can make all of his own safe by choosing low ones."""
        claim = self.standing(request)
        if claim.tenant is None:
            return claim.rank, claim.place
        account = self._accounts.of(request)
        excess = account.counter // EXCESS_STEP
        grade = -1 if request.is_aged else sum(it < request.priority for it in account.grades)
        return claim.rank, excess, grade, claim.place

    def shares(self, tenants: Iterable[str]) -> Shares:
        """Where these tenants stand, each beside whoever else was given least and waits. Spot
        does not count: it comes after what was promised."""
        queue = self._queue
        least = queue.least_two() if isinstance(queue, FairQueue) else []
        if not least:
            return NO_SHARES
        leads: dict[str, Lead] = {}
        for account in map(self._accounts.get, tenants):
            other = least[-1] if account is least[0] else least[0]
            if account is not None and account is not other:
                excess = account.counter - other.counter - URGENT_LEAD
                leads[account.tenant] = Lead(excess, account.weight, other.weight)
        return Shares(leads)

    def may_preempt(self, request: Request, claim: Claim, running: Sequence[Request]) -> bool:
        """Is anybody of weaker claim running? It spares a look at all of them."""
        if not running:
            return False
        if self.standing(running[-1]).rank > claim.rank:
            return True
        grades = self._accounts.of(request).grades
        return claim.tenant is not None and bool(grades) and max(grades) > request.priority

    def join(self, request: Request) -> None:
        """A wait begins: on arrival, after a preemption, or for a sample that found no block."""
        account = self._accounts.of(request)
        claim = self._queue.claim(request)
        self._members[request.id] = request
        self.waits.join(request, claim)
        if request.is_aged:
            self._num_aged[request.terms.tenant] += 1
        else:
            self._expect(request)
        if claim.tenant is not None and account.grades and max(account.grades) > request.priority:
            self._urgent[request.id] = request
        if self.is_behind_parked(request):
            self.waits.note_parked(request, request.changed_at)
            self._parked[request.terms.tenant].push(request)
        else:
            self._enter(request)

    def _enter(self, request: Request) -> None:
        self._queue.push(request)
        self._accounts.of(request).num_in_line += 1

    def leave(self, request: Request, now: float) -> tuple[tuple[CauseTime, ...], str]:
        """The wait of a request that was taken is over: its causes, and who held most of what
        it waited for."""
        del self._members[request.id]
        self._urgent.pop(request.id, None)
        if request.is_aged:
            self._num_aged[request.terms.tenant] -= 1
            if not self._num_aged[request.terms.tenant]:
                del self._num_aged[request.terms.tenant]
        self._accounts.of(request).num_in_line -= 1
        # Whoever stands aside behind it in its tenant's order may be the next that fits.
        self.release(request.terms.tenant)
        return self.waits.leave(request, now)

    def pop(self) -> Request | None:
        """Take the strongest of those that do not stand aside."""
        return self._queue.pop()

    def peek(self) -> Request | None:
        """Who is first by the policy alone; `pop` may prefer one whose prefix is cached."""
        return self._queue.peek()

    def take(self, request: Request) -> None:
        """Take a certain one, wherever it waits."""
        tenant = request.terms.tenant
        parked = self._parked.get(tenant)
        if parked is None or request not in parked:
            self._queue.remove(request)
            return
        parked.remove(request)
        self._drop_if_empty(tenant)
        self.waits.note_released(request)
        self._accounts.of(request).num_in_line += 1

    def put_back(self, request: Request) -> None:
        self._queue.push(request)

    # ----------------------------------------------------------------- parking

    def park(self, request: Request, now: float) -> None:
        """A request that was taken stands aside: its tenant holds all it may."""
        self._full_tenants.add(request.terms.tenant)
        self._set_aside(request, now)

    def park_if_behind(self, request: Request, now: float) -> bool:
        """Set a request that was taken aside if a stronger one of its tenant stands there, and
        let that one try first, unless it just did."""
        tenant = request.terms.tenant
        if tenant in self._full_tenants:
            self._set_aside(request, now)
            return True
        if not self.is_behind_parked(request):
            return False
        self._set_aside(request, now)
        self.release(tenant)
        return True

    def is_behind_parked(self, request: Request) -> bool:
        """Does a stronger one of its tenant stand aside?"""
        parked = self._parked.get(request.terms.tenant)
        first = parked.peek() if parked is not None else None
        return first is not None and self._own_standing(first) < self._own_standing(request)

    def _set_aside(self, request: Request, now: float) -> None:
        self._parked.setdefault(request.terms.tenant, HeapQueue(self._own_claim)).push(request)
        self._accounts.of(request).num_in_line -= 1
        self.waits.note_parked(request, now)

    def _own_claim(self, request: Request) -> Claim:
        """Among the requests of one tenant."""
        claim = self._queue.claim(request)
        if claim.tenant is None:
            return claim
        return Claim(claim.rank, (int(claim.grade), *claim.place))

    def _own_standing(self, request: Request) -> Claim:
        return standing(self._own_claim(request), request)

    def release(self, tenant: str) -> None:
        """The tenant may hold more again: its strongest comes back into the line."""
        parked = self._parked.get(tenant)
        request = parked.pop() if parked is not None else None
        if request is not None:
            self._drop_if_empty(tenant)
            self.waits.note_released(request)
            self._enter(request)

    def _drop_if_empty(self, tenant: str) -> None:
        if not len(self._parked[tenant]):
            del self._parked[tenant]

    # ------------------------------------------------------------------ passes

    def begin_pass(self, now: float) -> None:
        """A scheduling pass begins: some have become old."""
        self.waits.begin_pass(now)
        self._full_tenants.clear()
        num_left = MAX_AGED
        while self._due and self._due[0][0] <= now and num_left:
            at, _, request = heappop(self._due)
            if self._is_expected(request, at):
                self._make_old(request, now)
                num_left -= 1

    def end_pass(self, cause: WaitCause, holder: Callable[[], str], now: float) -> None:
        """The pass is over; `cause` kept the strongest of those left from a seat."""
        head = self._queue.peek()
        found: Head | None = None
        if head is not None:
            queue, is_early = self._queue, False
            if head.due_at < inf and isinstance(queue, FairQueue):
                is_early = queue.is_early(head)
            found = Head(head, queue.claim(head), is_early)
        self.waits.end_pass(found, cause, holder, now)

    def urgent(self) -> list[Request]:
        """A few whose tenant runs weaker ones of its own, and that may not be at the head; the
        strongest first, so that nobody is given a place that the next of them takes."""
        found: list[Request] = []
        for request in list(islice(self._urgent.values(), MAX_LOOKS)):
            grades = self._accounts.of(request).grades
            if not grades or max(grades) <= request.priority:
                del self._urgent[request.id]
            elif self._num_aged[request.terms.tenant]:
                # Not while one of its tenant is old: the others are to be looked at.
                self._urgent[request.id] = self._urgent.pop(request.id)
            else:
                found.append(request)
        return sorted(found, key=self._own_standing)[:MAX_URGENT]

    def _expect(self, request: Request) -> None:
        heappush(self._due, (self._ages_at(request), next(self._numbers), request))
        if len(self._due) > 2 * len(self._members) + 64:
            found = {id(one[2]): one for one in self._due if self._is_expected(one[2], one[0])}
            self._due = list(found.values())
            heapify(self._due)

    def _is_expected(self, request: Request, at: float) -> bool:
        """Will it age then, if it waits until then? An entry may be of an earlier wait."""
        is_young = self._members.get(request.id) is request and not request.is_aged
        return is_young and self._ages_at(request) == at

    def _ages_at(self, request: Request) -> float:
        """By how long it has waited since it came or was last preempted, not by how long it has
        run. One that was promised a later time is not old before it must be begun."""
        at = request.changed_at + self._max_wait_s
        return at if request.due_at == inf else max(at, request.due_at)

    def _make_old(self, request: Request, now: float) -> None:
        parked = self._parked.get(request.terms.tenant)
        place = parked if parked is not None and request in parked else self._queue
        place.remove(request)
        request.is_aged = True
        self._num_aged[request.terms.tenant] += 1
        place.push(request)
        self.waits.note_aged(request, self._queue.claim(request), now)
        if place is parked:
            # What its tenant gave up may have brought back one that was stronger until now.
            self.release(request.terms.tenant)

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())

    def check(self) -> None:
        """Everybody who waits is in the policy's queue or stands aside, and has one cause."""
        parked = [request for queue in self._parked.values() for request in queue]
        inside = {id(request) for request in (*self._queue, *parked)}
        if inside != {id(request) for request in self} or len(self._queue) + len(parked) != len(
            self
        ):
            raise AssertionError("somebody waits in two places, or in none")
        in_line: Counter[str] = Counter(request.terms.tenant for request in self._queue)
        for request in self:
            account = self._accounts.of(request)
            if account.num_in_line != in_line[account.tenant]:
                raise AssertionError(f"{account} has {in_line[account.tenant]} in line")
            self.waits.cause_of(request)
