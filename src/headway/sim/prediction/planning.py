"""How much load engines carry within a target, and how many engines a load needs.

A target counts as kept if it is kept at the far end of the interval, not in the middle: near
saturation the middle says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice, pairwise
from math import ceil, inf

from headway.errors import ConfigError
from headway.sim.prediction.figures import Figures, Interval, Prediction, Runs, predict
from headway.sim.prediction.serving import Limits, serve_load
from headway.sim.prediction.setup import MAX_ENGINES, Setup
from headway.sim.recording.items import follows
from headway.workload import Listed, Replay, Synthetic, Workload

KNEE_SHARE = 0.8
"""Share of the saturated rate from which latency rises steeply with the load."""
REQUESTS_PER_SLOT = 6
MIN_REQUESTS = 200
MAX_SATURATED_RUNS = 5
MIN_SERVED = 20
RATE_TOLERANCE = 1.05
MAX_RATIO = 10.0
"""A latency this many times its target is as bad as any longer one."""
MAX_POOLED = 8
"""Engines whose requests a run has; with more of them, each has fewer."""
DOUBT_SHARE = 0.15
"""If no more runs than these miss the target, chance may be why, and more runs decide."""
DOUBT_RATIO = 0.5
"""A target of which no run needs so much is kept without doubt."""
MORE_RUNS = 2
"""Further runs then, for each run so far."""
LOWEST_SHARE = 0.02
"""Part of the saturated rate below which a target counts as impossible."""

OpenWorkload = Synthetic | Replay
Note = Callable[[str], None]


class Regime(StrEnum):
    """How near a load is to what the engines can do."""

    STABLE = "stable"
    NEAR_THE_KNEE = "near the knee"
    OVERLOADED = "overloaded"
    REFUSING = "refusing"
    """Requests are refused, for their targets or their size: what can be served says little."""


REFUSALS = {
    "deadline": "because their targets cannot be met beside the others",
    "never_fits": "because they are larger than the KV cache or the KV quota of their tenant",
}
"""Reasons of refusals in words."""


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
        percent = self.percent
        return max(
            figures.ttft_s[percent] / self.ttft_s,
            figures.tpot_s[percent] / self.tpot_s,
            figures.e2e_s[percent] / self.e2e_s,
        )


@dataclass(frozen=True, slots=True)
class Study:
    """What a plan is about, and how thoroughly it is simulated."""

    setup: Setup
    workload: OpenWorkload
    goal: Goal
    num_requests: int = 400
    """Requests of a run with one engine."""
    runs: Runs = field(default_factory=Runs)
    note: Note = lambda _text: None

    def predict(self, rate: float, num_engines: int | None = None) -> Prediction:
        """Simulate the load at a rate, more often if chance may decide whether it is carried.

        One slow run in 19 would otherwise end the search far below what is carried.
        """
        setup = self.setup if num_engines is None else self.setup.fixed(num_engines)
        limits = Limits(self.num_requests * min(setup.num_engines, MAX_POOLED))
        load, runs = self.workload.with_rate(rate), self.runs
        found = predict(setup, load, limits, runs)
        ratios = [self.goal.ratio(one) for one in found.figures]
        num_missed = sum(one > 1.0 for one in ratios)
        if max(ratios) < DOUBT_RATIO or num_missed > DOUBT_SHARE * runs.count:
            return found
        more = replace(runs, count=MORE_RUNS * runs.count, seed=runs.seed + runs.count)
        return found.plus(predict(setup, load, limits, more))

    def ratio(self, rate: float, num_engines: int | None = None) -> Interval:
        """Return the latency at a rate relative to its target."""
        found = self.predict(rate, num_engines).interval(self.goal.ratio)
        self.note(
            f"{rate:.2f} requests/s: p{self.goal.percent} at {found.middle:.2f} of the target "
            f"({found.low:.2f} - {found.high:.2f})"
        )
        return found


def saturated_rate(setup: Setup, workload: Workload, runs: Runs) -> Interval:
    """Return the requests per second that the engines finish if requests never run out."""
    num_slots = setup.spec.scheduler.max_num_seqs
    num_requests = max(MIN_REQUESTS, REQUESTS_PER_SLOT * num_slots) * setup.num_engines
    rates: list[float] = []
    for seed in range(runs.seed, runs.seed + min(runs.count, MAX_SATURATED_RUNS)):
        items = islice(workload.items(seed), num_requests)
        listed = Listed(tuple(replace(item, at=0.0) for item in items))
        load = serve_load(setup, listed, Limits(num_requests), seed, seed)
        ends = sorted(one.finished_at for one in load.requests if one.finished_at is not None)
        if len(ends) < MIN_SERVED:
            raise ConfigError(
                f"{len(ends)} requests were served; to find what the engines can do takes "
                f"{MIN_SERVED}"
            )
        # While the running set fills and when it empties, engines finish less.
        low, high = len(ends) // 5, 4 * len(ends) // 5
        rates.append((high - low) / (ends[high] - ends[low]))
    return Interval.of(rates)


def regime_of(rate: float, saturated: Interval) -> Regime:
    """Return how near a rate is to saturation; in doubt, nearer."""
    if rate >= saturated.low:
        return Regime.OVERLOADED
    return Regime.STABLE if rate < KNEE_SHARE * saturated.low else Regime.NEAR_THE_KNEE


@dataclass(frozen=True, slots=True)
class LoadVerdict:
    """Whether a load can be served, and how far it is from what can be."""

    regime: Regime
    reason: str

    @property
    def text(self) -> str:
        return f"{self.regime}: {self.reason}"


def judge(
    setup: Setup, workload: Workload, prediction: Prediction, runs: Runs
) -> LoadVerdict | None:
    """Judge a load; None for a closed loop or too few requests, unless some are refused."""
    if refused := _describe_refusals(prediction):
        return LoadVerdict(Regime.REFUSING, refused)
    if isinstance(workload, Listed) and any(map(follows, workload.requests)):
        return None
    rate, requests = workload.mean_rate, prediction.loads[0].requests
    if workload.concurrency is not None or len(requests) < MIN_SERVED:
        return None
    if rate is None:
        span_s = requests[-1].scheduled_at - requests[0].scheduled_at
        rate = len(requests) / span_s if span_s > 0 else inf
    found = saturated_rate(setup.fixed(setup.most_engines), workload, runs)
    most = f"{found.middle:.3g} ({found.low:.3g} - {found.high:.3g})"
    reason = f"{rate:.3g} requests/s arrive; at most {most} can be served"
    return LoadVerdict(regime_of(rate, found), reason)


def _describe_refusals(prediction: Prediction) -> str:
    """Return which share of the requests is refused, and why; empty if none is."""
    loads = [one.requests for one in prediction.loads if one.requests]
    parts: list[str] = []
    for reason, words in REFUSALS.items():
        counts = [sum(one.refusal_reason == reason for one in requests) for requests in loads]
        if any(counts):
            pairs = zip(counts, loads, strict=True)
            found = Interval.of([100 * number / len(requests) for number, requests in pairs])
            share = f"{found.middle:.3g} % ({found.low:.3g} - {found.high:.3g}) of the requests"
            parts.append(f"{share} are refused, {words}")
    return "; ".join(parts)


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
    if ratio(lowest).high > 1.0:
        raise ConfigError(
            f"the target cannot be kept: at {lowest:.3g} requests/s the p{study.goal.percent} is "
            f"{ratio(lowest).middle:.1f} times the target already"
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
    output_tokens_per_s: float


def engines_needed(study: Study, rate: float, carried: CarriedRate) -> EnginesNeeded:
    """Return the fewest engines that keep the target at a rate."""
    # A router gathers the load of many engines, so each carries a little more than one alone.
    num_engines = max(1, ceil(0.8 * rate / carried.sure))
    while num_engines <= MAX_ENGINES:
        prediction = study.predict(rate, num_engines)
        found = prediction.interval(study.goal.ratio)
        study.note(
            f"{num_engines} engines: p{study.goal.percent} at {found.middle:.2f} of the target "
            f"({found.low:.2f} - {found.high:.2f})"
        )
        regime = regime_of(rate / num_engines, carried.saturated)
        if found.high <= 1.0 and regime is not Regime.OVERLOADED:
            return EnginesNeeded(
                num_engines,
                found,
                regime,
                prediction.interval(lambda one: one.output_tokens_per_s).middle,
            )
        num_engines += max(1, num_engines // 20)
    raise ConfigError(f"more than {MAX_ENGINES} engines are needed; plan a part of the load")
