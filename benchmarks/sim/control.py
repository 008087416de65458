"""Compares step-size settings under changing load: 4 to 64 clients and back.

    python -m benchmarks.sim.control [--phase 120] [--target 0.1] [--json FILE] [--plot FILE]

Each client sends its next request when the last is finished; all requests have a TPOT target. For a
third of the time there are 4 clients, then 64, then 4 again. The fixed settings are pairs of a
running limit and a token budget; `auto` begins with the server's default of both. The engine core
with its real scheduler on a virtual clock; steps take as long as on the real model (headway.sim).

Throughput counts output tokens over the whole run. p95 TPOT is over the requests that began in
the middle phase, and over the requests of the other phases.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.sim.pace_rig import Tier, draw_record, make_simulation
from headway.core.plan import StepPlan
from headway.core.terms import Targets
from headway.percentiles import percentile_if_any
from headway.sim import Record, Simulation

FEW, MANY = 4, 64
TARGET_S = 0.1
"""TPOT target of every request."""
FIXED = ((16, 128), (16, 512), (32, 128), (32, 256), (32, 512), (64, 128), (64, 256), (64, 512))
FIXED += ((64, 1024),)
"""Running limit, and token budget."""
ADAPTIVE = ("auto", "throughput")
"""Modes in which the size of a step is not fixed."""
MIN_THROUGHPUT = 0.95
PROMPT, OUTPUT = 250, 80


def named(fixed: Sequence[tuple[int, int]]) -> dict[str, tuple[int, int]]:
    return {f"{running} running, {tokens} tokens": (running, tokens) for running, tokens in fixed}


def settings_of(name: str, limits: tuple[int, int] | None) -> dict[str, Any]:
    if limits is None:
        return {"mode": name}
    return {"mode": "fixed", "max_num_seqs": limits[0], "max_num_batched_tokens": limits[1]}


def draw_requests(target_s: float | None, seed: int) -> Iterator[Record]:
    """Yield requests of the clients, without end."""
    draw = random.Random(f"callers/{seed}")
    tier = Tier("callers", 1.0, PROMPT, OUTPUT, Targets(tpot_s=target_s))
    for number in count(1):
        yield draw_record(number, 0.0, tier, draw)


def run_one(settings: dict[str, Any], phase_s: float, target_s: float, seed: int) -> dict[str, Any]:
    """Run the three phases under one setting."""
    requests = draw_requests(target_s, seed)
    rig = make_simulation(settings, seed)

    def next_request(at: float) -> Record:
        return replace(next(requests), arrived_at=at)

    def num_clients(at: float) -> int:
        return MANY if phase_s <= at < 2 * phase_s else FEW

    num_live = FEW
    for _ in range(FEW):
        rig.send([next_request(0.0)])

    def on_finish(record: Record) -> None:
        nonlocal num_live
        at = record.finished_at or 0.0
        if num_live > num_clients(at):
            num_live -= 1
        else:
            rig.send([next_request(at)])

    def on_step(_plan: StepPlan) -> None:
        nonlocal num_live
        while num_live < num_clients(rig.engine.clock.now()):
            num_live += 1
            rig.send([next_request(rig.engine.clock.now())])

    rig.on_finish, rig.engine.on_step = on_finish, on_step
    rig.run(3 * phase_s, drain=False)
    report = report_of(list(rig.records.values()), phase_s, target_s)
    return {**report, "trace": trace_of(rig)}


def report_of(records: Sequence[Record], phase_s: float, target_s: float) -> dict[str, Any]:
    done = [one for one in records if one.finished_at is not None]
    middle = [one for one in done if phase_s <= (one.first_token_at or 0.0) < 2 * phase_s]
    outside = [one for one in done if one not in middle]

    def tpots(records: Sequence[Record]) -> list[float]:
        return [one.tpot_s for one in records if one.tpot_s is not None]

    return {
        "tokens_per_s": sum(one.num_output for one in done) / (3 * phase_s),
        "tpot_p95_many_s": percentile_if_any(tpots(middle), 95),
        "tpot_p95_few_s": percentile_if_any(tpots(outside), 95),
        "ttft_p95_many_s": percentile_if_any([one.ttft_s for one in middle if one.ttft_s], 95),
        "within_target": statistics.fmean(tpot <= target_s for tpot in tpots(middle)),
    }


def trace_of(rig: Simulation) -> list[tuple[float, float, int, int]]:
    """Return begin, duration, running requests and limit of about 400 steps."""
    chosen = rig.steps[:: max(1, len(rig.steps) // 400)]
    return [(step.began_at, step.elapsed_s, step.num_running, step.max_num_seqs) for step in chosen]


def run(phase_s: float, seeds: int, target_s: float) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {}
    print(HEAD, flush=True)
    for name, limits in {**named(FIXED), **dict.fromkeys(ADAPTIVE)}.items():
        settings = settings_of(name, limits)
        found = [run_one(settings, phase_s, target_s, seed) for seed in range(seeds)]
        merged = {
            key: statistics.fmean(one[key] for one in found) for key in found[0] if key != "trace"
        }
        rows[name] = merged
        if name == "auto":  # the picture shows this trace
            rows[name]["trace"] = found[0]["trace"]
        print(row_of(name, rows[name], target_s), flush=True)
    return {"target_s": target_s, "phase_s": phase_s, "rows": rows}


HEAD = (
    f"{'setting':24} {'tokens/s':>9} {'p95 TPOT, 64':>13} {'p95 TPOT, 4':>12} "
    f"{'p95 TTFT, 64':>13} {'in target':>10}"
)


def row_of(name: str, row: Mapping[str, Any], target_s: float) -> str:
    mark = " " if row["tpot_p95_many_s"] <= target_s else "*"
    return (
        f"{name:24} {row['tokens_per_s']:9.1f} {1000 * row['tpot_p95_many_s']:10.1f} ms{mark}"
        f"{1000 * row['tpot_p95_few_s']:9.1f} ms {row['ttft_p95_many_s']:11.2f} s "
        f"{row['within_target']:10.1%}"
    )


def fixed_rows(report: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row for name, row in report["rows"].items() if name not in ADAPTIVE}


def failures_in(report: Mapping[str, Any]) -> list[str]:
    """Return the bars that a report misses."""
    auto, target_s = report["rows"]["auto"], report["target_s"]
    names = ("tpot_p95_many_s", "tpot_p95_few_s")
    found = [f"auto: {name} {auto[name]:.3f} s" for name in names if auto[name] > target_s]
    fixed = fixed_rows(report)
    if all(row["tpot_p95_many_s"] <= target_s for row in fixed.values()):
        found.append("no fixed setting misses the target, so it shows nothing")
    best = max(row["tokens_per_s"] for row in fixed.values())
    if auto["tokens_per_s"] < MIN_THROUGHPUT * best:
        found.append(f"auto: {auto['tokens_per_s'] / best:.3f} of the best fixed throughput")
    return found


def draw(path: Path, report: Mapping[str, Any]) -> None:
    """Draw throughput against p95 TPOT, and the steps of auto over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    points, steps = figure.subplots(1, 2)
    by_tpot = sorted(report["rows"].items(), key=lambda item: item[1]["tpot_p95_many_s"])
    for number, (name, row) in enumerate(by_tpot):
        color = "#2a7f62" if name == "auto" else "#888888"
        at = (1000 * row["tpot_p95_many_s"], row["tokens_per_s"])
        points.plot(*at, "o", color=color)
        height = (13, 1, -11)[number % 3]  # so that labels of neighbours do not overlap
        short = name.replace(" running, ", "/").removesuffix(" tokens")
        points.annotate(short, at, textcoords="offset points", xytext=(5, height), fontsize=7)
    points.axvline(1000 * report["target_s"], color="#b0413e", linestyle="--", label="target")
    points.margins(0.18, 0.1)
    points.set(
        title="by setting (running limit/token budget)",
        xlabel="p95 TPOT with 64 clients, ms",
        ylabel="output tokens/s",
    )
    trace = report["rows"]["auto"]["trace"]
    times = [one[0] for one in trace]
    steps.plot(times, [1000 * one[1] for one in trace], ".", color="#2a7f62", label="step, ms")
    steps.plot(times, [one[3] for one in trace], "-", color="#b0413e", label="running limit")
    steps.plot(times, [one[2] for one in trace], "-", color="#3d5a80", label="running")
    steps.axhline(1000 * report["target_s"], color="#888888", linestyle="--", label="target, ms")
    steps.set(title="auto, over time", xlabel="s")
    for panel in (points, steps):
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path, dpi=120, format="png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--phase", type=float, default=120.0, help="virtual seconds of a phase")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=TARGET_S, help="TPOT target, in seconds")
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--plot", type=Path, help="draw the picture here")
    args = parser.parse_args()
    report = run(args.phase, args.seeds, args.target)
    best = max(row["tokens_per_s"] for row in fixed_rows(report).values())
    print(f"auto by the best fixed: {report['rows']['auto']['tokens_per_s'] / best:.3f}")
    failures = failures_in(report)
    for failure in failures:
        print(f"not reached: {failure}")
    if args.json:
        args.json.write_text(json.dumps({**report, "failures": failures}, indent=1) + "\n")
    if args.plot:
        draw(args.plot, report)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
