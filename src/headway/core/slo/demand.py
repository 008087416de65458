"""Work of the open SLO requests by due time, in total and by tenant.

Waiting requests are kept incrementally: when one is added, starts, is preempted or ends, a few
entries change. Due times are rounded down to a grid of 1/32 of their horizon, so that thousands of
requests share a few hundred entries. The work of running requests is set anew once per step. An
arrival then costs time in proportion to the entries, not to the open requests.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from math import exp, floor, frexp, inf
from typing import NamedTuple

from headway.core.slo.steptime import StepCost, StepShape

GRID = 32
"""Entries per octave of the horizon."""
MIN_EXPONENT = -4
"""Horizons below 2 ** MIN_EXPONENT seconds share the grid of that octave."""
RATE_WINDOW_S = 20.0
MIN_WINDOW_S = 2.0
ENTITLED = -2
"""Tightness of work that fits only into its tenant's share: all other tenants leave room for it."""
LENGTH_SMOOTHING = 0.02
LENGTH_MARGIN = 1.2
MAX_TENANTS = 4096
"""Tenants whose output lengths are remembered; beyond, the longest unseen are forgotten."""


def round_down(at: float, now: float) -> float:
    """A time rounded down to 1/32 of its horizon; -inf if it has passed."""
    horizon_s = at - now
    if horizon_s <= 0.0:
        return -inf
    _, exponent = frexp(horizon_s)
    step = 2.0 ** max(MIN_EXPONENT, exponent - 1) / GRID
    return floor(at / step) * step


class Points(NamedTuple):
    """Seconds of work at increasing times."""

    times: Sequence[float] = ()
    seconds: Sequence[float] = ()

    def until(self, at: float) -> float:
        """Seconds of work at or before a time."""
        return sum(self.seconds[: bisect_right(self.times, at)])

    def cumulated_from(self, at: float) -> tuple[Sequence[float], Sequence[float]]:
        """The times from `at` on, each with the seconds of all work up to it."""
        start = bisect_left(self.times, at)
        return self.times[start:], list(accumulate(self.seconds))[start:]

    def plus(self, pairs: Sequence[tuple[float, float]]) -> Points:
        """These and further pairs of a time and seconds of work."""
        merged = sorted([*zip(self.times, self.seconds, strict=True), *pairs])
        return Points([at for at, _ in merged], [seconds for _, seconds in merged])

    def since(self, now: float) -> Points:
        """The same as durations from now; what has passed is one entry at 0."""
        start = bisect_right(self.times, now)
        times = [at - now for at in self.times[start:]]
        seconds = list(self.seconds[start:])
        if start:
            return Points([0.0, *times], [sum(self.seconds[:start]), *seconds])
        return Points(times, seconds)


class _Column:
    """Work by time: of waiting requests kept by grid time, of running ones replaced per step."""

    __slots__ = ("_cost", "_points", "_running", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[float, StepShape] = {}
        self._running: list[tuple[float, float]] = []
        self._points: tuple[list[float], list[float]] | None = None
        self._cost: StepCost | None = None

    def add(self, at: float, work: StepShape) -> None:
        if not any(work):
            return
        before = self._waiting.get(at)
        self._waiting[at] = work if before is None else before.plus(work)
        if self._points is not None and self._cost is not None:
            times, seconds = self._points
            place, added_s = bisect_left(times, at), self._cost.work_s(work)
            if place < len(times) and times[place] == at:
                seconds[place] += added_s
            else:
                times.insert(place, at)
                seconds.insert(place, added_s)

    def remove(self, at: float, work: StepShape) -> None:
        if not any(work):
            return
        a, b, c, d = self._waiting[at]
        e, f, g, h = work
        left = StepShape(a - e, b - f, c - g, d - h)
        if any(left):
            self._waiting[at] = left
        else:
            del self._waiting[at]
        self._points = None

    def set_running(self, running: list[tuple[float, float]]) -> None:
        self._running = running
        self._points = None

    def points(self, cost: StepCost) -> Points:
        if self._points is None or cost is not self._cost:
            work_s = cost.work_s
            pairs = [(at, work_s(work)) for at, work in self._waiting.items()]
            pairs += self._running
            pairs.sort()
            self._points = [at for at, _ in pairs], [seconds for _, seconds in pairs]
            self._cost = cost
        return Points(*self._points)

    @property
    def work(self) -> StepShape:
        """All of it that waits."""
        total = StepShape()
        for one in self._waiting.values():
            total = total.plus(one)
        return total


class DemandEntry(NamedTuple):
    """What one waiting request adds to a table."""

    demands: tuple[tuple[float, StepShape], ...]
    """Work by rounded due time."""
    start_at: float
    """Rounded planned start."""
    prefill: StepShape
    num_tokens: float
    """Weighted tokens that its tenant will be charged."""


class RunningWork:
    """What the running SLO requests add to a table, collected once per step."""

    __slots__ = ("due", "num_tokens", "starts")

    def __init__(self) -> None:
        self.due: list[tuple[float, float]] = []
        self.starts: list[tuple[float, float]] = []
        self.num_tokens = 0.0


class DemandTable:
    """The work of open SLO requests of one tenant, or of all."""

    __slots__ = ("_due", "_running_tokens", "_starts", "_waiting_tokens", "num_waiting", "tighter")

    def __init__(self) -> None:
        self._due, self._starts = _Column(), _Column()
        self._running_tokens = self._waiting_tokens = 0.0
        self.num_waiting = 0
        self.tighter = TighterLoad()

    def add(self, entry: DemandEntry) -> None:
        """A request waits."""
        for due_at, work in entry.demands:
            self._due.add(due_at, work)
        self._starts.add(entry.start_at, entry.prefill)
        self._waiting_tokens += entry.num_tokens
        self.num_waiting += 1

    def remove(self, entry: DemandEntry) -> None:
        """A request waits no longer."""
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
        """Seconds of work by due time."""
        return self._due.points(cost)

    def starts(self, cost: StepCost) -> Points:
        """Seconds of prefill by planned start."""
        return self._starts.points(cost)

    def check(self, entries: Sequence[DemandEntry]) -> None:
        """The table is the sum of the entries of the requests that wait."""
        due = start = StepShape()
        for entry in entries:
            start = start.plus(entry.prefill)
            for _, work in entry.demands:
                due = due.plus(work)
        if (due, start) != (self._due.work, self._starts.work) or self.num_waiting != len(entries):
            raise AssertionError("the demand table is not the sum of its entries")


class OutputLengths:
    """Output lengths as a share of max_tokens, learned by tenant.

    Most requests allow far more tokens than they produce. A tenant that has finished nothing yet
    is taken to be like its tier.
    """

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, float] = OrderedDict()
        self._tiers: dict[str, float] = {}

    def observe(self, tenant: str, tier: str, num_tokens: int, max_tokens: int) -> None:
        """A request ended after `num_tokens`."""
        measured = num_tokens / max(1, max_tokens)
        before = self._tenants.pop(tenant, measured)
        self._tenants[tenant] = before + LENGTH_SMOOTHING * (measured - before)
        before = self._tiers.get(tier, measured)
        self._tiers[tier] = before + LENGTH_SMOOTHING * (measured - before)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)

    def share(self, tenant: str, tier: str) -> float:
        """Expected share of max_tokens, the margin included."""
        return LENGTH_MARGIN * self._tenants.get(tenant, self._tiers.get(tier, 1.0))

    def expected_left(self, tenant: str, tier: str, num_output: int, max_tokens: int) -> int:
        """Expected tokens to come."""
        return expected_left(self.share(tenant, tier), num_output, max_tokens)


def expected_left(share: float, num_output: int, max_tokens: int) -> int:
    """Expected tokens to come, if outputs are `share` of max_tokens long.

    A request that has outlived the guess is taken to be half-way to the end.
    """
    num_left = share * max_tokens - num_output
    if num_left < 1:
        num_left = (max_tokens - num_output) / 2
    return max(1, min(max_tokens - num_output, int(num_left)))


class TighterLoad:
    """Recent rate of admitted work by tightness, in seconds of work per second.

    Requests with looser targets leave room for as much again: else batch work admitted now would
    be the reason to refuse an interactive request in half a minute. Only admitted work counts, so
    that requests that are refused cost nobody anything.
    """

    __slots__ = ("_seconds", "_updated_at", "_work_s")

    def __init__(self) -> None:
        self._work_s: dict[int, float] = {}
        self._seconds = 0.0
        """Length of the window that the sums are over, with the same decay."""
        self._updated_at: float | None = None

    def add(self, horizon_s: float, work_s: float, now: float) -> None:
        """Work with this horizon was admitted."""
        self._decay(now)
        key = tightness(horizon_s)
        self._work_s[key] = self._work_s.get(key, 0.0) + work_s

    def rates(self, now: float) -> dict[int, float]:
        """Seconds of work per second, by tightness."""
        self._decay(now)
        window_s = max(self._seconds, MIN_WINDOW_S)
        return {key: work_s / window_s for key, work_s in self._work_s.items()}

    def _decay(self, now: float) -> None:
        passed_s = 0.0 if self._updated_at is None else max(0.0, now - self._updated_at)
        factor = exp(-passed_s / RATE_WINDOW_S)
        self._work_s = {key: work_s * factor for key, work_s in self._work_s.items()}
        self._seconds = self._seconds * factor + RATE_WINDOW_S * (1.0 - factor)
        self._updated_at = now if self._updated_at is None else max(self._updated_at, now)


def tightness(horizon_s: float) -> int:
    """The octave of a horizon: targets within a factor of two are about as tight."""
    if horizon_s <= 0.0:
        return ENTITLED
    return min(16, int(horizon_s).bit_length()) if horizon_s >= 1.0 else -1
