"""Work of the open SLO requests by due time, in total and by tenant.

The work of waiting requests is updated when a request is added, starts, is preempted or ends. Due
times are rounded down to 1/32 of their horizon, so thousands of requests share a few hundred
entries. The work of running requests is replaced once per step. The cost of an arrival grows with
the entries, not with the open requests.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import exp, floor, frexp, inf
from typing import NamedTuple

from headway.core.slo.steptime import StepCost, StepShape

GRID = 32
"""Entries per octave of the horizon."""
HORIZONS_S = tuple(0.25 * 2.0 ** (step / 2) for step in range(24))
"""Horizons at which a forecast has the demand: 0.25 s to 12 minutes, two per octave."""
MIN_EXPONENT = -4
"""Horizons below 2 ** MIN_EXPONENT seconds share the grid of that octave."""
RATE_WINDOW_S = 20.0
MIN_WINDOW_S = 2.0
BY_SHARE = -2
"""Tightness of work admitted by its tenant's share: test (a) reserves room for it always."""
LENGTH_SMOOTHING = 0.02
LENGTH_MARGIN = 1.2
MAX_TENANTS = 4096
"""Most tenants whose output lengths are remembered; the least recently updated go first."""


def round_down(at: float, now: float) -> float:
    """Return a time rounded down to 1/32 of its horizon; -inf if it has passed."""
    horizon_s = at - now
    if horizon_s <= 0.0:
        return -inf
    _, exponent = frexp(horizon_s)
    step = 2.0 ** max(MIN_EXPONENT, exponent - 1) / GRID
    return floor(at / step) * step


class Points(NamedTuple):
    """Seconds of work up to each of some increasing times."""

    times: Sequence[float] = ()
    totals: Sequence[float] = ()
    """Cumulative: the work of a time includes that of all earlier times."""

    @property
    def total(self) -> float:
        """All seconds of work."""
        return self.totals[-1] if self.totals else 0.0

    def until(self, at: float) -> float:
        """Return the seconds of work at or before a time."""
        end = bisect_right(self.times, at)
        return self.totals[end - 1] if end else 0.0

    def since(self, at: float) -> tuple[Sequence[float], Sequence[float]]:
        """Return the times from `at` on, and their totals."""
        start = bisect_left(self.times, at)
        return self.times[start:], self.totals[start:]

    def plus(self, other: Points) -> Points:
        """Return the work of both."""
        if not other.times:
            return self
        return points_of(sorted([*self._pairs(), *other._pairs()]))

    def _pairs(self) -> Iterable[tuple[float, float]]:
        totals = self.totals
        seconds = [total - before for total, before in zip(totals, (0.0, *totals), strict=False)]
        return zip(self.times, seconds, strict=True)

    def sampled_ms(self, now: float) -> list[int]:
        """Return the totals at HORIZONS_S from now, in milliseconds.

        The list ends with the horizon that includes all work. Totals are rounded down.
        """
        times, totals = self
        if not times:
            return []
        num_horizons = bisect_left(HORIZONS_S, times[-1] - now) + 1
        ends = [bisect_right(times, now + one) for one in HORIZONS_S[:num_horizons]]
        return [int(1000.0 * totals[end - 1]) if end else 0 for end in ends]


def points_of(pairs: Sequence[tuple[float, float]]) -> Points:
    """Return the points of sorted pairs of a time and seconds of work."""
    return Points([at for at, _ in pairs], list(accumulate([seconds for _, seconds in pairs])))


def points_of_sample(totals_ms: Sequence[int], age_s: float = 0.0, now: float = 0.0) -> Points:
    """Return the points of a sample made `age_s` ago.

    Work that was due since then counts as done.
    """
    start = bisect_right(HORIZONS_S, age_s)
    done_ms = totals_ms[min(start, len(totals_ms)) - 1] if start and totals_ms else 0
    times = [now - age_s + horizon_s for horizon_s in HORIZONS_S[start : len(totals_ms)]]
    return Points(times, [(total - done_ms) / 1000.0 for total in totals_ms[start:]])


class _Column:
    """Work by time: of waiting requests by grid time, of running requests replaced per step."""

    __slots__ = ("_cost", "_points", "_running", "_seconds", "_times", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[float, StepShape] = {}
        self._times: list[float] = []
        self._seconds: list[float] = []
        """Of the waiting work, at `_cost`."""
        self._cost: StepCost | None = None
        self._running: list[tuple[float, float]] = []
        self._points: Points | None = None

    def add(self, at: float, work: StepShape) -> None:
        if not any(work):
            return
        before = self._waiting.get(at)
        self._waiting[at] = work if before is None else before.plus(work)
        self._points = None
        if self._cost is None:
            return
        index, added_s = bisect_left(self._times, at), self._cost.work_s(work)
        if before is not None:
            self._seconds[index] += added_s
        else:
            self._times.insert(index, at)
            self._seconds.insert(index, added_s)

    def remove(self, at: float, work: StepShape) -> None:
        if not any(work):
            return
        a, b, c, d = self._waiting[at]
        e, f, g, h = work
        left = StepShape(a - e, b - f, c - g, d - h)
        self._points = None
        index = bisect_left(self._times, at)
        if any(left):
            self._waiting[at] = left
            if self._cost is not None:
                self._seconds[index] = self._cost.work_s(left)
            return
        del self._waiting[at]
        if self._cost is not None:
            del self._times[index], self._seconds[index]

    def set_running(self, running: list[tuple[float, float]]) -> None:
        if running or self._running:
            self._running = running
            self._points = None

    def points(self, cost: StepCost) -> Points:
        if cost is not self._cost:
            self._times, self._cost, self._points = sorted(self._waiting), cost, None
            self._seconds = [cost.work_s(self._waiting[at]) for at in self._times]
        if self._points is None:
            if self._running:
                waiting = zip(self._times, self._seconds, strict=True)
                self._points = points_of(sorted([*waiting, *self._running]))
            else:
                self._points = Points(self._times[:], list(accumulate(self._seconds)))
        return self._points

    @property
    def work(self) -> StepShape:
        """All waiting work."""
        total = StepShape()
        for one in self._waiting.values():
            total = total.plus(one)
        return total


class DemandEntry(NamedTuple):
    """Work that one waiting request adds to a table."""

    demands: tuple[tuple[float, StepShape], ...]
    """Work by rounded due time."""
    start_at: float
    """Rounded planned start."""
    prefill: StepShape
    num_tokens: float
    """Weighted tokens that the tenant will be charged."""


def entry_of(
    demands: Iterable[tuple[float, StepShape]],
    start_at: float,
    prefill: StepShape,
    now: float,
    num_tokens: float = 0.0,
) -> DemandEntry:
    """Return the entry of a request, with its times rounded down."""
    rounded = tuple([(round_down(due_at, now), work) for due_at, work in demands])
    start_at = round_down(start_at, now) if start_at < inf else inf
    return DemandEntry(rounded, start_at, prefill, num_tokens)


class RunningWork:
    """Work of the running SLO requests, collected once per step."""

    __slots__ = ("due", "num_tokens", "starts")

    def __init__(self) -> None:
        self.due: list[tuple[float, float]] = []
        self.starts: list[tuple[float, float]] = []
        self.num_tokens = 0.0


class DemandTable:
    """Work of the open SLO requests of one tenant, or of all."""

    __slots__ = ("_due", "_running_tokens", "_starts", "_waiting_tokens", "num_waiting", "tighter")

    def __init__(self) -> None:
        self._due, self._starts = _Column(), _Column()
        self._running_tokens = self._waiting_tokens = 0.0
        self.num_waiting = 0
        self.tighter = TighterLoad()

    def add(self, entry: DemandEntry) -> None:
        """Add the work of a request that waits."""
        for due_at, work in entry.demands:
            self._due.add(due_at, work)
        self._starts.add(entry.start_at, entry.prefill)
        self._waiting_tokens += entry.num_tokens
        self.num_waiting += 1

    def remove(self, entry: DemandEntry) -> None:
        """Remove the work of a request that no longer waits."""
        for due_at, work in entry.demands:
            self._due.remove(due_at, work)
        self._starts.remove(entry.start_at, entry.prefill)
        self._waiting_tokens -= entry.num_tokens
        self.num_waiting -= 1

    def set_running(self, running: RunningWork) -> None:
        """Replace the work of the running requests."""
        self._due.set_running(running.due)
        self._starts.set_running(running.starts)
        self._running_tokens = running.num_tokens

    @property
    def num_tokens(self) -> float:
        """Weighted tokens that the open requests will be charged."""
        return self._running_tokens + self._waiting_tokens

    def due(self, cost: StepCost) -> Points:
        """Return the seconds of work by due time."""
        return self._due.points(cost)

    def starts(self, cost: StepCost) -> Points:
        """Return the seconds of prefill by planned start."""
        return self._starts.points(cost)

    def check(self, entries: Sequence[DemandEntry]) -> None:
        """Check that the table is the sum of the entries of the waiting requests."""
        due = start = StepShape()
        for entry in entries:
            start = start.plus(entry.prefill)
            for _, work in entry.demands:
                due = due.plus(work)
        if (due, start) != (self._due.work, self._starts.work) or self.num_waiting != len(entries):
            raise AssertionError("the demand table is not the sum of its entries")


class OutputLengths:
    """Output lengths as a share of max_tokens, learned by tenant.

    Most requests allow far more tokens than they produce. A tenant without finished requests has
    the value of its tier.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, float] = OrderedDict()
        self._tiers: dict[str, float] = {}

    def observe(self, tenant: str, tier: str, num_tokens: int, max_tokens: int) -> None:
        """Add a request that ended after `num_tokens`."""
        measured = num_tokens / max(1, max_tokens)
        before = self._tenants.pop(tenant, measured)
        self._tenants[tenant] = before + LENGTH_SMOOTHING * (measured - before)
        before = self._tiers.get(tier, measured)
        self._tiers[tier] = before + LENGTH_SMOOTHING * (measured - before)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)

    def share(self, tenant: str, tier: str) -> float:
        """Return the expected share of max_tokens, the margin included."""
        return LENGTH_MARGIN * self._tenants.get(tenant, self._tiers.get(tier, 1.0))

    def expected_left(self, tenant: str, tier: str, num_output: int, max_tokens: int) -> int:
        """Return the expected number of further tokens."""
        return expected_left(self.share(tenant, tier), num_output, max_tokens)


def expected_left(share: float, num_output: int, max_tokens: int) -> int:
    """Return the expected number of further tokens if outputs are `share` of max_tokens.

    A request beyond that length is expected to produce half of the tokens that are left.
    """
    num_left = share * max_tokens - num_output
    if num_left < 1:
        num_left = (max_tokens - num_output) / 2
    return max(1, min(max_tokens - num_output, int(num_left)))


class TighterLoad:
    """Recent rate of admitted work by tightness, in seconds of work per second.

    Requests with looser targets leave room for as much again. Without that room, batch work
    admitted now is the reason to refuse an interactive request half a minute later. Only admitted
    work counts: refused requests cost other tenants nothing.
    """

    __slots__ = ("_seconds", "_updated_at", "_work_s")

    def __init__(self) -> None:
        self._work_s: dict[int, float] = {}
        self._seconds = 0.0
        """Length of the window of the sums, with the same decay."""
        self._updated_at: float | None = None

    def add(self, tightness: int, work_s: float, now: float) -> None:
        """Add admitted work of this tightness."""
        self._decay(now)
        self._work_s[tightness] = self._work_s.get(tightness, 0.0) + work_s

    def rates(self, now: float) -> dict[int, float]:
        """Return the seconds of work per second, by tightness."""
        self._decay(now)
        window_s = max(self._seconds, MIN_WINDOW_S)
        return {key: work_s / window_s for key, work_s in self._work_s.items()}

    def _decay(self, now: float) -> None:
        passed_s = 0.0 if self._updated_at is None else max(0.0, now - self._updated_at)
        factor = exp(-passed_s / RATE_WINDOW_S)
        self._work_s = {key: work_s * factor for key, work_s in self._work_s.items()}
        self._seconds = self._seconds * factor + RATE_WINDOW_S * (1.0 - factor)
        self._updated_at = now if self._updated_at is None else max(self._updated_at, now)
