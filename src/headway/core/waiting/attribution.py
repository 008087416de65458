"""Wait attribution: the seconds of every wait by cause; they add up to the wait.

At any time a waiting request has exactly one cause. A scheduling pass ends with a head, the first
request left waiting, and the cause that kept it out. Until the next pass:

    the head, and requests on the same path          the head's cause
    a request of a later rank or priority            tier_order
    a request of another tenant                      tenant_share; deadline_order if the head is
                                                     first only because of its SLO
    a request without SLO behind one with            deadline_order
    a request that was tried and did not fit         its own cause
    a request of a tenant at its KV quota            kv_quota
    a request that arrived since the pass            executor_busy

A pass does not look at every waiting request. Clocks form a tree by rank, tenant, priority and
whether the request has an SLO. A pass advances the clocks on the path to its head; a request reads
the clocks on its own path when it starts to wait and when it stops.

A tenant at its KV quota is suspended as a whole. While it is, a probe on the path of its requests
collects what the clocks attribute; that is subtracted, and kv_quota added instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from headway.core.causes import CauseTime, WaitCause
from headway.core.request import Request
from headway.core.waiting.sort_key import SortKey

BRANCH_CAUSES = (
    WaitCause.TIER_ORDER,
    WaitCause.TENANT_SHARE,
    WaitCause.TIER_ORDER,
    WaitCause.DEADLINE_ORDER,
)
"""Cause of a request whose path leaves the head's at the rank, tenant, priority or SLO."""
TENANT_DEPTH = 1
MAX_PROBES = 16
"""Probes per suspended tenant: one for each rank of its waiting requests."""
ROUNDING_S = 1e-9
"""Less is an error of floating-point sums."""
Seconds = dict[WaitCause, float]
Path = tuple[Hashable, ...]


class Head(NamedTuple):
    """The first request that a pass left waiting."""

    request: Request
    key: SortKey
    is_early: bool = False
    """It goes before its tenant's turn because of its SLO."""


def _no_seconds() -> Seconds:
    return {}


def _no_children() -> dict[Hashable, _CauseClock]:
    return {}


class _Reading(NamedTuple):
    """A clock at some time; `causes` is None while it has none, to spare the copy."""

    below_s: float
    early_s: float
    caused_s: float
    causes: Seconds | None


@dataclass(slots=True, eq=False)
class _CauseClock:
    """Seconds in which the head was below this node, and its causes for all requests below."""

    below_s: float = 0.0
    early_s: float = 0.0
    """Part of below_s in which the head was early."""
    causes: Seconds = field(default_factory=_no_seconds)
    children: dict[Hashable, _CauseClock] = field(default_factory=_no_children)
    num_waiting: int = 0

    def read(self) -> _Reading:
        causes = self.causes
        copied = causes.copy() if causes else None
        return _Reading(self.below_s, self.early_s, sum(causes.values()), copied)


@dataclass(slots=True, eq=False)
class _WaitRecord:
    """One wait: seconds by cause so far, and the clocks at that time."""

    tenant: str
    path: Path
    since: float
    spent: Seconds = field(default_factory=_no_seconds)
    own: WaitCause | None = WaitCause.EXECUTOR_BUSY
    """Cause of this request alone; None: the clocks tell."""
    start: list[_Reading] | None = None
    quota_start: tuple[float, Seconds] = (0.0, {})
    """Quota time at the start: seconds, and what the probe had collected."""
    held_by: str = ""
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _QuotaTime:
    """Time of a suspended tenant, for its requests on one path."""

    probe: _WaitRecord
    seconds: float = 0.0


def path_of(request: Request, key: SortKey) -> Path:
    """Return the place of a request in the tree of clocks."""
    return key.rank, key.tenant, key.tenant_priority, request.start_by < inf


def path_of_head(head: Head) -> Path:
    """Return the node whose requests share the head's cause; an aged head blocks all beside it."""
    path = path_of(head.request, head.key)
    if not head.request.is_aged:
        return path
    return path[:2] if head.key.tenant is not None else ()


def _probe_path(path: Path) -> Path:
    """Return the part of a path on which clocks can move while its tenant is suspended."""
    return path[:2] if path[TENANT_DEPTH] is not None else path


class WaitAttribution:
    """The clocks, and the waits that read them."""

    def __init__(self) -> None:
        self._root = _CauseClock()
        self._at = 0.0
        self._head: tuple[Path, WaitCause] | None = None
        self._is_early = False
        self._head_clocks: list[_CauseClock] = []
        self._waits: dict[str, _WaitRecord] = {}
        self._new: list[_WaitRecord] = []
        """Waits that no pass has seen."""
        self._blocked: list[_WaitRecord] = []
        """Waits whose own cause holds until the next pass."""
        self._suspended: dict[str, float] = {}
        """Tenants at their KV quota, and the time up to which that is accounted for."""
        self._resuming: set[str] = set()
        """Suspended tenants that the next pass will try again."""
        self._paths: dict[str, Counter[Path]] = {}
        """Waiting requests of each tenant by probe path."""
        self._quota_times: dict[str, dict[Path, _QuotaTime]] = {}
        """Of each tenant that was suspended since its present requests arrived."""

    @property
    def is_active(self) -> bool:
        """Whether a pass has something to account for."""
        return bool(self._head or self._new or self._blocked or self._suspended)

    def start(self, request: Request, key: SortKey) -> None:
        """Start a wait at the request's last change of state."""
        wait = _WaitRecord(request.terms.tenant, path_of(request, key), request.state_since)
        self._waits[request.id] = wait
        self._new.append(wait)
        self._enter(wait)

    def stop(self, request: Request, now: float) -> tuple[tuple[CauseTime, ...], str]:
        """End a wait; return its causes, and the tenant that held most of what was needed."""
        wait = self._waits.pop(request.id)
        self._settle(wait, now)
        self._exit(wait)
        wait.is_over = True
        causes = tuple(CauseTime(cause, s) for cause, s in wait.spent.items() if s > ROUNDING_S)
        needs = {WaitCause.RUNNING_LIMIT, WaitCause.KV_BLOCKS}
        return causes, wait.held_by if any(one.cause in needs for one in causes) else ""

    def block(self, request: Request, cause: WaitCause, now: float) -> None:
        """Record that a request was tried and did not fit; holds until the next pass."""
        wait = self._waits[request.id]
        self._settle(wait, now)
        wait.own = cause
        self._blocked.append(wait)

    def suspend(self, tenant: str, now: float) -> None:
        """Attribute the waits of a tenant to its KV quota until `resume`."""
        self._resuming.discard(tenant)
        if tenant in self._suspended:
            return
        self._suspended[tenant] = now
        self._advance(now)
        for path in list(self._paths.get(tenant, ()))[:MAX_PROBES]:
            self._begin_probe(tenant, path)

    def resume(self, tenant: str) -> None:
        """Attribute the tenant's waits to other causes again, from the next pass on.

        Until then no pass has found another cause.
        """
        if tenant in self._suspended:
            self._resuming.add(tenant)

    def begin_pass(self, now: float) -> None:
        """Account for the time since the last pass."""
        self._end_suspensions(now)
        blocked, self._blocked = self._blocked, []
        for wait in blocked:
            if not wait.is_over:
                self._settle(wait, now)
                self._follow_clocks(wait)

    def end_pass(
        self, head: Head | None, cause: WaitCause, find_holder: Callable[[], str], now: float
    ) -> None:
        """Set the head, None if no request waits for its turn, and the cause that kept it out."""
        self._end_suspensions(now)
        new = [wait for wait in self._new if not wait.is_over]
        self._new.clear()
        held_by = find_holder() if head is not None and new else ""
        for wait in new:
            wait.held_by = held_by
            if wait.own is WaitCause.EXECUTOR_BUSY:
                self._settle(wait, now)
                self._follow_clocks(wait)
        self._head, self._head_clocks = None, []
        if head is not None:
            path = path_of_head(head)
            self._head, self._is_early = (path, cause), head.is_early
            self._head_clocks = self._clocks(path)

    def cause_of(self, request: Request) -> WaitCause:
        """Return why a request waits at this moment."""
        wait = self._waits[request.id]
        if wait.own is not None:
            return wait.own
        if wait.tenant in self._suspended:
            return WaitCause.KV_QUOTA
        if self._head is None:
            return WaitCause.EXECUTOR_BUSY
        path, cause = self._head
        for depth, (own, other) in enumerate(zip(wait.path, path, strict=False)):
            if own != other:
                is_early = self._is_early and depth == TENANT_DEPTH
                return WaitCause.DEADLINE_ORDER if is_early else BRANCH_CAUSES[depth]
        return cause

    # ------------------------------------------------------------------ clocks

    def _clocks(self, path: Path) -> list[_CauseClock]:
        """Return the clocks from the root to the end of a path."""
        clocks = [self._root]
        for part in path:
            children = clocks[-1].children
            clock = children.get(part)
            if clock is None:
                clock = children[part] = _CauseClock()
            clocks.append(clock)
        return clocks

    def _enter(self, wait: _WaitRecord) -> None:
        for clock in self._clocks(wait.path):
            clock.num_waiting += 1
        self._paths.setdefault(wait.tenant, Counter())[_probe_path(wait.path)] += 1

    def _exit(self, wait: _WaitRecord) -> None:
        """Drop the clocks and probes that no other wait reads."""
        clocks = self._clocks(wait.path)
        for clock in clocks:
            clock.num_waiting -= 1
        for parent, part, clock in zip(clocks, wait.path, clocks[1:], strict=False):
            if clock.num_waiting == 0:
                del parent.children[part]
                break
        paths, path = self._paths[wait.tenant], _probe_path(wait.path)
        paths[path] -= 1
        if not paths[path]:
            del paths[path]
            self._quota_times.get(wait.tenant, {}).pop(path, None)
            if not paths:
                del self._paths[wait.tenant]
                self._quota_times.pop(wait.tenant, None)

    def _advance(self, now: float) -> None:
        elapsed_s, self._at = now - self._at, now
        if self._head is None or elapsed_s == 0.0:
            return
        for clock in self._head_clocks:
            clock.below_s += elapsed_s
            if self._is_early:
                clock.early_s += elapsed_s
        _add(self._head_clocks[-1].causes, self._head[1], elapsed_s)

    def _follow_clocks(self, wait: _WaitRecord) -> None:
        """Let the clocks tell the cause of a wait from now on."""
        wait.own = None
        wait.start = [clock.read() for clock in self._clocks(wait.path)]
        quota_time = self._quota_time(wait)
        if quota_time is not None:
            wait.quota_start = (quota_time.seconds, quota_time.probe.spent.copy())
        else:
            wait.quota_start = (0.0, {})

    def _settle(self, wait: _WaitRecord, now: float) -> None:
        """Attribute the time up to now."""
        elapsed_s, wait.since = now - wait.since, now
        if wait.own is not None:
            _add(wait.spent, wait.own, elapsed_s)
            return
        self._advance(now)
        if wait.start is None or elapsed_s == 0.0:
            return
        self._attribute(wait, wait.start)
        quota_time = self._quota_time(wait)
        if quota_time is not None:
            seconds, collected = wait.quota_start
            _add(wait.spent, WaitCause.KV_QUOTA, quota_time.seconds - seconds)
            for cause, collected_s in quota_time.probe.spent.items():
                _add(wait.spent, cause, collected.get(cause, 0.0) - collected_s)
        self._follow_clocks(wait)

    def _attribute(self, wait: _WaitRecord, start: list[_Reading]) -> None:
        """Add what the clocks on the path have counted since `start`."""
        spent, clocks = wait.spent, self._clocks(wait.path)
        for depth, (clock, began) in enumerate(zip(clocks, start, strict=True)):
            for cause, seconds in clock.causes.items():
                _add(spent, cause, seconds - (began.causes or {}).get(cause, 0.0))
            if depth == len(wait.path):
                break
            child, child_began = clocks[depth + 1], start[depth + 1]
            caused_s = sum(clock.causes.values()) - began.caused_s
            child_s = child.below_s - child_began.below_s
            branched_s = clock.below_s - began.below_s - caused_s - child_s
            if depth == TENANT_DEPTH and clock.early_s > began.early_s:
                early_s = clock.early_s - began.early_s - (child.early_s - child_began.early_s)
                _add(spent, WaitCause.DEADLINE_ORDER, early_s)
                branched_s -= early_s
            _add(spent, BRANCH_CAUSES[depth], branched_s)

    # ------------------------------------------------------------------- quota

    def _end_suspensions(self, now: float) -> None:
        """End the suspension of tenants that were resumed; the head may be theirs from now on."""
        self._advance(now)
        for tenant in self._resuming:
            self._update_quota_times(tenant, now)
            del self._suspended[tenant]
        self._resuming.clear()

    def _begin_probe(self, tenant: str, path: Path) -> None:
        times = self._quota_times.setdefault(tenant, {})
        if path not in times:
            if len(times) >= MAX_PROBES:
                return
            times[path] = _QuotaTime(_WaitRecord(tenant, path, 0.0))
        times[path].probe.start = [clock.read() for clock in self._clocks(path)]

    def _quota_time(self, wait: _WaitRecord) -> _QuotaTime | None:
        """Return the quota time of a wait, up to date; None if its tenant has none."""
        path = _probe_path(wait.path)
        if wait.tenant in self._suspended:
            self._update_quota_times(wait.tenant, self._at)
            if path not in self._quota_times.get(wait.tenant, {}):
                self._begin_probe(wait.tenant, path)
        return self._quota_times.get(wait.tenant, {}).get(path)

    def _update_quota_times(self, tenant: str, now: float) -> None:
        elapsed_s = now - self._suspended[tenant]
        if elapsed_s == 0.0:
            return
        self._suspended[tenant] = now
        for path, quota_time in self._quota_times.get(tenant, {}).items():
            probe = quota_time.probe
            if probe.start is not None:
                quota_time.seconds += elapsed_s
                self._attribute(probe, probe.start)
                probe.start = [clock.read() for clock in self._clocks(path)]


def _add(spent: Seconds, cause: WaitCause, seconds: float) -> None:
    spent[cause] = spent.get(cause, 0.0) + seconds
