"""Serves loads with the real model and compares them with simulations of the same requests.

    headway profile "$model" -o machine.json
    python -m benchmarks.live.truth "$model" machine.json [--seconds 30] [--repeats 2] [--runs 20]
        [--drift 0.05]

A cell is a workload, a load relative to what the profile says is the most, and a policy. Each cell
is simulated first, from the profile alone, and then served `--repeats` times with the same requests
over HTTP. Errors are those of the simulated median against the mean of the served runs. A served
figure is covered if the simulated 90 % interval has it. Spread is the largest by the smallest
served figure, less 1.

A machine that others share changes its speed after the profile was made, which no simulation knows.
Intervals with `--drift` are those of a machine whose speed differs so much from what was profiled.
Each served run is recorded, and its speed is the time of its steps by what the profile says for
the same steps. A second error is that of simulations at this speed: what remains is the error of
everything else, as queueing, batching and delays. Intervals are those of the first simulation.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from benchmarks.sim.plans import add_drift, profile_of, setup_of
from benchmarks.support.arguments import at_least_one, run
from benchmarks.support.workloads import ALL_WORKLOADS, WORKLOADS, parse_names
from headway.bench.load.http import Origin
from headway.bench.load.measure import name_model
from headway.bench.load.openai import Target
from headway.bench.load.own_server import OwnServer
from headway.bench.load.records import LoadRecord, Outcome
from headway.bench.load.runner import LoadRun, RunLimits, run_load
from headway.bench.steal import StealMeter
from headway.percentiles import percentile
from headway.record.reader import find_recordings
from headway.sim.prediction.figures import Figures, Interval, Runs, predict, summarize
from headway.sim.prediction.served import ServedRequest
from headway.sim.prediction.serving import Limits
from headway.sim.prediction.settings import change_settings
from headway.sim.prediction.verdict import saturated_rate
from headway.sim.profile.machine import MachineProfile
from headway.sim.profile.slowness import measure_slowness
from headway.sim.recording.observed import ObservedStep, read_observed
from headway.workload import Synthetic

LOADS = (0.3, 0.5, 0.7, 0.9, 1.3)
POLICIES = ("fair", "fcfs")
SEED = 1000
NUM_WARM_UP = 8
RUNS_AT_SPEED = 5
FIGURES: dict[str, Callable[[Figures], float]] = {
    "tokens/s": lambda one: one.output_tokens_per_s,
    "TTFT p50": lambda one: one.ttft_s[50],
    "TPOT p50": lambda one: one.tpot_s[50],
    "TTFT p99": lambda one: one.ttft_s[99],
    "TPOT p99": lambda one: one.tpot_s[99],
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One load, simulated and served."""

    name: str
    simulated: dict[str, Interval]
    served: dict[str, list[float]]
    at_speed: dict[str, list[float]]
    """Simulated at the speed of each served run."""
    speeds: list[float]
    """Time of the steps of each served run, by the profile's."""
    steal: float

    def error(self, figure: str) -> float:
        """Return the error of the simulated median, relative to the served mean."""
        return self.simulated[figure].middle / fmean(self.served[figure]) - 1.0

    def error_at_speed(self, figure: str) -> float:
        """Return the error of what was simulated at the speeds of the served runs."""
        return fmean(self.at_speed[figure]) / fmean(self.served[figure]) - 1.0

    def spread(self, figure: str) -> float:
        values = self.served[figure]
        return max(values) / min(values) - 1.0

    def num_covered(self, figure: str) -> int:
        interval = self.simulated[figure]
        return sum(interval.low <= value <= interval.high for value in self.served[figure])


def _convert(record: LoadRecord) -> ServedRequest:
    """Return what a client saw, in the form of a simulated request."""
    is_done = record.outcome is Outcome.COMPLETED
    return ServedRequest(
        record.tenant,
        record.scheduled_at,
        record.num_prompt_tokens,
        record.num_output_tokens,
        record.first_token_at if is_done else None,
        record.ended_at if is_done else None,
        record.num_cached_tokens or 0,
        "refused" if record.outcome is Outcome.REFUSED else "",
    )


@dataclass(frozen=True, slots=True)
class Served:
    """What clients saw in one run, and the steps of the engine."""

    figures: Figures
    steps: Sequence[ObservedStep]

    def slowness(self, profile: MachineProfile) -> float:
        """Return the time that the steps took, by what a profile says."""
        return measure_slowness(self.steps, profile).total


def serve(
    model: str, flags: Sequence[str], workload: Synthetic, seconds: float, seed: int
) -> Served:
    """Start a server, serve a load after a few uncounted requests; return what was seen."""
    # Each key is a tenant.
    num_tenants = workload.content.tenants.num
    keys = tuple(f"truth-{number}" for number in range(num_tenants)) if num_tenants > 1 else ()
    key_flags = [part for key in keys for part in ("--api-key", key)]
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "recording"
        record_flags = ["--record", str(recording)]
        server = OwnServer.start(model, Path(folder), [*flags, *key_flags, *record_flags])
        try:
            run = asyncio.run(_send(server.origin, keys, workload, seconds, seed))
        finally:
            server.stop()
        (found,) = find_recordings([recording])
        steps = read_observed(found).steps
    return Served(summarize([_convert(one) for one in run.records]), steps)


async def _send(
    origin: Origin, keys: tuple[str, ...], workload: Synthetic, seconds: float, seed: int
) -> LoadRun:
    target = Target(origin, await name_model(origin, keys, None), api_keys=keys)
    await run_load(target, workload.with_rate(20.0), RunLimits(NUM_WARM_UP), seed + 500_000)
    return await run_load(target, workload, RunLimits(duration_s=seconds), seed)


def _run_cell(
    arguments: argparse.Namespace, name: str, load: float, policy: str, seed: int
) -> Cell:
    profile: MachineProfile = arguments.profile
    setup = change_settings(setup_of(profile, arguments.drift), [f"policy={policy}"])
    workload = ALL_WORKLOADS[name]
    workload = workload.with_rate(load * saturated_rate(setup, workload, Runs(3, SEED)).middle)
    runs = Runs(arguments.runs, seed, draws_requests=False)
    limits = Limits(duration_s=arguments.seconds)
    prediction = predict(setup, workload, limits, runs)
    served: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    at_speed: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    speeds: list[float] = []
    meter = StealMeter()
    for _ in range(arguments.repeats):
        flags = ["--scheduling-policy", policy, *arguments.serve_flag]
        found = serve(arguments.model, flags, workload, arguments.seconds, seed)
        speeds.append(found.slowness(profile))
        for figure, of in FIGURES.items():
            served[figure].append(of(found.figures))
    steal = meter.read()
    few = Runs(RUNS_AT_SPEED, seed, draws_requests=False)
    for speed in speeds:
        scaled = replace(setup, profile=replace(profile.slowed(speed), drift=0.0))
        again = predict(scaled, workload, limits, few)
        for figure, of in FIGURES.items():
            at_speed[figure].append(again.interval(of).middle)
    return Cell(
        f"{name}, {load:g}, {policy}",
        {figure: prediction.interval(of) for figure, of in FIGURES.items()},
        served,
        at_speed,
        speeds,
        0.0 if steal is None else steal.share,
    )


def _print_cell(cell: Cell) -> None:
    parts: list[str] = []
    for figure in FIGURES:
        unit = 1.0 if figure == "tokens/s" else 1e3
        found = cell.simulated[figure]
        parts.append(
            f"{figure} {unit * fmean(cell.served[figure]):.4g} simulated "
            f"{unit * found.middle:.4g} ({unit * found.low:.4g} - {unit * found.high:.4g}) "
            f"{100 * cell.error(figure):+.1f} %, at its speed "
            f"{100 * cell.error_at_speed(figure):+.1f} %"
        )
    speeds = ", ".join(f"{speed:.3f}" for speed in cell.speeds)
    about = f"{cell.name}, steal {100 * cell.steal:.1f} %, speeds {speeds}"
    print(f"{about}:\n    " + "\n    ".join(parts), flush=True)


def _print_summary(cells: Sequence[Cell], repeats: int) -> None:
    print(
        "\nfigure      median error   p90 error   bias   spread of served   covered   "
        "at its speed: median, p90"
    )
    num_covered = 0
    for figure in FIGURES:
        errors = [abs(cell.error(figure)) for cell in cells]
        at_speed = [abs(cell.error_at_speed(figure)) for cell in cells]
        covered = sum(cell.num_covered(figure) for cell in cells)
        num_covered += covered
        print(
            f"{figure:10} {100 * median(errors):9.1f} % "
            f"{100 * percentile(errors, 90):10.1f} % "
            f"{100 * median(cell.error(figure) for cell in cells):+8.1f} % "
            f"{100 * median(cell.spread(figure) for cell in cells):10.1f} % "
            f"{100 * covered / (repeats * len(cells)):14.0f} % "
            f"{100 * median(at_speed):9.1f} % {100 * percentile(at_speed, 90):9.1f} %"
        )
    total = repeats * len(cells) * len(FIGURES)
    print(f"covered in all: {num_covered} of {total}, {100 * num_covered / total:.0f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("profile", type=profile_of)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--repeats", type=at_least_one, default=2)
    parser.add_argument("--runs", type=at_least_one, default=20)
    add_drift(parser)
    parser.add_argument("--workloads", type=parse_names, default=tuple(WORKLOADS))
    parser.add_argument("--loads", default=",".join(map(str, LOADS)))
    parser.add_argument("--serve-flag", action="append", default=[])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cells: list[Cell] = []
    loads = [float(load) for load in arguments.loads.split(",")]
    for number, (name, load) in enumerate(
        (name, load) for name in arguments.workloads for load in loads
    ):
        policy = POLICIES[number % len(POLICIES)]
        cells.append(_run_cell(arguments, name, load, policy, SEED + number))
        _print_cell(cells[-1])
    _print_summary(cells, arguments.repeats)
    if arguments.json is not None:
        plain = [
            {
                "cell": cell.name,
                "steal": cell.steal,
                "speeds": cell.speeds,
                "served": cell.served,
                "at_speed": cell.at_speed,
                "simulated": {
                    name: [found.low, found.middle, found.high]
                    for name, found in cell.simulated.items()
                },
            }
            for cell in cells
        ]
        arguments.json.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    run(main)
