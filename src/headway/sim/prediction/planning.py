"""How much load engines carry within a target, and how many engines a load needs.

A target counts as kept if it is kept at the far end of the interval, not in the middle: near
saturation the middle says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, inf

from headway.errors import ConfigError
from headway.sim.prediction.figures import Figures, Interval, Prediction, Runs, predict
from headway.sim.prediction.serving import Limits
from headway.sim.prediction.setup import MAX_ENGINES, Setup
from headway.sim.prediction.verdict import Regime, regime_of, saturated_rate
from headway.workload import Replay, Synthetic

RATE_TOLERANCE = 1.05
MAX_RATIO = 10.0
"""A latency this many times its target is as bad as any longer one."""
MAX_POOLED = 4
"""A larger pool is planned as parts of so many engines: what one router gathers carries no less."""
FEW_RUNS = 5
"""If all of the first runs miss a target, no others are made: they would not change that."""
DOUBT_SHARE = 0.15
"""If no more runs than these miss the target, chance may be why, and more runs decide."""
DOUBT_RATIO = 0.5
"""A target of which no run needs so much is kept without doubt."""
MORE_RUNS = 2
"""Further runs then, for each run so far."""
LOWEST_SHARE = 0.02
"""Part of the saturated rate below which a target counts as impossible."""
MAX_LIGHT_REQUESTS = 200
"""Requests of a run at that rate, at which they hardly meet each other."""

OpenWorkload = Synthetic | Replay
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Goal:
    """Targets in seconds for a percentile of the requests."""

    percent: int = 99
    ttft_s: float = inf
    tpot_s: float = inf
    e2e_s: float = inf

    def __post_init__(self) -> None:
        if self.percent not in (50, 95, 99):
            raise ConfigError(f"the percentile is 50, 95 or 99, not {self.percent}")
        if min(self.ttft_s, self.tpot_s, self.e2e_s) == inf:
            raise ConfigError("a target is needed: --ttft, --tpot or --e2e")
        if min(self.ttft_s, self.tpot_s, self.e2e_s) <= 0:
            raise ConfigError("a target must be above 0 seconds")

    @property
    def text(self) -> str:
        """The targets in words."""
        named = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("E2E", self.e2e_s))
        parts = [f"{name} within {seconds:g} s" for name, seconds in named if seconds < inf]
        return f"p{self.percent} {', '.join(parts)}"

    def ratio(self, figures: Figures) -> float:
        """Return the largest latency relative to its target; 1 is just kept."""
        if figures.num_refused:
            return inf
        percent, tpot_s = self.percent, figures.tpot_s[self.percent]
        if tpot_s == inf and figures.num_completed:
            tpot_s = 0.0  # all outputs have one token
        return max(
            figures.ttft_s[percent] / self.ttft_s,
            tpot_s / self.tpot_s,
            figures.e2e_s[percent] / self.e2e_s,
        )


@dataclass(frozen=True, slots=True)
class Study:
    """What a plan is about, and how thoroughly it is simulated."""

    setup: Setup
    workload: OpenWorkload
    goal: Goal
    num_requests: int = 1000
    """Requests of a run, for each engine."""
    runs: Runs = field(default_factory=Runs)
    note: Note = lambda _text: None

    def predict(self, rate: float, num_engines: int | None = None) -> Prediction:
        """Simulate the load at a rate, more often if chance may decide whether it is carried.

        One slow run in 19 would otherwise end the search far below what is carried.
        """
        num_engines = self.setup.num_engines if num_engines is None else num_engines
        num_simulated = min(num_engines, MAX_POOLED)
        setup = self.setup.fixed(num_simulated)
        limits = Limits(self.num_requests * num_simulated)
        load = self.workload.with_rate(rate)
        if num_simulated < num_engines:
            load = load.part(num_simulated / num_engines)

        def run(first: int, count: int) -> Prediction:
            runs = replace(self.runs, first=first, count=count, begins_anywhere=True)
            return predict(setup, load, limits, runs)

        num_runs = self.runs.count
        found = run(0, min(FEW_RUNS, num_runs))
        if num_runs > FEW_RUNS and self._num_missed(found) < FEW_RUNS:
            found = found.plus(run(FEW_RUNS, num_runs - FEW_RUNS))
        num_missed = self._num_missed(found)
        is_kept = max(map(self.goal.ratio, found.figures)) < DOUBT_RATIO
        if is_kept or num_missed > DOUBT_SHARE * num_runs:
            return found
        return found.plus(run(num_runs, MORE_RUNS * num_runs))

    def _num_missed(self, found: Prediction) -> int:
        return sum(self.goal.ratio(one) > 1.0 for one in found.figures)

    def ratio(self, rate: float, num_engines: int | None = None) -> Interval:
        """Return the latency at a rate relative to its target."""
        found = self.predict(rate, num_engines).interval(self.goal.ratio)
        self.note(
            f"{rate:.2f} requests/s: p{self.goal.percent} at {found.middle:.2f} of the target "
            f"({found.low:.2f} - {found.high:.2f})"
        )
        return found


@dataclass(frozen=True, slots=True)
class CarriedRate:
    """Rates at which a target is kept."""

    sure: float
    """Kept at the far end of the interval."""
    likely: float
    """Kept in the middle of the interval."""
    saturated: Interval
    curve: tuple[tuple[float, Interval], ...]
    """Rates that were simulated, with the latency relative to its target."""


def carried_rate(study: Study) -> CarriedRate:
    """Return how many requests per second the engines carry within the target."""
    saturated = saturated_rate(study.setup, study.workload, study.runs)
    study.note(f"saturated at {saturated.middle:.2f} requests/s")
    known: dict[float, Interval] = {}

    def ratio(rate: float) -> Interval:
        if rate not in known:
            known[rate] = study.ratio(rate)
        return known[rate]

    lowest = LOWEST_SHARE * saturated.middle
    few = replace(study, num_requests=min(study.num_requests, MAX_LIGHT_REQUESTS))
    known[lowest] = few.ratio(lowest)
    if known[lowest].high > 1.0:
        raise ConfigError(
            f"the target cannot be kept: at {lowest:.3g} requests/s the p{study.goal.percent} is "
            f"{known[lowest].middle:.1f} times the target already"
        )
    # A run is too short to show that the queue grows without end.
    highest = saturated.high

    ratio(highest)  # for the curve: how steep it is
    kept, missed = lowest, highest
    while missed / kept > RATE_TOLERANCE:
        middle = (kept + missed) / 2
        kept, missed = (middle, missed) if ratio(middle).high <= 1.0 else (kept, middle)
    curve = tuple(sorted(known.items()))
    likely = _crossing([(rate, found.middle) for rate, found in curve])
    return CarriedRate(
        min(kept, saturated.low), min(likely or inf, saturated.middle), saturated, curve
    )


def _crossing(points: Sequence[tuple[float, float]]) -> float | None:
    """Return the rate at which the latency first exceeds its target; None if it never does."""
    for (rate, ratio), (next_rate, next_ratio) in pairwise(points):
        if ratio <= 1.0 < next_ratio:
            share = (1.0 - ratio) / (min(next_ratio, MAX_RATIO) - ratio)
            return rate + share * (next_rate - rate)
    return None


@dataclass(frozen=True, slots=True)
class EnginesNeeded:
    """Engines for a load within a target."""

    num_engines: int
    ratio: Interval
    """Latency relative to the target with so many engines."""
    regime: Regime
    tokens_per_request: float
    """Mean number of output tokens."""


def engines_needed(study: Study, rate: float, carried: CarriedRate) -> EnginesNeeded:
    """Return the fewest engines that keep the target at a rate."""
    known: dict[int, EnginesNeeded] = {}

    def is_enough(num_engines: int) -> bool:
        if num_engines > MAX_ENGINES:
            raise ConfigError(f"more than {MAX_ENGINES} engines are needed; plan parts of the load")
        found = known[num_engines] = _try_engines(study, rate, num_engines, carried.saturated)
        return found.ratio.high <= 1.0 and found.regime is not Regime.OVERLOADED

    # A router gathers the load of many engines, so each carries a little more than one alone.
    too_few, enough = int(rate / carried.saturated.low), max(1, ceil(rate / carried.sure))
    while not is_enough(enough):
        too_few, enough = enough, enough + max(1, enough // 20)
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        too_few, enough = (too_few, middle) if is_enough(middle) else (middle, enough)
    return known[enough]


def _try_engines(study: Study, rate: float, num_engines: int, saturated: Interval) -> EnginesNeeded:
    """Simulate a rate with so many engines."""
    prediction = study.predict(rate, num_engines)
    found = prediction.interval(study.goal.ratio)
    study.note(
        f"{num_engines} engines: p{study.goal.percent} at {found.middle:.2f} of the target "
        f"({found.low:.2f} - {found.high:.2f})"
    )
    requests = [one for load in prediction.loads for one in load.requests]
    num_tokens = sum(one.num_output_tokens for one in requests) / len(requests)
    regime = regime_of(rate / num_engines, saturated)
    return EnginesNeeded(num_engines, found, regime, num_tokens)
