"""Measures fairness between tenants under `fair`, `fcfs` and `priority`.

    python -m benchmarks.sim.fairness [--seeds 5] [--duration 300] [--json FILE] [--plot FILE]

The engine core with its real scheduler on a virtual clock; steps take as long as on the real model
(headway.sim). The scenarios are in sim/fair_load.py; each policy gets the same requests.
sim/fair_rig.py counts the service. Under `priority` no request ages: where all requests wait long,
aging would turn priorities into first come, first served.

    gap         largest difference in service over weight between two tenants, over any span in
                which both had waiting requests, divided by the bound of headway.core.waiting.fair:
                2 max(w_p L, w_q M) / smaller weight. L is the longest prompt of the run, M the most
                tokens of the running requests of one tenant in the run under `fair`. All policies
                are measured by the bound of that run
    Jain        Jain index of service over weight of the backlogged tenants, after a warm-up
    TTFT        p99 TTFT of well-behaved tenants, divided by that alone on their share: the same
                requests on an engine without other tenants, with the same limits, whose steps take
                longer in proportion (ten times as long for a tenant with a tenth of the weights).
                A request without a token at the end counts with the time it has waited. Judged
                over all seeds, for all such tenants together and for each one; one seed has too few
                requests for a p99, so the figures of single seeds are shown only
    throughput  work per second after the warm-up, relative to `fcfs`: prompt tokens, cached or not,
                and output tokens, by their service costs. A policy changes which requests are
                served, and so the ratio of prompt to output tokens; output tokens per second are
                shown too

The exit code is 1 if `fair` misses a bar.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sim.fair_load import SCENARIOS, Scenario, Tenant
from benchmarks.sim.fair_rig import WARM_UP_S, SentRequest, TenantRig, jain, widest_gap
from headway.percentiles import percentile_if_any

POLICIES = ("fair", "fcfs", "priority")
MAX_GAP, MIN_JAIN, MAX_TTFT_RATIO, MIN_THROUGHPUT = 1.0, 0.95, 1.5, 0.95
MIN_REQUESTS = 100
"""Least requests of a tenant for a p99."""
Waits = Mapping[str, Sequence[float]]
"""Times to first token, by tenant."""


@dataclass(frozen=True, slots=True)
class Run:
    """One scenario under one policy with one seed."""

    gap: float
    bound: float
    jain: float | None
    work_per_s: float
    output_per_s: float
    num_preemptions: int
    waits: Waits


def run_policy(scenario: Scenario, policy: str, seed: int, duration_s: float) -> Run:
    rig = TenantRig(scenario, scenario.tenants, policy, seed)
    rig.send(scenario, seed, duration_s)
    rig.run(duration_s, drain=False)
    log = rig.log
    first, last = log.since_warm_up(duration_s)
    window_s = log.times[last] - log.times[first]
    services = [
        log.service[last][number] - log.service[first][number]
        for number, tenant in enumerate(scenario.tenants)
        if tenant.is_backlogged
    ]
    lightest = min(tenant.weight for tenant in scenario.tenants)
    return Run(
        gap=widest_gap(log),
        bound=log.bound / lightest,
        jain=jain(services) if len(services) > 1 else None,
        work_per_s=(log.work[last] - log.work[first]) / window_s,
        output_per_s=(log.num_output[last] - log.num_output[first]) / window_s,
        num_preemptions=sum(record.num_preemptions for record in rig.records.values()),
        waits=waits_of(rig.records.values(), scenario.well_behaved, duration_s),
    )


def run_alone(scenario: Scenario, seed: int, duration_s: float) -> Waits:
    """Run each well-behaved tenant alone, on an engine slowed to its share."""
    found: dict[str, Sequence[float]] = {}
    for tenant in scenario.well_behaved:
        slowness = 1.0 / scenario.share(tenant)
        rig = TenantRig(scenario, (tenant,), "fcfs", seed, slowness)
        rig.send(scenario, seed, duration_s)
        rig.run(duration_s, drain=True)
        found |= waits_of(rig.records.values(), (tenant,), duration_s)
    return found


def waits_of(
    records: Iterable[SentRequest], well_behaved: Sequence[Tenant], until_s: float
) -> Waits:
    """Return the times to first token after the warm-up, by tenant."""
    found: dict[str, list[float]] = {tenant.name: [] for tenant in well_behaved}
    for record in records:
        name = record.tenant.name
        if name in found and record.arrived_at >= WARM_UP_S:
            waited_s = record.ttft_s
            found[name].append(until_s - record.arrived_at if waited_s is None else waited_s)
    return found


def ttft_ratio(shared: Iterable[float], alone: Iterable[float]) -> float | None:
    """Return p99 beside other tenants over p99 alone."""
    mine, own = percentile_if_any(list(shared), 99), percentile_if_any(list(alone), 99)
    return None if mine is None or not own else mine / own


def run_scenario(scenario: Scenario, seeds: Sequence[int], duration_s: float) -> dict[str, Any]:
    """Run all policies on the same requests, seed by seed."""
    runs: dict[str, list[Run]] = defaultdict(list)
    alone: list[Waits] = []
    for seed in seeds:
        alone.append(run_alone(scenario, seed, duration_s))
        for policy in POLICIES:
            runs[policy].append(run_policy(scenario, policy, seed, duration_s))
    bounds = [run.bound for run in runs["fair"]]
    base = [run.work_per_s for run in runs["fcfs"]]
    base_output = [run.output_per_s for run in runs["fcfs"]]
    policies = {
        policy: {
            "gap": [run.gap for run in found],
            "gap_by_bound": _ratios([run.gap for run in found], bounds),
            "jain": [run.jain for run in found],
            "ttft_ratio": ttft_ratio(
                [wait for run in found for wait in _all(run.waits)],
                [wait for own in alone for wait in _all(own)],
            ),
            "ttft_ratio_of_seeds": [
                ttft_ratio(_all(run.waits), _all(own))
                for run, own in zip(found, alone, strict=True)
            ],
            "ttft_ratio_of_tenants": _of_tenants([run.waits for run in found], alone),
            "ttft_p99_s": [percentile_if_any(_all(run.waits), 99) for run in found],
            "throughput": _ratios([run.work_per_s for run in found], base),
            "output_throughput": _ratios([run.output_per_s for run in found], base_output),
            "output_per_s": [run.output_per_s for run in found],
            "num_preemptions": [run.num_preemptions for run in found],
        }
        for policy, found in runs.items()
    }
    return {
        "scenario": scenario.name,
        "num_tenants": len(scenario.tenants),
        "num_guests": len(scenario.well_behaved),
        "bound": bounds,
        "ttft_p99_alone_s": [percentile_if_any(_all(own), 99) for own in alone],
        "policies": policies,
    }


def _all(waits: Waits) -> list[float]:
    return [wait for of_tenant in waits.values() for wait in of_tenant]


def _ratios(values: Sequence[float], by: Sequence[float]) -> list[float]:
    return [value / base for value, base in zip(values, by, strict=True)]


def _of_tenants(shared: Sequence[Waits], alone: Sequence[Waits]) -> dict[str, float]:
    """Return the TTFT ratio of each tenant with enough requests, over all seeds."""
    ratios: dict[str, float] = {}
    for name in shared[0]:
        mine = [wait for waits in shared for wait in waits[name]]
        ratio = ttft_ratio(mine, [wait for waits in alone for wait in waits[name]])
        if len(mine) >= MIN_REQUESTS and ratio is not None:
            ratios[name] = ratio
    return ratios


# ------------------------------------------------------------------- the report


def worst_of(row: Mapping[str, Any], policy: str) -> dict[str, float | None]:
    """Return the worst of each figure over the seeds, of TTFT over the tenants."""
    found = row["policies"][policy]
    ratios = [found["ttft_ratio"], *found["ttft_ratio_of_tenants"].values()]
    return {
        "gap": max(found["gap_by_bound"]),
        "jain": min((value for value in found["jain"] if value is not None), default=None),
        "ttft": max((value for value in ratios if value is not None), default=None),
        "throughput": min(found["throughput"]),
    }


def failures_in(rows: Iterable[Mapping[str, Any]], policy: str = "fair") -> list[str]:
    """Return the bars that a policy misses."""
    found: list[str] = []
    for row in rows:
        worst = worst_of(row, policy)
        name = f"{row['scenario']}, {policy}"
        gap, index, ttft, throughput = (worst[key] for key in worst)
        if gap is not None and gap > MAX_GAP:
            found.append(f"{name}: the gap is {gap:.2f} of its bound")
        if index is not None and index < MIN_JAIN:
            found.append(f"{name}: Jain index {index:.3f} < {MIN_JAIN}")
        if ttft is not None and ttft > MAX_TTFT_RATIO:
            found.append(f"{name}: p99 TTFT is {ttft:.2f} times that alone, > {MAX_TTFT_RATIO}")
        if throughput is not None and throughput < MIN_THROUGHPUT:
            found.append(f"{name}: throughput is {throughput:.3f} of fcfs < {MIN_THROUGHPUT}")
    return found


COLUMNS = (("gap", "7.3f"), ("jain", "7.3f"), ("ttft", "8.2f"), ("throughput", "6.3f"))
TITLES = {"gap": "gap", "jain": "Jain", "ttft": "TTFT", "throughput": "thr."}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table: the worst over the seeds for each scenario."""
    widths = [int(shape.split(".")[0]) for _, shape in COLUMNS]
    width = max(len(row["scenario"]) for row in rows)
    heads = [f"{TITLES[key]:>{size}}" for (key, _), size in zip(COLUMNS, widths, strict=True)]
    block = " ".join(heads)
    lines = [
        " " * width + "".join(f" | {policy:^{len(block)}}" for policy in POLICIES),
        " " * width + f" | {block}" * len(POLICIES),
    ]
    for row in rows:
        cells = f"{row['scenario']:<{width}}"
        for policy in POLICIES:
            worst = worst_of(row, policy)
            cells += " | " + " ".join(
                f"{'-':>{size}}" if (value := worst[key]) is None else f"{value:{shape}}"
                for (key, shape), size in zip(COLUMNS, widths, strict=True)
            )
        lines.append(cells)
    return "\n".join(lines)


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw each figure with its bar: median and range over the seeds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = (
        ("gap_by_bound", "service gap over its bound (at most 1)", MAX_GAP, True),
        ("jain", "Jain index of backlogged tenants (at least 0.95)", MIN_JAIN, False),
        (
            "ttft_ratio_of_seeds",
            "p99 TTFT of well-behaved tenants over that alone (at most 1.5)",
            1.5,
            True,
        ),
        ("throughput", "throughput over that of fcfs (at least 0.95)", MIN_THROUGHPUT, False),
    )
    colors = {"fair": "#2a7f62", "fcfs": "#888888", "priority": "#b0413e"}
    figure = Figure(figsize=(13, 12), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, sharex=True)
    for axis, (key, title, bar, is_log) in zip(axes, panels, strict=True):
        for shift, policy in enumerate(POLICIES):
            places, middles, lows, highs = [], [], [], []
            for place, row in enumerate(rows):
                values = [value for value in row["policies"][policy][key] if value is not None]
                if values:
                    middle = statistics.median(values)
                    places.append(place + 0.25 * (shift - 1))
                    middles.append(middle)
                    lows.append(middle - min(values))
                    highs.append(max(values) - middle)
            axis.bar(places, middles, 0.24, yerr=(lows, highs), color=colors[policy], label=policy)
        axis.axhline(bar, color="black", linestyle="--", linewidth=1)
        axis.set_title(title, loc="left")
        if is_log:
            axis.set_yscale("log")
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3)
    axes[-1].set_xticks(
        range(len(rows)), [row["scenario"] for row in rows], rotation=30, ha="right"
    )
    figure.savefig(path, dpi=110, format="png")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--duration", type=float, default=300.0, help="virtual seconds of a run")
    parser.add_argument("--only", default="", help="run only scenarios whose name contains this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for scenario in SCENARIOS:
        if args.only in scenario.name:
            rows.append(run_scenario(scenario, range(1, args.seeds + 1), args.duration))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(table(rows))
    failures = failures_in(rows)
    if args.json:
        report = {"duration_s": args.duration, "rows": rows, "failures": failures}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        draw(args.plot, rows)
    for failure in failures:
        print(f"missed: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
