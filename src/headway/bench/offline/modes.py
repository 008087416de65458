"""Runs a workload in several batching modes on one executor, in rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from headway.bench.offline.continuous import ContinuousRun
from headway.bench.offline.static import StaticBatcher
from headway.bench.options import GREEDY, SamplingOptions
from headway.bench.records import RunRecord
from headway.bench.steal import Steal, StealMeter
from headway.clock import Clock
from headway.config import SchedulerConfig
from headway.core.engine import EngineCore
from headway.core.executor import Executor
from headway.core.scheduler import Scheduler
from headway.percentiles import percentile
from headway.workload import OfflineWorkload

DYNAMIC_WINDOW_S = 0.5
PERCENTS = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Bench:
    """Executor, settings and workload that all modes share."""

    executor: Executor
    config: SchedulerConfig
    clock: Clock
    enable_prefix_caching: bool
    sampling: SamplingOptions = GREEDY
    seed: int = 0
    """Seed of the first request; each request has its own."""

    def run_continuous(self, workload: OfflineWorkload) -> RunRecord:
        scheduler = Scheduler(self.config, self.executor.capacity(), self.enable_prefix_caching)
        run = ContinuousRun(
            lambda sink: EngineCore(scheduler, self.executor, self.clock, sink),
            self.clock,
            self.sampling,
            self.seed,
        )
        return run.run(workload.items)

    def run_static(self, workload: OfflineWorkload) -> RunRecord:
        return self._batcher(None).run(workload.items)

    def run_dynamic(self, workload: OfflineWorkload) -> RunRecord:
        return self._batcher(DYNAMIC_WINDOW_S).run(workload.items)

    def _batcher(self, window_s: float | None) -> StaticBatcher:
        size = self.config.max_num_seqs
        return StaticBatcher(self.executor, self.clock, size, window_s, self.sampling, self.seed)


MODES: dict[str, Callable[[Bench, OfflineWorkload], RunRecord]] = {
    "static": Bench.run_static,
    "dynamic": Bench.run_dynamic,
    "continuous": Bench.run_continuous,
}


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and most of several rounds."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One mode over all rounds."""

    mode: str
    output_tokens_per_s: Spread
    ttft_s: dict[int, Spread]
    e2e_s: dict[int, Spread]
    slot_occupancy: Spread
    padding_waste: Spread
    executor_share: Spread
    num_preemptions: int
    num_steps: int
    num_output_tokens: int
    steal: tuple[Steal | None, ...]
    """Steal of each round."""


def run_rounds(
    bench: Bench,
    workload: OfflineWorkload,
    modes: Sequence[str],
    rounds: int,
    progress: Callable[[int, int], None],
) -> dict[str, list[RunRecord]]:
    """Run interleaved rounds, so that machine noise affects every mode alike.

    A warm-up round of the cheapest mode comes first and is not counted. Calls `progress` with (runs
    done, total).
    """
    num_runs = 1 + rounds * len(modes)
    progress(0, num_runs)
    bench.run_continuous(workload)
    records: dict[str, list[RunRecord]] = {mode: [] for mode in modes}
    for num_done, mode in enumerate(list(modes) * rounds, start=1):
        progress(num_done, num_runs)
        meter = StealMeter()
        record = MODES[mode](bench, workload)
        record.steal = meter.read()
        records[mode].append(record)
    return records


def summarize(mode: str, runs: Sequence[RunRecord]) -> ModeResult:
    """Return medians and spreads over the rounds of one mode."""
    return ModeResult(
        mode=mode,
        output_tokens_per_s=Spread.of([run.output_tokens_per_s for run in runs]),
        ttft_s={p: Spread.of([percentile(run.ttft_s(), p) for run in runs]) for p in PERCENTS},
        e2e_s={p: Spread.of([percentile(run.e2e_s(), p) for run in runs]) for p in PERCENTS},
        slot_occupancy=Spread.of([run.slot_occupancy for run in runs]),
        padding_waste=Spread.of([run.padding_waste for run in runs]),
        executor_share=Spread.of([run.executor_share for run in runs]),
        num_preemptions=max(run.num_preemptions for run in runs),
        num_steps=len(runs[-1].steps),
        num_output_tokens=runs[-1].num_output_tokens,
        steal=tuple(run.steal for run in runs),
    )


def same_tokens(runs: Sequence[RunRecord]) -> float:
    """Return the share of requests with equal tokens in all runs."""
    first = runs[0].requests
    equal = [
        all(run.requests[request.index].token_ids == request.token_ids for run in runs)
        for request in first
    ]
    return sum(equal) / len(equal)
