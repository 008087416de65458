"""One measurement of a server: warm-up, then a run or a sweep."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.bench.load.http import HttpClient, Origin
from headway.bench.load.openai import Target, first_model, reach
from headway.bench.load.records import Outcome
from headway.bench.load.runner import LoadRun, Progress, RunLimits, run_load
from headway.bench.load.stats import LoadTargets, summarize_load
from headway.bench.load.sweep import Knee, SweepPoint, find_knee, run_sweep
from headway.errors import ConfigError
from headway.workload import ClosedLoop, Synthetic, Workload

_WARMUP_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """Workload, limits and targets of a measurement."""

    workload: Workload
    limits: RunLimits
    targets: LoadTargets | None = None
    seed: int = 0
    num_warmup: int = 0

    @property
    def ttft_target_s(self) -> float | None:
        return None if self.targets is None else self.targets.ttft_s


@dataclass(frozen=True, slots=True)
class Sweep:
    """Rates of a sweep; without rates, the rate of the workload is doubled."""

    rates: tuple[float, ...] | None = None


@dataclass(slots=True)
class Measurement:
    """Runs so far with their rates, and the points of a sweep."""

    runs: list[tuple[float | None, LoadRun]] = field(default_factory=list)
    points: list[SweepPoint] = field(default_factory=list[SweepPoint])

    @property
    def has_completed(self) -> bool:
        """Whether any request completed."""
        records = [record for _, run in self.runs for record in run.records]
        return any(record.outcome is Outcome.COMPLETED for record in records)

    def knee(self, plan: Plan) -> Knee:
        return find_knee(self.points, plan.ttft_target_s)


async def name_model(origin: Origin, api_keys: tuple[str, ...], model: str | None) -> str:
    """Return the model name; ConfigError if the server cannot be reached."""
    client = HttpClient(origin)
    try:
        if model is None:
            return await first_model(client, api_keys)
        await reach(client)
        return model
    finally:
        client.close()


async def warm_up(target: Target, plan: Plan, progress: Progress) -> None:
    """Send uncounted requests, with prompts that the run does not use."""
    if not plan.num_warmup:
        return
    workload = plan.workload
    if isinstance(workload, Synthetic):
        closed = ClosedLoop(min(plan.num_warmup, _WARMUP_CONCURRENCY))
        workload = Synthetic(
            closed, workload.prompt_tokens, workload.output_tokens, workload.content
        )
    await run_load(target, workload, RunLimits(plan.num_warmup), -1 - plan.seed, progress=progress)


async def measure(target: Target, plan: Plan, measured: Measurement, progress: Progress) -> None:
    """Run the workload of the plan once."""
    run = LoadRun()
    measured.runs.append((None, run))
    await run_load(target, plan.workload, plan.limits, plan.seed, run, progress)


async def measure_sweep(
    target: Target,
    plan: Plan,
    sweep: Sweep,
    measured: Measurement,
    progress: Progress,
) -> None:
    """Run once per rate, each with its own seed.

    With equal prompts, later rates would hit the prefix cache and look faster than they are.
    """
    first_rate = plan.workload.mean_rate
    if first_rate is None:
        raise ConfigError("a closed loop has no rate to sweep")

    async def at_rate(rate: float) -> SweepPoint:
        run = LoadRun()
        measured.runs.append((rate, run))
        workload = plan.workload.with_rate(rate)
        seed = plan.seed + len(measured.points)
        await run_load(target, workload, plan.limits, seed, run, progress)
        return SweepPoint(rate, summarize_load(run.records, plan.targets), run.cpu_share)

    await run_sweep(at_rate, sweep.rates, first_rate, measured.points, plan.ttft_target_s)
