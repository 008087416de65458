"""Simulates runs of vLLM on GPUs that others measured, and compares what each request took.

    python -m benchmarks.sim.others_runs FOLDER [--reverse]

FOLDER has vllm-GPU-MODEL.jsonl with the times of 300 requests, and the settings of the engine in
.meta.json beside it: bench/examples of LLMServingSim (MIT). The step times are fitted to the
latencies of the first half of the requests by time of arrival, or of the second with --reverse; the
error is that of the other half. All requests are simulated in any case: when they come and how long
they are is known beforehand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.sim.request_fit import (
    Arrival,
    Costs,
    Latencies,
    ServingRun,
    fit_requests,
    simulate_run,
)
from headway.config import SchedulerConfig
from headway.core.executor import Capacity
from headway.core.slo.steptime import StepShape
from headway.sim.fleet import EngineSpec
from headway.sim.prediction.figures import quantile
from headway.sim.profile.datasheet import Datasheet
from headway.sim.profile.machine import StepFit

KNOTS = (1, 16, 128, 2048)
START_DELAY_S = 0.02
ASSUMED_BLOCKS = 35_000
"""KV cache where the settings do not name it: more than was ever used."""
MAX_MODEL_LEN = 131_072
FIGURES = ("ttft_s", "tpot_s", "e2e_s")
PERCENTS = (50, 99)

PUBLISHED = {
    "vllm-RTX4090-Llama-3.1-8B": (0.8, 0.3, 0.2, 0.9, 0.9, 0.4),
    "vllm-RTXPRO6000-Llama-3.1-8B": (-8.6, -2.0, 0.0, 0.6, -1.2, -1.6),
    "vllm-RTXPRO6000-Qwen3-30B-A3B-Instruct-2507": (-21.8, -1.0, -1.6, -0.5, -2.0, -1.8),
}
"""Errors in %, in the order of the columns, that LLMServingSim publishes for all 300 requests.

From validation/summary.txt beside each run, commit 5daddb2; its step times were profiled layer by
layer on the same GPUs.
"""
DATASHEETS = {
    "vllm-RTX4090-Llama-3.1-8B": "datasheet:rtx-4090/llama-3.1-8b",
    "vllm-RTXPRO6000-Llama-3.1-8B": "datasheet:rtx-pro-6000/llama-3.1-8b",
}
START = "datasheet:rtx-pro-6000/llama-3.1-8b"
"""Where a fit starts for a model that has no datasheet."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run of others: what its engines got, and how long it took them."""

    name: str
    run: ServingRun
    latencies: tuple[Latencies, ...]


def read_run(path: Path) -> MeasuredRun:
    """Read a run and its settings."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    rows.sort(key=lambda row: row["arrival_time"])
    # Arrivals have another clock; the shortest way into the engine counts as none.
    offset = min(row["queued_ts"] - row["arrival_time"] for row in rows)
    first = rows[0]["arrival_time"]
    arrivals: list[Arrival] = []
    latencies: list[Latencies] = []
    for row in rows:
        arrived_at, num_output = row["arrival_time"] + offset, row["output_toks"]
        arrivals.append(Arrival(row["arrival_time"] - first, row["input_toks"], num_output))
        latencies.append(
            Latencies(
                row["first_token_ts"] - arrived_at, row["last_token_ts"] - arrived_at, num_output
            )
        )
    settings = json.loads(path.with_suffix(".meta.json").read_text())
    engine = settings["engine_kwargs"]
    run = ServingRun(tuple(arrivals), spec_of(settings), engine["data_parallel_size"])
    return MeasuredRun(path.stem, run, tuple(latencies))


def spec_of(settings: dict) -> EngineSpec:
    """Return the settings of an engine of vLLM as those of Headway's scheduler."""
    engine, kv_cache = settings["engine_kwargs"], settings.get("kv_cache", {})
    scheduler = SchedulerConfig(
        max_num_seqs=engine["max_num_seqs"],
        max_num_batched_tokens=engine["max_num_batched_tokens"],
        scheduling_policy="fcfs",
        kv_watermark=0.0,
        mode="fixed",
        preemption_method="recompute",
    )
    capacity = Capacity(
        kv_cache.get("num_gpu_blocks", ASSUMED_BLOCKS),
        kv_cache.get("block_size", 16),
        engine["max_model_len"] or MAX_MODEL_LEN,
    )
    return EngineSpec(scheduler, capacity, kv_cache.get("enable_prefix_caching", True))


def start_of(name: str) -> Costs:
    """Return costs to start a fit from: those of the datasheet, at other knots."""
    fit = Datasheet.parse(DATASHEETS.get(name, START)).step_fit()
    at_knots = [fit.predict(StepShape(0, rows)) for rows in KNOTS]
    _per_decode_s, per_context_s, per_attended_s = fit.coefficients[len(fit.knots) :]
    # Rows of decodes and of prefill are told apart by their number alone.
    return Costs(StepFit(KNOTS, (*at_knots, 0.0, per_context_s, per_attended_s)), START_DELAY_S)


def errors_of(
    simulated: Sequence[Latencies], measured: Sequence[Latencies], chosen: Sequence[int]
) -> list[tuple[float, float]]:
    """Return measured seconds and relative error of each figure, in the order of the columns."""
    found: list[tuple[float, float]] = []
    for name in FIGURES:
        ours = sorted(getattr(simulated[number], name) for number in chosen)
        theirs = sorted(getattr(measured[number], name) for number in chosen)
        for percent in PERCENTS:
            truth = quantile(theirs, percent / 100)
            found.append((truth, quantile(ours, percent / 100) / truth - 1.0))
    return found


def typical_errors(
    simulated: Sequence[Latencies], measured: Sequence[Latencies], chosen: Sequence[int]
) -> list[float]:
    """Return the median over the requests of the relative error of each figure."""
    return [
        median(
            abs(getattr(simulated[number], name) / getattr(measured[number], name) - 1.0)
            for number in chosen
        )
        for name in FIGURES
    ]


def report_half(measured: MeasuredRun, is_first: bool, num_rounds: int) -> None:
    """Fit to one half of the requests, and print the error of the other."""
    num = len(measured.latencies)
    halves = list(range(num // 2)), list(range(num // 2, num))
    fitted, held_out = halves if is_first else halves[::-1]
    name = "first half" if is_first else "second half"
    began_at = perf_counter()
    found = fit_requests(
        measured.run,
        measured.latencies,
        fitted,
        start_of(measured.name),
        num_rounds,
        partial(print, f"  {measured.name}, {name}:", file=sys.stderr, flush=True),
    )
    simulated = simulate_run(measured.run, found.costs).latencies()
    print(f"fitted to the {name} in {perf_counter() - began_at:.0f} s: {describe(found.costs)}")
    print_row("  error in the fitted half", errors_of(simulated, measured.latencies, fitted))
    print_row("  error in the other half", errors_of(simulated, measured.latencies, held_out))
    typical = typical_errors(simulated, measured.latencies, held_out)
    print("  median error of its requests", ", ".join(f"{100 * one:.1f} %" for one in typical))


def describe(costs: Costs) -> str:
    """Return the costs as text."""
    num_knots = len(costs.fit.knots)
    at_knots = zip(costs.fit.knots, costs.fit.coefficients[:num_knots], strict=True)
    _, per_context_s, per_attended_s = costs.fit.coefficients[num_knots:]
    return (
        "ms by rows "
        + ", ".join(f"{knot}: {1e3 * seconds:.1f}" for knot, seconds in at_knots)
        + f"; {1e9 * per_context_s:.0f} ns a context token, {1e12 * per_attended_s:.0f} ps an "
        f"attended token, {1e3 * costs.delay_s:.0f} ms delay"
    )


def print_row(label: str, found: Sequence[tuple[float, float]]) -> None:
    print(f"{label:28}", *[f"{100 * error:+9.1f} %" for _, error in found])


def report(measured: MeasuredRun, is_first: bool, num_rounds: int) -> None:
    """Print the errors of a run."""
    print(f"\n{measured.name}: {len(measured.latencies)} requests")
    names = [
        f"{name.removesuffix('_s').upper()} p{percent}" for name in FIGURES for percent in PERCENTS
    ]
    print(" " * 28, *[f"{name:>11}" for name in names])
    everything = range(len(measured.latencies))
    truth = errors_of(measured.latencies, measured.latencies, everything)
    print(f"{'measured, s':28}", *[f"{seconds:11.3f}" for seconds, _ in truth])
    report_half(measured, is_first, num_rounds)
    if measured.name in DATASHEETS:
        sheet = Datasheet.parse(DATASHEETS[measured.name])
        simulated = simulate_run(measured.run, Costs(sheet.step_fit(), 0.0)).latencies()
        print_row("datasheet, all requests", errors_of(simulated, measured.latencies, everything))
    if measured.name in PUBLISHED:
        published = [(0.0, error / 100) for error in PUBLISHED[measured.name]]
        print_row("LLMServingSim, all requests", published)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--reverse", action="store_true", help="fit to the second half")
    parser.add_argument("--only", default="", help="part of the name of a run")
    arguments = parser.parse_args()
    paths = sorted(arguments.folder.glob(f"vllm-*{arguments.only}*.jsonl"))
    if not paths:
        parser.error(f"no vllm-*.jsonl in {arguments.folder}")
    for path in paths:
        report(read_run(path), not arguments.reverse, arguments.rounds)


if __name__ == "__main__":
    main()
