"""Measures the scheduler's time per step: mean and p99 of schedule + update.

    python -m benchmarks.sim.scheduler_cost [--policy fair|deadline|fcfs|priority]
                                            [--tenants 10000] [--json FILE] [--profile]
    python -m benchmarks.sim.scheduler_cost --model "$(scripts/get-test-model)"

The time of the executor, which returns fixed results, is not counted. Each scheduler is in a steady
state: the running set is full and decodes, block tables grow, finished requests are replaced from
the waiting queue, and prompts share prefixes. All schedulers are built first. Then short rounds run
the cells of the table in turn, so that a slow moment of the machine affects all cells. The figures
are medians over rounds of the mean over steps, with the middle half.

With --model, the cost is compared with the executor's time for 64 decodes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import platform
import pstats
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import track

from benchmarks.support.records import write_record
from headway.bench.steal import StealMeter
from headway.config import SchedulerConfig
from headway.core.events import Event
from headway.core.executor import Capacity
from headway.core.params import SamplingParams
from headway.core.plan import Sample, StepPlan, StepResult
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.core.terms import Terms
from headway.core.waiting.policies import POLICIES

RUNNING = (32, 256, 1000)
WAITING = (0, 10_000, 100_000)
BLOCK_SIZE = 16
PREFILL_TOKENS = 512
STEM = list(range(64))
SAMPLE = Sample((7,))
STEP_S = 0.03


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one cell in one round, in microseconds."""

    mean_us: float
    p99_us: float
    schedule_us: float
    update_us: float
    admitted_per_step: float


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one cell over all rounds, and the middle half of the means."""

    running: int
    waiting: int
    mean_us: float
    p99_us: float
    schedule_us: float
    update_us: float
    low_us: float
    high_us: float
    admitted_per_step: float


class Load:
    """A scheduler with `num_running` running and about `num_waiting` waiting requests."""

    def __init__(
        self, num_running: int, num_waiting: int, policy: str, seed: int, num_tenants: int
    ) -> None:
        self._rng = random.Random(seed)
        self._num_tenants = num_tenants
        self._num_running = num_running
        self._num_waiting = num_waiting
        self._num_added = 0
        self._now = 0.0
        config = SchedulerConfig(
            max_num_seqs=num_running,
            max_num_batched_tokens=num_running + PREFILL_TOKENS,
            scheduling_policy=policy,
        )
        self.scheduler = Scheduler(config, Capacity(num_running * 32, BLOCK_SIZE, 4096))
        self.num_admitted = 0
        for _ in range(num_running):
            self._add(self._rng.randint(1, 256))
        self._fill()
        # Prompts average 160 tokens; after these steps the running set is full.
        for _ in range(64 + num_running * 200 // PREFILL_TOKENS):
            self.step()

    def _add(self, max_tokens: int) -> None:
        rng = self._rng
        length = rng.randint(16, 240)
        stem = STEM if rng.random() < 0.5 else []
        own = rng.randrange(1 << 30)
        self._num_added += 1
        tenant = str(rng.randrange(self._num_tenants))
        request = Request(
            id=str(self._num_added),
            token_ids=[*stem, *range(own, own + length)],
            params=SamplingParams(max_tokens=max_tokens),
            seed=0,
            arrived_at=self._now,
            priority=rng.randrange(4),
            terms=Terms(tenant=tenant, weight=1.0 + int(tenant) % 3, cache_group=tenant),
        )
        self.scheduler.add(request, self._now)

    def _fill(self) -> None:
        """Add requests up to the numbers above; not timed."""
        missing = self._num_running + self._num_waiting - len(self.scheduler.requests)
        for _ in range(missing):
            self._add(self._rng.randint(32, 256))
        self.scheduler.take_events()

    def step(self) -> tuple[float, float]:
        """Run one step; return the seconds of schedule and of update."""
        self._now += STEP_S
        at = self._now
        start = time.perf_counter()
        plan = self.scheduler.schedule(at)
        scheduled = time.perf_counter()
        result = fixed_result(plan)
        resumed = time.perf_counter()
        self.scheduler.update(plan, result, at)
        self.scheduler.take_events()
        end = time.perf_counter()
        self.num_admitted += sum(item.new is not None for item in plan.scheduled)
        self._fill()
        return scheduled - start, end - resumed


def fixed_result(plan: StepPlan) -> StepResult:
    outcomes = tuple([SAMPLE if item.has_sample else None for item in plan.scheduled])
    return StepResult(plan.step_id, outcomes, 0.0)


def measure(load: Load, num_steps: int) -> Times:
    load.num_admitted = 0
    pairs = [load.step() for _ in range(num_steps)]
    totals = sorted(1e6 * (schedule + update) for schedule, update in pairs)
    return Times(
        mean_us=statistics.fmean(totals),
        p99_us=totals[int(0.99 * (len(totals) - 1))],
        schedule_us=1e6 * statistics.fmean(schedule for schedule, _ in pairs),
        update_us=1e6 * statistics.fmean(update for _, update in pairs),
        admitted_per_step=load.num_admitted / num_steps,
    )


def summarize(running: int, waiting: int, rounds: list[Times]) -> Row:
    means = [times.mean_us for times in rounds]
    low_us, _, high_us = statistics.quantiles(means, n=4)
    return Row(
        running,
        waiting,
        statistics.median(means),
        statistics.median(times.p99_us for times in rounds),
        statistics.median(times.schedule_us for times in rounds),
        statistics.median(times.update_us for times in rounds),
        low_us,
        high_us,
        statistics.median(times.admitted_per_step for times in rounds),
    )


def print_table(rows: list[Row]) -> None:
    print("running  waiting   mean us (middle half)   p99 us  schedule  update  admitted/step")
    for row in rows:
        print(
            f"{row.running:7d} {row.waiting:8d} {row.mean_us:9.0f} "
            f"({row.low_us:5.0f} - {row.high_us:5.0f}) {row.p99_us:10.0f} "
            f"{row.schedule_us:9.0f} {row.update_us:7.0f} {row.admitted_per_step:14.2f}"
        )


def print_ratios(times: dict[tuple[int, int], list[Times]]) -> None:
    """Print the cost with many waiting requests over that with none."""
    for running in RUNNING:
        pairs = zip(times[running, WAITING[-1]], times[running, WAITING[0]], strict=True)
        low, median, high = statistics.quantiles([a.mean_us / b.mean_us for a, b in pairs], n=4)
        print(
            f"{running} running: waiting {WAITING[-1]} / waiting {WAITING[0]} = "
            f"{median:.2f} ({low:.2f} - {high:.2f})"
        )


def model_step_s(model: str) -> float:
    """Return the median seconds of a step with 64 decodes on the real executor."""
    from headway.build import load_model
    from headway.clock import SystemClock
    from headway.config import load_config
    from headway.core.engine import EngineCore
    from headway.core.events import Stepped

    loaded = load_model(load_config({"model": model, "max_num_seqs": 64}))
    rng = random.Random(0)
    steps: list[float] = []
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=64), loaded.executor.capacity())

    def consume(events: Sequence[Event]) -> None:
        steps.extend(e.elapsed_s for e in events if isinstance(e, Stepped) and e.num_tokens == 64)

    core = EngineCore(scheduler, loaded.executor, SystemClock(), consume)
    for number in range(64):
        prompt = [rng.randint(100, 40_000) for _ in range(rng.randint(32, 256))]
        params = SamplingParams(max_tokens=60, temperature=0.0)
        core.add(Request(id=str(number), token_ids=prompt, params=params, seed=0, arrived_at=0.0))
    while core.has_work:
        core.step()
    return statistics.median(steps)


def run_profile(policy: str, num_tenants: int) -> None:
    load = Load(256, 10_000, policy, 0, num_tenants)
    profile = cProfile.Profile()
    for step in range(1000):
        at = 1000.0 + STEP_S * step
        profile.enable()
        plan = load.scheduler.schedule(at)
        profile.disable()
        result = fixed_result(plan)
        profile.enable()
        load.scheduler.update(plan, result, at)
        profile.disable()
        load._fill()
    pstats.Stats(profile).sort_stats("tottime").print_stats(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--policy", choices=list(POLICIES), default="fair")
    parser.add_argument("--tenants", type=int, default=4, help="number of tenants")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50, help="timed steps per cell and round")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--model", help="compare with a step of 64 decodes on this model")
    parser.add_argument(
        "--profile", action="store_true", help="profile 256 running requests and exit"
    )
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("a spread needs at least two rounds")
    if args.profile:
        run_profile(args.policy, args.tenants)
        return
    cells = [(running, waiting) for running in RUNNING for waiting in WAITING]
    loads = {cell: Load(*cell, args.policy, 0, args.tenants) for cell in track(cells, "building")}
    gc.collect()
    times: dict[tuple[int, int], list[Times]] = {cell: [] for cell in cells}
    meter = StealMeter()
    for _ in track(range(args.rounds), "rounds"):
        for cell, load in loads.items():
            times[cell].append(measure(load, args.steps))
    rows = [summarize(*cell, times[cell]) for cell in cells]
    print(f"policy {args.policy}, {args.tenants} tenants")
    print(f"Python {platform.python_version()}, {platform.machine()}")
    print_table(rows)
    print_ratios(times)
    report: dict[str, object] = {"policy": args.policy, "tenants": args.tenants}
    report["rows"] = [asdict(row) for row in rows]
    if args.model is not None:
        step_us = report["model_step_us"] = 1e6 * model_step_s(args.model)
        print(f"64 decodes on the model: {step_us / 1000:.1f} ms a step")
        for row in rows:
            if row.waiting == 0:
                print(f"{row.running} running: {row.mean_us / step_us:.2%} of that")
    write_record(report, meter, args.json)


if __name__ == "__main__":
    main()
