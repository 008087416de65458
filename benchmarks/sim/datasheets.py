"""Compares profiles by datasheet with published measurements of dense models.

    python -m benchmarks.sim.datasheets FOLDER [--fit] [--gpu h100]

FOLDER has gpu_measured.csv: `silicon_sample.csv` of AIConfigurator (Apache-2.0), closed loops of
callers with prompts and outputs of one length. --fit fits the constants of the datasheets to one
half of the settings, by the mean of a loop in closed form: that of every other combination of GPU,
model, format and number of GPUs. Without it, each distinct setting of the other half is simulated
through the scheduler as such a loop.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from math import ceil, log
from pathlib import Path
from statistics import fmean, median
from time import perf_counter

from headway.config import SchedulerConfig
from headway.core.slo.steptime import StepShape, prefill_work
from headway.errors import ConfigError
from headway.sim.fleet import EngineSpec
from headway.sim.prediction.figures import quantile
from headway.sim.prediction.serving import Limits, serve_load
from headway.sim.prediction.setup import Setup
from headway.sim.profile.datasheet import MODELS, REACHED, Datasheet, Reached
from headway.workload import Listed, WorkItem

SYSTEMS = {"h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "gb200": "gb200"}
MODEL_NAMES = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
}
FORMAT_NAMES = {"": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}
BUDGET = 8192
"""Tokens of a step."""
SPARE_STEPS = 16
START = Reached(0.5, 0.75, 20e-6, 5e-6, 12e-6)
"""Constants from which a fit starts."""
_CONCURRENCY = re.compile(r"silicon_concurrency=(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Loop:
    """A closed loop on an engine."""

    gpu: str
    model: str
    format: str
    num_gpus: int
    num_prompt: int
    num_output: int
    concurrency: int

    @property
    def group(self) -> tuple[str, str, str, int]:
        return self.gpu, self.model, self.format, self.num_gpus

    @property
    def sheet(self) -> Datasheet:
        return Datasheet(self.gpu, self.num_gpus, self.model, MODELS[self.model], self.format)


@dataclass(frozen=True, slots=True)
class MeasuredLoop:
    """A closed loop that somebody measured, with an engine of some kind."""

    loop: Loop
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class LoopTimes:
    """Mean TTFT and TPOT of a loop."""

    ttft_s: float
    tpot_s: float


def read_loops(path: Path) -> list[MeasuredLoop]:
    """Return the dense rows of the file that were served by engines of one kind."""
    found: list[MeasuredLoop] = []
    with path.open() as file:
        for row in csv.DictReader(file):
            source = _CONCURRENCY.search(row["silicon_data_source"])
            if row["model_path"] not in MODEL_NAMES or row["mode"] != "agg" or source is None:
                continue
            loop = Loop(
                SYSTEMS[row["system"]],
                MODEL_NAMES[row["model_path"]],
                FORMAT_NAMES[row["gemm_quant_mode"]],
                int(row["tp_size"]),
                int(row["isl"]),
                int(row["osl"]),
                int(source[1]),
            )
            ttft_s, tpot_s = (
                float(row["silicon_ttft_ms"]) / 1e3,
                float(row["silicon_tpot_ms"]) / 1e3,
            )
            found.append(MeasuredLoop(loop, ttft_s, tpot_s))
    return found


def fitted_groups(measured: Sequence[MeasuredLoop]) -> set[tuple[str, str, str, int]]:
    """Return every other group of loops: those that constants are fitted to."""
    return set(sorted({one.loop.group for one in measured})[::2])


def simulate_loop(loop: Loop) -> LoopTimes | None:
    """Simulate a loop through the scheduler; None if the model does not fit.

    The second request of each caller counts: the first ones all start at once, and the last ones
    are there for those before them. If all callers run at once, both need only last for as long as
    it takes to prefill all prompts.
    """
    try:
        profile = loop.sheet.profile()
    except ConfigError:
        return None
    short = ceil(loop.concurrency * loop.num_prompt / BUDGET) + SPARE_STEPS
    if short > loop.num_output or not fits_memory(loop):
        short = loop.num_output
    lengths = (short, loop.num_output, short)
    prompt = (1,) * loop.num_prompt
    items = [WorkItem(prompt, length) for length in lengths for _ in range(loop.concurrency)]
    scheduler = SchedulerConfig(
        max_num_seqs=512,
        max_num_batched_tokens=BUDGET,
        scheduling_policy="fcfs",
        mode="fixed",
        preemption_method="recompute",
    )
    spec = EngineSpec(scheduler, profile.capacity, enable_prefix_caching=False)
    setup = replace(Setup.of(profile), spec=spec)
    load = Listed(tuple(items), loop.concurrency)
    served = serve_load(setup, load, Limits(len(items))).requests
    counted = served[loop.concurrency : 2 * loop.concurrency]
    return LoopTimes(
        fmean(one.ttft_s or 0.0 for one in counted), fmean(one.tpot_s or 0.0 for one in counted)
    )


def expected_tpot_s(loop: Loop, reached: Reached) -> float:
    """Return the TPOT of a loop in closed form: its decodes, and the prefills between them."""
    fit = loop.sheet.step_fit(reached)
    num = loop.concurrency
    decodes = StepShape(num, 0, round(num * (loop.num_prompt + loop.num_output / 2)), 0)
    together = max(1, min(num, BUDGET // loop.num_prompt))
    num_prefill = together * loop.num_prompt
    work = together * prefill_work(loop.num_prompt)
    decode_s = fit.predict(decodes)
    mixed_s = fit.predict(decodes.plus(StepShape(-together, num_prefill, 0, work)))
    return decode_s + (mixed_s - decode_s) / together * (num - together) / loop.num_output


def fits_memory(loop: Loop) -> bool:
    """Return whether all callers of a loop run at once."""
    try:
        capacity = loop.sheet.capacity()
    except ConfigError:
        return False
    num_tokens = loop.concurrency * (loop.num_prompt + loop.num_output)
    return num_tokens <= capacity.num_blocks * capacity.block_size


def fit_constants(measured: Sequence[MeasuredLoop]) -> Reached:
    """Return the constants with the least mean error of the logarithm of TPOT."""
    usable = [one for one in measured if fits_memory(one.loop)]

    def loss(reached: Reached) -> float:
        return fmean(abs(log(expected_tpot_s(one.loop, reached) / one.tpot_s)) for one in usable)

    return search(START, loss)


def search(start: Reached, loss: Callable[[Reached], float]) -> Reached:
    """Change one constant at a time by smaller and smaller factors, as long as it helps."""
    best, least = start, loss(start)
    factor = 1.5
    while factor > 1.01:
        is_better = False
        for name in [one.name for one in fields(Reached)]:
            for change in (factor, 1 / factor):
                value = getattr(best, name) * change
                if name in ("compute", "bandwidth"):
                    value = min(value, 1.0)
                tried = replace(best, **{name: value})
                found = loss(tried)
                if found < least:
                    best, least, is_better = tried, found, True
        if not is_better:
            factor = factor**0.5
    return best


def errors_line(label: str, pairs: Sequence[tuple[float, float]]) -> str:
    """Return the errors of pairs of simulated and measured seconds as text."""
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    errors = sorted(abs(ratio - 1.0) for ratio in ratios)
    logs = [log(ratio) for ratio in ratios]
    spread = (fmean(one * one for one in logs)) ** 0.5
    return (
        f"{label:24} {len(pairs):5} {100 * median(errors):7.0f} %"
        f" {100 * quantile(errors, 0.9):7.0f} % {quantile(ratios, 0.05):7.2f} {median(ratios):7.2f}"
        f" {quantile(ratios, 0.95):7.2f} {spread:7.2f}"
    )


def report(measured: Sequence[MeasuredLoop], found: dict[Loop, LoopTimes | None]) -> None:
    """Print the errors by GPU."""
    for name, of in (("TPOT", lambda one: one.tpot_s), ("TTFT", lambda one: one.ttft_s)):
        heads = ("rows", "median", "p90", "5 %", "ratio", "95 %", "spread")
        print(f"\n{name:24} {heads[0]:>5} {heads[1]:>9} {heads[2]:>9}", end="")
        print("".join(f" {head:>7}" for head in heads[3:]))
        pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for one in measured:
            times = found.get(one.loop)
            if times is not None:
                for label in (one.loop.gpu, "all"):
                    pairs[label].append((of(times), of(one)))
        for label in sorted(pairs):
            print(errors_line(label, pairs[label]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fit", action="store_true", help="fit the constants, simulate nothing")
    parser.add_argument("--gpu", help="only this GPU")
    arguments = parser.parse_args()
    measured = read_loops(arguments.folder / "gpu_measured.csv")
    groups = fitted_groups(measured)
    if arguments.fit:
        half = [one for one in measured if one.loop.group in groups]
        print(f"fitted to {len(half)} of {len(measured)} rows")
        for name, value in zip(
            [one.name for one in fields(Reached)], astuple(fit_constants(half)), strict=True
        ):
            print(f"{name} = {value:.4g} (in use: {getattr(REACHED, name):.4g})")
        return
    measured = [
        one
        for one in measured
        if one.loop.group not in groups and arguments.gpu in (None, one.loop.gpu)
    ]
    loops = sorted({one.loop for one in measured})
    found: dict[Loop, LoopTimes | None] = {}
    began_at = perf_counter()
    for number, loop in enumerate(loops, 1):
        found[loop] = simulate_loop(loop)
        if number % 20 == 0 or number == len(loops):
            taken = f"{perf_counter() - began_at:.0f} s"
            print(f"  {number} of {len(loops)} settings, {taken}", file=sys.stderr, flush=True)
    num_left_out = sum(times is None for times in found.values())
    print(f"{len(measured)} rows, {len(loops)} settings, {num_left_out} do not fit into memory")
    report(measured, found)


if __name__ == "__main__":
    main()
