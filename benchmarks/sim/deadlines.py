"""Measures goodput of three tiers at 0.7 to 2 times the capacity, by policy.

    python -m benchmarks.sim.deadlines [--duration 240] [--seeds 3] [--json FILE] [--plot FILE]

The engine core with its real scheduler on a virtual clock; steps take as long as on the real model
(headway.sim). Capacity is the rate of requests that a full engine finishes under fcfs without
targets. Then requests of three tiers arrive as a Poisson process: interactive (tight TTFT and
TPOT), standard (looser), batch (a deadline only). Each policy gets the same requests at the same
times:

    fcfs        first come, first served
    priority    interactive before standard before batch
    fair        by tenants' shares (each tier is one tenant), within a tenant by planned start
    deadline    by planned start alone

The last two admit only requests whose targets can be met; the API process refuses some of them by
the engine's forecast before the engine sees them, as in the server. The first two also run with the
bounds that the server has by default (256 requests, 10 s of expected wait), which limit the queue.

A request is good if it finished within all of its targets. Rates are per second of arrivals.
Refused requests are not good. "met" is the share of the admitted requests that are good.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count, product
from pathlib import Path
from typing import Any

from benchmarks.sim.pace_rig import CAPACITY, MAX_NUM_SEQS, Tier, draw_record, make_simulation
from headway.core.events import Event, Idled, Stepped
from headway.core.plan import StepPlan
from headway.core.terms import NO_TARGETS, Targets
from headway.percentiles import percentile_if_any
from headway.server.admission import DrainRate
from headway.sim import Record, Simulation
from headway.sim.fleet import EngineSpec
from headway.sim.forecasts import FeasibleEngines

TIERS = (
    Tier("interactive", 0.4, 120, 40, Targets(ttft_s=1.0, tpot_s=0.08), priority=0),
    Tier("standard", 0.3, 250, 80, Targets(ttft_s=4.0, tpot_s=0.15), priority=1),
    Tier("batch", 0.3, 500, 120, Targets(deadline_s=60.0), priority=2),
)
TIER_NAMES = tuple(tier.name for tier in TIERS)
LOADS = (0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)
OURS = ("fair", "deadline")
BASELINES = ("fcfs", "priority", "fcfs, bounded", "priority, bounded")
POLICIES: dict[str, dict[str, Any]] = {
    "fcfs": {"scheduling_policy": "fcfs", "mode": "fixed"},
    "priority": {"scheduling_policy": "priority", "mode": "fixed"},
    "fcfs, bounded": {"scheduling_policy": "fcfs", "mode": "fixed"},
    "priority, bounded": {"scheduling_policy": "priority", "mode": "fixed"},
    "fair": {"scheduling_policy": "fair"},
    "deadline": {"scheduling_policy": "deadline"},
}

STYLES = {
    "fcfs": ("#b0413e", "o--"),
    "priority": ("#3d5a80", "o--"),
    "fcfs, bounded": ("#b0413e", "o-"),
    "priority, bounded": ("#3d5a80", "o-"),
    "fair": ("#e0a458", "o-"),
    "deadline": ("#2a7f62", "o-"),
}
RAMP_SHARE = 0.2
MAX_NUM_QUEUED = 256
MAX_QUEUE_WAIT_S = 10.0
MIN_GAIN, GAIN_FROM = 1.3, 1.2
MIN_EVEN, EVEN_BELOW = 0.98, 0.9
MIN_KEPT = 0.95
MAX_MODEL_ERROR = 0.1


def draw_tier(draw: random.Random) -> Tier:
    return draw.choices(TIERS, weights=[tier.share for tier in TIERS])[0]


class Bounds:
    """Bounds of the server's queue: waiting requests, and the expected wait."""

    def __init__(self, rig: Simulation) -> None:
        self._rig = rig
        self._rate = DrainRate(0.0, MAX_QUEUE_WAIT_S)
        self._num_admitted = 0
        rig.may_join, rig.engine.on_step = self.may_join, self.observe

    def may_join(self, _record: Record) -> bool:
        now, num_queued = self._rig.engine.clock.now(), self._rig.engine.num_queued
        if not num_queued:
            self._rate.start(now)
        per_second = self._rate.per_second if self._rate.is_backed_up(now) else None
        wait_s = 0.0 if per_second is None else num_queued / per_second
        return num_queued < MAX_NUM_QUEUED and wait_s <= MAX_QUEUE_WAIT_S

    def observe(self, _plan: StepPlan) -> None:
        rig = self._rig
        num_left, self._num_admitted = rig.num_admitted - self._num_admitted, rig.num_admitted
        self._rate.observe(rig.engine.clock.now(), num_left, rig.engine.num_queued)


class EarlyRefusals:
    """The API process, which refuses what the engine's forecast rules out."""

    def __init__(self, rig: Simulation) -> None:
        self._clock = rig.engine.clock
        config = rig.engine.scheduler.config
        self._engines = FeasibleEngines(EngineSpec(config, CAPACITY, enable_prefix_caching=False))
        self._engines.engine_joined("engine")
        self._events: list[Event] = []
        """Events of the step that runs: the server hears of them when it ends."""
        rig.may_join, rig.on_events = self.may_join, self.observe

    def may_join(self, record: Record) -> bool:
        request, now = record.make_request(), self._clock.now()
        if not self._engines.arrive(request, now):
            return False
        self._engines.sent(request, "engine", now)
        self._engines.ended(request.id)  # there is no other engine to keep it from
        return True

    def observe(self, events: Sequence[Event]) -> None:
        self._events.extend(events)
        if any(isinstance(one, Stepped | Idled) for one in events):
            self._engines.observe("engine", self._events, self._clock.now())
            self._events.clear()


def without_targets(seed: int) -> Iterator[Record]:
    """Yield requests of the mix without targets, without end."""
    draw = random.Random(f"capacity/{seed}")
    for number in count():
        plain = replace(draw_tier(draw), targets=NO_TARGETS)
        yield draw_record(number, 0.0, plain, draw)


def arrivals(rate: float, duration_s: float, seed: int) -> Iterator[Record]:
    """Yield requests of the mix at the times of a Poisson process."""
    draw = random.Random(f"arrivals/{seed}")
    at = draw.expovariate(rate)
    for number in count():
        if at >= duration_s:
            return
        yield draw_record(number, at, draw_tier(draw), draw)
        at += draw.expovariate(rate)


def full_engine(duration_s: float, seed: int) -> list[Record]:
    """Return the requests that a full engine finished after a ramp."""
    records: list[Record] = []
    asked = without_targets(seed)

    def next_request(at: float) -> Record:
        records.append(replace(next(asked), arrived_at=at))
        return records[-1]

    rig = make_simulation(POLICIES["fcfs"], seed)
    rig.send(next_request(0.0) for _ in range(MAX_NUM_SEQS))
    rig.on_finish = lambda record: rig.send([next_request(record.finished_at or 0.0)])
    rig.run(duration_s, drain=False)
    return finished_after_ramp(records, duration_s)


def finished_after_ramp(records: Sequence[Record], duration_s: float) -> list[Record]:
    ramp_s = RAMP_SHARE * duration_s
    return [one for one in records if one.finished_at and ramp_s <= one.finished_at < duration_s]


def per_second(done: Sequence[Record], duration_s: float) -> float:
    return len(done) / (duration_s - RAMP_SHARE * duration_s)


def measure_capacity(duration_s: float, seed: int) -> float:
    """Return the requests per second that a full engine finishes."""
    return per_second(full_engine(duration_s, seed), duration_s)


def run_level(policy: str, rate: float, duration_s: float, seed: int) -> dict[str, Any]:
    """Run one policy at one rate of arrivals."""
    rig = make_simulation(POLICIES[policy], seed)
    if "bounded" in policy:
        Bounds(rig)
    elif policy in OURS:
        EarlyRefusals(rig)
    rig.send(arrivals(rate, duration_s, seed))
    rig.run(duration_s)
    return level_report(rig, duration_s)


def requests_report(records: Sequence[Record], duration_s: float) -> dict[str, Any]:
    """Return goodput, refusals and tiers of one level."""
    let_in = [one for one in records if not one.is_refused]
    return {
        "offered_per_s": len(records) / duration_s,
        "goodput_per_s": sum(one.is_good for one in records) / duration_s,
        "refused_share": 1 - len(let_in) / len(records),
        "kept_share": sum(one.is_good for one in let_in) / max(1, len(let_in)),
        "tiers": {tier.name: tier_report(records, tier) for tier in TIERS},
    }


def level_report(rig: Simulation, duration_s: float) -> dict[str, Any]:
    records = list(rig.records.values())
    errors = [abs(step.predicted_s / step.elapsed_s - 1) for step in rig.steps[100:]]
    return {
        **requests_report(records, duration_s),
        "preemptions": sum(one.num_preemptions for one in records),
        "running": statistics.fmean(step.num_running for step in rig.steps),
        "seats": statistics.fmean(step.max_num_seqs for step in rig.steps),
        "model_error": statistics.median(errors),
        "step_p50_s": statistics.median(step.elapsed_s for step in rig.steps),
    }


def tier_report(records: Sequence[Record], tier: Tier) -> dict[str, Any]:
    mine = [one for one in records if one.terms.tier == tier.name]
    let_in = [one for one in mine if not one.is_refused]
    return {
        "offered": len(mine),
        "let_in": len(let_in),
        "good": sum(one.is_good for one in mine),
        "ttft_p95_s": percentile_if_any([one.ttft_s for one in mine if one.ttft_s is not None], 95),
        "tpot_p95_s": percentile_if_any([one.tpot_s for one in mine if one.tpot_s is not None], 95),
        "e2e_p95_s": percentile_if_any([one.e2e_s for one in mine if one.e2e_s is not None], 95),
    }


def merge(levels: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return means over the seeds, and the least share that met targets."""
    merged = {
        name: statistics.fmean(level[name] for level in levels)
        for name, value in levels[0].items()
        if isinstance(value, int | float)
    }
    return {
        **merged,
        "kept_least": min(level["kept_share"] for level in levels),
        "tiers": {
            name: merge_tier([level["tiers"][name] for level in levels]) for name in TIER_NAMES
        },
    }


def merge_tier(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return counts summed over the seeds, and means of the percentiles."""
    merged: dict[str, Any] = {
        name: sum(one[name] for one in reports) for name in ("offered", "let_in", "good")
    }
    for name in ("ttft_p95_s", "tpot_p95_s", "e2e_p95_s"):
        known = [one[name] for one in reports if one[name] is not None]
        merged[name] = statistics.fmean(known) if known else None
    return merged


def run(loads: Sequence[float], duration_s: float, seeds: int) -> dict[str, Any]:
    capacity = statistics.fmean(measure_capacity(duration_s, seed) for seed in range(seeds))
    print(f"capacity: {capacity:.2f} requests/s", flush=True)
    print(HEAD, flush=True)
    levels: list[dict[str, Any]] = []
    for load in loads:
        level: dict[str, Any] = {"load": load}
        for policy in POLICIES:
            found = [run_level(policy, load * capacity, duration_s, seed) for seed in range(seeds)]
            level[policy] = merge(found)
            print(row_of(load, policy, level), flush=True)
        levels.append(level)
    tiers = [asdict(tier) for tier in TIERS]
    return {"capacity_per_s": capacity, "tiers": tiers, "levels": levels}


HEAD = (
    f"{'load':>5} {'policy':23} {'offered/s':>9} {'good/s':>7} {'refused':>8} "
    f"{'met':>6} {'(least)':>8}  good of each tier"
)


def row_of(load: float, policy: str, level: Mapping[str, Any]) -> str:
    found = level[policy]
    tiers = found["tiers"].items()
    shares = [f"{name} {one['good'] / max(1, one['offered']):.0%}" for name, one in tiers]
    return (
        f"{load:5.2f} {policy:23} {found['offered_per_s']:9.2f} {found['goodput_per_s']:7.2f} "
        f"{found['refused_share']:8.1%} {found['kept_share']:6.1%} "
        f"{found['kept_least']:8.1%}  {', '.join(shares)}"
    )


def gain_over(level: Mapping[str, Any], ours: str, policy: str) -> float:
    """Return our goodput over that of a policy."""
    return level[ours]["goodput_per_s"] / max(level[policy]["goodput_per_s"], 1e-9)


def failures_in(
    report: Mapping[str, Any],
    all_ours: Sequence[str] = OURS,
    baselines: Sequence[str] = BASELINES,
) -> list[str]:
    """Return the bars that a report misses."""
    found: list[str] = []
    for level, ours in product(report["levels"], all_ours):
        load, kept = level["load"], level[ours]["kept_least"]
        least = MIN_GAIN if load >= GAIN_FROM else MIN_EVEN if load < EVEN_BELOW else 0.0
        for policy in baselines:
            gain = gain_over(level, ours, policy)
            if gain < least:
                found.append(f"load {load:g}: {ours} has {gain:.2f} times the goodput of {policy}")
        if kept < MIN_KEPT:
            found.append(
                f"load {load:g}: {kept:.1%} of the requests admitted by {ours} met their targets"
            )
        if level[ours]["model_error"] > MAX_MODEL_ERROR:
            found.append(f"load {load:g}: the model errs by {level[ours]['model_error']:.1%}")
    return found


def draw(path: Path, report: Mapping[str, Any]) -> None:
    """Draw goodput and the share that met targets, by load."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    levels = report["levels"]
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    goodput, kept = figure.subplots(1, 2)
    loads = [level["load"] for level in levels]
    for policy, (color, style) in STYLES.items():
        good = [level[policy]["goodput_per_s"] for level in levels]
        goodput.plot(loads, good, style, color=color, label=policy)
        shares = [100 * level[policy]["kept_share"] for level in levels]
        kept.plot(loads, shares, style, color=color, label=policy)
    offered = [load * report["capacity_per_s"] for load in loads]
    goodput.plot(loads, offered, ":", color="#888888", label="offered")
    goodput.set(title="requests that met every target", ylabel="requests/s")
    kept.axhline(100 * MIN_KEPT, color="#888888", linestyle="--")
    kept.set(title="admitted requests that met every target", ylabel="%")
    for panel in (goodput, kept):
        panel.set_ylim(bottom=0)
        panel.set_xlabel(f"offered load, 1 = {report['capacity_per_s']:.2f} requests/s")
        panel.grid(alpha=0.3)
    goodput.legend()
    figure.savefig(path, dpi=120, format="png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--duration", type=float, default=240.0, help="virtual seconds of arrivals")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--loads", type=float, nargs="+", default=list(LOADS))
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--plot", type=Path, help="draw the picture here")
    args = parser.parse_args()
    report = run(args.loads, args.duration, args.seeds)
    for level, ours in product(report["levels"], OURS):
        gains = [f"{gain_over(level, ours, one):.2f} of {one}" for one in POLICIES if one != ours]
        print(f"load {level['load']:g}: goodput of {ours}: {'; '.join(gains)}")
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
