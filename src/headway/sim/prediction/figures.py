"""Figures of simulated loads, over several runs, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from headway.core.slo.targets import met
from headway.core.terms import Targets
from headway.errors import ConfigError
from headway.percentiles import percentile, quantile
from headway.sim.prediction.served import ServedLoad, ServedRequest
from headway.sim.prediction.serving import Limits, serve_load
from headway.sim.prediction.setup import Setup
from headway.workload import Listed, Workload

PERCENTS = (50, 95, 99)
LOW, HIGH = 0.05, 0.95
"""Ends of an interval: quantiles over the runs."""
MOST_RUNS = 1_000_000
GOLDEN_SHARE = 0.6180339887498949
"""Multiples of this share are spread evenly over a trace, however many there are."""
Progress = Callable[[float, int], None]


@dataclass(frozen=True, slots=True)
class Figures:
    """Latencies and throughput of one load; as `headway bench serve` counts them."""

    num_requests: int
    num_completed: int
    num_refused: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_s: dict[int, float]
    tpot_s: dict[int, float]
    e2e_s: dict[int, float]
    """Percentiles; infinite without a completed request."""
    cached_share: float
    good_share: float | None = None
    """Share of the requests that met all targets; None without targets."""


def summarize(requests: Sequence[ServedRequest], targets: Targets | None = None) -> Figures:
    """Return the figures of these requests."""
    done = [one for one in requests if one.finished_at is not None]
    ends = [one.finished_at for one in done if one.finished_at is not None]
    elapsed_s = max(ends) - min(one.scheduled_at for one in requests) if ends else inf
    num_prompt = sum(one.num_prompt_tokens for one in done)
    is_good = [
        targets is not None and met(targets, one.ttft_s, one.tpot_s, one.e2e_s) for one in done
    ]
    return Figures(
        num_requests=len(requests),
        num_completed=len(done),
        num_refused=sum(one.is_refused for one in requests),
        requests_per_s=len(done) / elapsed_s,
        output_tokens_per_s=sum(one.num_output_tokens for one in done) / elapsed_s,
        ttft_s=_percentiles([one.ttft_s for one in done]),
        tpot_s=_percentiles([one.tpot_s for one in done]),
        e2e_s=_percentiles([one.e2e_s for one in done]),
        cached_share=sum(one.num_cached_tokens for one in done) / num_prompt if num_prompt else 0.0,
        good_share=None if targets is None else sum(is_good) / max(1, len(requests)),
    )


def by_tenant(
    requests: Sequence[ServedRequest], targets: Targets | None = None
) -> dict[str, Figures]:
    """Return the figures of each tenant; empty without tenants."""
    names = sorted({one.tenant for one in requests if one.tenant is not None})
    return {
        name: summarize([one for one in requests if one.tenant == name], targets) for name in names
    }


def _percentiles(values: Sequence[float | None]) -> dict[int, float]:
    """Return the percentiles of the values that there are; infinite if there are none."""
    present = [value for value in values if value is not None] or [inf]
    return {percent: percentile(present, percent) for percent in PERCENTS}


def _expected_quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which this share of further values is expected."""
    if len(ordered) < 2:
        return quantile(ordered, share)
    rank = share * (len(ordered) + 1) - 1.0
    return quantile(ordered, min(max(rank / (len(ordered) - 1), 0.0), 1.0))


@dataclass(frozen=True, slots=True)
class Interval:
    """Median of a figure over the runs, and the range that has 90 % of further runs.

    That takes 19 runs; with fewer the range is that of the runs, which has a smaller share.
    """

    low: float
    middle: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Interval:
        ordered = sorted(values)
        return Interval(*(_expected_quantile(ordered, share) for share in (LOW, 0.5, HIGH)))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Several runs of one load, each on a machine drawn anew."""

    loads: tuple[ServedLoad, ...]
    figures: tuple[Figures, ...]

    def interval(self, figure: Callable[[Figures], float]) -> Interval:
        """Return a figure over the runs."""
        return Interval.of([figure(one) for one in self.figures])

    def plus(self, other: Prediction) -> Prediction:
        """Return the runs of both."""
        return Prediction(self.loads + other.loads, self.figures + other.figures)

    @property
    def extrapolated_share(self) -> float:
        """Share of the steps that are larger than every measured one."""
        num_steps = sum(one.num_steps for one in self.loads)
        return sum(one.num_extrapolated for one in self.loads) / max(1, num_steps)


@dataclass(frozen=True, slots=True)
class Runs:
    """How often a load is simulated, and what differs between runs."""

    count: int = 10
    seed: int = 0
    draws_requests: bool = True
    """Whether each run has other requests; the machine is drawn anew in any case."""
    begins_anywhere: bool = False
    """Whether each run of a trace begins at another request of it."""
    first: int = 0
    """Number of the first run; runs of other numbers differ."""

    def __post_init__(self) -> None:
        if not 1 <= self.first + self.count <= MOST_RUNS:
            raise ConfigError(f"the number of runs is 1 to {MOST_RUNS:,}, not {self.count}")

    @property
    def seeds(self) -> range:
        """Seed of each run; those of two seeds have none in common."""
        first = MOST_RUNS * self.seed + self.first
        return range(first, first + self.count)


def begun_anywhere(workload: Workload, seed: int) -> Workload:
    """Return a load that begins at another request for each seed, if it is a trace."""
    if isinstance(workload, Listed):
        return workload
    return workload.begun_at(seed * GOLDEN_SHARE % 1.0)


def predict(
    setup: Setup,
    workload: Workload,
    limits: Limits,
    runs: Runs,
    targets: Targets | None = None,
    progress: Progress | None = None,
) -> Prediction:
    """Simulate a load several times."""
    loads: list[ServedLoad] = []
    for number, machine_seed in enumerate(runs.seeds):
        request_seed = machine_seed if runs.draws_requests else runs.seed

        def watch(share: float, number: int = number) -> None:
            if progress is not None:
                progress(number + share, runs.count)

        load = begun_anywhere(workload, machine_seed) if runs.begins_anywhere else workload
        loads.append(serve_load(setup, load, limits, request_seed, machine_seed, watch))
        watch(1.0)
    return Prediction(tuple(loads), tuple(summarize(one.requests, targets) for one in loads))
