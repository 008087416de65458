"""The account of every wait: at any time a waiting request has exactly one cause, and the seconds
of its causes add up to its wait.

A scheduling pass ends with a head, the strongest request left waiting, and what kept it out. Until
the next pass this is why everybody waits: those the head stands for, for the same; those behind a
stronger rank, by tier order; those behind another tenant, by tenant share, or by deadline order if
it is only for a promise that the other is first; those that were promised nothing, behind one that
was, by deadline order. A request that was itself tried and did not fit has a cause of its own, and
one that has come since the pass waits for the executor.

Nothing here looks at every waiting request. Clocks form a tree by rank, tenant, grade and whether
anything was promised; a pass moves on those on the way to its head, and a request reads those on
the way to itself when it joins and when it leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from headway.core.causes import CauseTime, WaitCause
from headway.core.queue import Claim
from headway.core.request import Request

BEHIND = (
    WaitCause.TIER_ORDER,
    WaitCause.TENANT_SHARE,
    WaitCause.TIER_ORDER,
    WaitCause.DEADLINE_ORDER,
)
"""The cause of one whose way parts from the head's below the root, a rank, a tenant, or a grade."""
BELOW_RANK = 1
"""Where the ways of two tenants part."""
ROUNDING_S = 1e-9
"""Less than this is an error of floating-point sums, and no cause."""
Spent = dict[WaitCause, float]
Way = tuple[Hashable, ...]


class Head(NamedTuple):
    """The strongest request that a pass left waiting."""

    request: Request
    claim: Claim
    is_early: bool = False
    """It is before the turn of its tenant, for what it was promised."""


class _Reading(NamedTuple):
    """A clock at some time; `causes` is None while none was ever noted, to spare the copy."""

    below_s: float
    early_s: float
    stood_s: float
    causes: Spent | None


@dataclass(slots=True, eq=False)
class _Clock:
    """How long the head was below this node, and how long it stood for all below it, by cause."""

    below_s: float = 0.0
    early_s: float = 0.0
    """Of below_s, how long it was early."""
    causes: Spent = field(default_factory=dict[WaitCause, float])
    children: dict[Hashable, _Clock] = field(default_factory=dict[Hashable, "_Clock"])
    num_waiting: int = 0

    def read(self) -> _Reading:
        """As of now."""
        causes = self.causes
        stood_s, copied = sum(causes.values()), causes.copy() if causes else None
        return _Reading(self.below_s, self.early_s, stood_s, copied)


@dataclass(slots=True, eq=False)
class _Wait:
    """One request's wait: what it has cost so far, and where the clocks stood at that time."""

    way: Way
    since: float
    spent: Spent = field(default_factory=dict[WaitCause, float])
    own: WaitCause | None = WaitCause.EXECUTOR_BUSY
    """The cause that is its own; None: the one that the clocks count."""
    start: list[_Reading] | None = None
    is_for_pass: bool = False
    """Its own cause holds until the next pass only."""
    held_by: str = ""
    is_over: bool = False


def way_of(request: Request, claim: Claim) -> Way:
    """Where a request is in the tree. Ageing puts a spot request among its tenant's others."""
    rank = 0 if request.is_aged and claim.tenant is not None else claim.rank
    return rank, claim.tenant, claim.grade, request.due_at < inf


def head_way(head: Head) -> Way:
    """For whom a head stands: its like; one that has aged, for all who would else be before it."""
    way = way_of(head.request, head.claim)
    if not head.request.is_aged:
        return way
    return way[:2] if head.claim.tenant is not None else ()


class Waits:
    """The clocks, and the waits that read them."""

    def __init__(self) -> None:
        self._root = _Clock()
        self._at = 0.0
        self._head: tuple[Way, WaitCause] | None = None
        self._is_early = False
        self._head_clocks: list[_Clock] = []
        self._waits: dict[str, _Wait] = {}
        self._new: list[_Wait] = []
        """Those that no pass has looked at."""
        self._tried: list[_Wait] = []
        """Among them all whose own cause holds until the next pass."""

    def join(self, request: Request, claim: Claim) -> None:
        """A wait begins, at the time of the request's last change of state."""
        wait = _Wait(way_of(request, claim), request.changed_at)
        self._waits[request.id] = wait
        self._new.append(wait)
        for clock in self._path(wait.way):
            clock.num_waiting += 1

    def leave(self, request: Request, now: float) -> tuple[tuple[CauseTime, ...], str]:
        """A wait ends: its causes, and who held most of what it waited for."""
        wait = self._waits.pop(request.id)
        self._settle(wait, now)
        self._prune(wait.way)
        wait.is_over = True
        causes = tuple(CauseTime(cause, s) for cause, s in wait.spent.items() if s > ROUNDING_S)
        wants = {WaitCause.RUNNING_LIMIT, WaitCause.KV_BLOCKS}
        return causes, wait.held_by if any(one.cause in wants for one in causes) else ""

    def note_blocked(self, request: Request, cause: WaitCause, now: float) -> None:
        """It was tried and did not fit; until the next pass this is the cause."""
        self._note_own(request, cause, now)
        self.note_released(request)

    def note_parked(self, request: Request, now: float) -> None:
        """Its tenant holds all it may; this is the cause until `note_released`."""
        self._note_own(request, WaitCause.TENANT_SHARE, now)

    def note_released(self, request: Request) -> None:
        """The next pass will look at it again."""
        wait = self._waits[request.id]
        wait.is_for_pass = True
        self._tried.append(wait)

    def note_aged(self, request: Request, claim: Claim, now: float) -> None:
        """It has aged, and may stand elsewhere from now on."""
        wait, way = self._waits[request.id], way_of(request, claim)
        if way == wait.way:
            return
        own = wait.own
        self._settle(wait, now)
        self._prune(wait.way)
        wait.way = way
        for clock in self._path(wait.way):
            clock.num_waiting += 1
        if own is None:
            self._start(wait)
        else:
            wait.own = own

    def begin_pass(self, now: float) -> None:
        """What the last pass left behind held until now."""
        self._advance(now)
        tried, self._tried = self._tried, []
        for wait in tried:
            if wait.is_for_pass and not wait.is_over:
                self._settle(wait, now)
                self._start(wait)

    def end_pass(
        self, head: Head | None, cause: WaitCause, holder: Callable[[], str], now: float
    ) -> None:
        """The head, or None if nobody waits, and what kept it out."""
        self._advance(now)
        new = [wait for wait in self._new if not wait.is_over]
        self._new.clear()
        held_by = holder() if head is not None and new else ""
        for wait in new:
            wait.held_by = held_by
            if wait.own is WaitCause.EXECUTOR_BUSY:
                self._settle(wait, now)
                self._start(wait)
        self._head, self._head_clocks = None, []
        if head is not None:
            way = head_way(head)
            self._head, self._is_early = (way, cause), head.is_early
            self._head_clocks = self._path(way)

    def cause_of(self, request: Request) -> WaitCause:
        """Why it waits at this moment."""
        wait = self._waits[request.id]
        if wait.own is not None or self._head is None:
            return wait.own or WaitCause.EXECUTOR_BUSY
        way, cause = self._head
        for depth, (mine, its) in enumerate(zip(wait.way, way, strict=False)):
            if mine != its:
                is_early = self._is_early and depth == BELOW_RANK
                return WaitCause.DEADLINE_ORDER if is_early else BEHIND[depth]
        return cause

    def _note_own(self, request: Request, cause: WaitCause, now: float) -> None:
        wait = self._waits[request.id]
        self._settle(wait, now)
        wait.own = cause
        wait.is_for_pass = False

    def _path(self, way: Way) -> list[_Clock]:
        """The clocks from the root to the end of a way."""
        clocks = [self._root]
        for part in way:
            children = clocks[-1].children
            clock = children.get(part)
            if clock is None:
                clock = children[part] = _Clock()
            clocks.append(clock)
        return clocks

    def _prune(self, way: Way) -> None:
        """One fewer waits at the end of this way; clocks nobody reads go."""
        clocks = self._path(way)
        for clock in clocks:
            clock.num_waiting -= 1
        for parent, part, clock in zip(clocks, way, clocks[1:], strict=False):
            if clock.num_waiting == 0:
                del parent.children[part]
                return

    def _advance(self, now: float) -> None:
        elapsed_s, self._at = now - self._at, now
        if self._head is None or elapsed_s == 0.0:
            return
        for clock in self._head_clocks:
            clock.below_s += elapsed_s
            if self._is_early:
                clock.early_s += elapsed_s
        _add(self._head_clocks[-1].causes, self._head[1], elapsed_s)

    def _start(self, wait: _Wait) -> None:
        wait.own = None
        wait.is_for_pass = False
        wait.start = [clock.read() for clock in self._path(wait.way)]

    def _settle(self, wait: _Wait, now: float) -> None:
        """Add the time since `since` to what was spent, and go on from now."""
        elapsed_s, wait.since = now - wait.since, now
        spent = wait.spent
        if wait.own is not None:
            _add(spent, wait.own, elapsed_s)
            return
        self._advance(now)
        if wait.start is None or elapsed_s == 0.0:
            return
        clocks = self._path(wait.way)
        for depth, (clock, start) in enumerate(zip(clocks, wait.start, strict=True)):
            for cause, seconds in clock.causes.items():
                _add(spent, cause, seconds - (start.causes or {}).get(cause, 0.0))
            if depth < len(BEHIND):
                child, began = clocks[depth + 1], wait.start[depth + 1]
                stood_s = sum(clock.causes.values()) - start.stood_s
                parted_s = clock.below_s - start.below_s - stood_s - (child.below_s - began.below_s)
                if depth == BELOW_RANK and clock.early_s > start.early_s:
                    early_s = clock.early_s - start.early_s - (child.early_s - began.early_s)
                    _add(spent, WaitCause.DEADLINE_ORDER, early_s)
                    parted_s -= early_s
                _add(spent, BEHIND[depth], parted_s)
        self._start(wait)


def _add(spent: Spent, cause: WaitCause, seconds: float) -> None:
    spent[cause] = spent.get(cause, 0.0) + seconds
