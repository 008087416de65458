"""Measures TPOT control and SLO admission of a real server, by the client's clock.

    python -m benchmarks.live.served_pace control MODEL [--phase 40] [--target-ms T] [--rounds 1]
                                                   [--fixed 16,512 32,256 ...]
    python -m benchmarks.live.served_pace deadlines MODEL [--loads 0.8 1.2 1.5] [--duration 60]
    python -m benchmarks.live.served_pace control --fake --phase 1 --target-ms 50

The same as sim/control.py and sim/deadlines.py on a virtual clock, with the same requests and the
same bars. Every setting has its own server process, warmed up by a few requests.

control: 4 clients, then 64, then 4 again, each with a TPOT target. The bounds on the waiting queue
are lifted, so that all settings serve the same clients. Without --target-ms, the largest fixed
setting runs first, without targets, and sets the target: its p95 TPOT with 64 clients, times the
ratio of the target of sim/control.py to that setting's p95 TPOT on the virtual clock. So that
setting misses the target on any machine. Every other round runs the settings from the last to the
first.

deadlines: first the capacity, with `max_num_seqs` clients in a closed loop, without targets, under
fcfs. Then three tiers, each a tenant; every policy gets the same requests at the same times, on a
server with the default bounds. The targets are those of sim/deadlines.py times one factor: the
median TPOT of the full engine here over that on the virtual clock. Only requests under fair carry
targets. A request is good if it finished within all targets by the client's clock, which starts at
the scheduled arrival.

Client and server share the machine: the report has the client's CPU share.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.live.served_rig import (
    MODEL_ERROR,
    REFUSED,
    RunningTarget,
    ServerFactory,
    body_of,
    record_of,
    scaled,
)
from benchmarks.sim import control, deadlines
from benchmarks.sim.pace_rig import MAX_NUM_SEQS
from benchmarks.support import proc_stats
from headway.bench.load.records import Outcome
from headway.bench.load.runner import LoadRun
from headway.bench.load.stats import summarize_load
from headway.bench.steal import steal_plain
from headway.clock import SystemClock
from headway.core.terms import Targets, Terms
from headway.sim import Record

FIXED = ((16, 512), (32, 256), (64, 512), (64, 1024))
CLIENTS = ("callers",)
NO_QUEUE_BOUNDS = {"max_queue_wait_s": 3600, "max_queue_age_s": 3600}
POLICIES = ("fcfs", "priority", "fair")
OURS, BASELINES = ("fair",), ("fcfs", "priority")
VIRTUAL_DURATION_S = 60.0
MAX_REFUSAL_P99_S = 0.05


# ------------------------------------------------------------------------- control


async def run_phases(
    factory: ServerFactory, served: RunningTarget, phase_s: float, target_s: float | None, seed: int
) -> dict[str, Any]:
    """Run FEW clients in all three phases, and the others in the middle phase."""
    draw = partial(control.draw_requests, target_s)
    served = served.with_fields({CLIENTS[0]: body_of(Targets(tpot_s=target_s))})
    few = factory.mix(draw, control.FEW)
    many = factory.mix(draw, control.MANY - control.FEW)
    clock = SystemClock()
    began_at = clock.now()

    async def send_many() -> tuple[float, LoadRun]:
        await asyncio.sleep(phase_s)
        later_s = clock.now() - began_at
        return later_s, await served.send(many, phase_s, 2 * seed + 1)

    run_few, (later_s, run_many) = await asyncio.gather(
        served.send(few, 3 * phase_s, 2 * seed), send_many()
    )
    records = [record_of(one) for one in run_few.records]
    records += [record_of(one, later_s=later_s) for one in run_many.records]
    # As on the virtual clock: requests that end after the last phase do not count.
    in_time = [one for one in records if (one.finished_at or 0.0) < 3 * phase_s]
    seen = [*run_few.records, *run_many.records]
    errors = summarize_load(seen).errors
    if not any(one.finished_at and (one.first_token_at or 0.0) >= phase_s for one in in_time):
        raise RuntimeError(f"{phase_s:g} s is too short: no request of the middle ended ({errors})")
    return {
        **control.report_of(in_time, phase_s, target_s or 0.0),
        "refused": sum(one.outcome is Outcome.REFUSED for one in seen),
        "failed": errors,
        "client_cpu_share": run_few.cpu_share,
    }


def median_tpot(records: Sequence[Record]) -> float:
    return statistics.median(one.tpot_s for one in records if one.tpot_s is not None)


def run_setting(
    factory: ServerFactory,
    limits: tuple[int, int] | None,
    phase_s: float,
    target_s: float | None,
    seed: int,
) -> dict[str, Any]:
    settings = {**control.settings_of("auto", limits), "scheduling_policy": "fair"}

    async def measure(served: RunningTarget) -> dict[str, Any]:
        await factory.warm_up(served, partial(control.draw_requests, None))
        return await run_phases(factory, served, phase_s, target_s, seed)

    with factory.server(settings, CLIENTS, NO_QUEUE_BOUNDS) as served:
        return proc_stats.run_client(measure(served))


def choose_target(factory: ServerFactory, phase_s: float) -> dict[str, float]:
    """Return the TPOT target, calibrated with the largest fixed setting."""
    found = run_setting(factory, FIXED[-1], phase_s, None, seed=1000)
    settings = control.settings_of("fixed", FIXED[-1])
    virtual = control.run_one(settings, phase_s, control.TARGET_S, seed=1000)
    many_s, virtual_s = found["tpot_p95_many_s"], virtual["tpot_p95_many_s"]
    return {
        "target_s": many_s * control.TARGET_S / virtual_s,
        "tpot_p95_many_s": many_s,
        "virtual_tpot_p95_many_s": virtual_s,
    }


def merge(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return medians and spread over the rounds."""
    merged: dict[str, Any] = {"failed": [one["failed"] for one in rounds if one["failed"]]}
    spread: dict[str, list[float]] = {}
    for name, value in rounds[0].items():
        if isinstance(value, int | float):
            values = [one[name] for one in rounds]
            merged[name], spread[name] = statistics.median(values), [min(values), max(values)]
    return {**merged, "spread": spread, "rounds": list(rounds)}


def run_control(
    factory: ServerFactory,
    phase_s: float,
    target_s: float | None,
    rounds: int,
    fixed: Sequence[tuple[int, int]] = FIXED,
) -> dict[str, Any]:
    report: dict[str, Any] = {"phase_s": phase_s}
    if target_s is None:
        report["calibration"] = choose_target(factory, phase_s)
        target_s = report["calibration"]["target_s"]
        print(f"calibration: {report['calibration']}", flush=True)
    print(f"target: {1000 * target_s:.1f} ms per output token\n{control.HEAD}", flush=True)
    settings = {**control.named(fixed), "auto": None}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in settings}
    for number in range(rounds):
        in_turn = list(settings.items())
        for name, limits in in_turn if number % 2 == 0 else reversed(in_turn):
            found[name].append(run_setting(factory, limits, phase_s, target_s, number))
            print(control.row_of(name, found[name][-1], target_s), flush=True)
    rows = {name: merge(one) for name, one in found.items()}
    return {**report, "target_s": target_s, "rows": rows, **compared(rows, target_s)}


def compared(rows: Mapping[str, Any], target_s: float) -> dict[str, float | None]:
    """Return the throughput of auto over that of the best fixed setting.

    Once among all fixed settings, once among those that meet the target.
    """
    fixed = list(control.fixed_rows({"rows": rows}).values())
    meeting = [row for row in fixed if row["tpot_p95_many_s"] <= target_s]
    ours = rows["auto"]["tokens_per_s"]
    return {
        name: ours / max(row["tokens_per_s"] for row in among) if among else None
        for name, among in {"auto_by_best": fixed, "auto_by_best_in_target": meeting}.items()
    }


def print_control(report: Mapping[str, Any]) -> None:
    print(f"medians over the rounds\n{control.HEAD}")
    for name, row in report["rows"].items():
        print(control.row_of(name, row, report["target_s"]))
        (slow, fast), (low, high) = (
            row["spread"][one] for one in ("tokens_per_s", "tpot_p95_many_s")
        )
        print(f"{'  from - to':24} {slow:.1f} - {fast:.1f}, {1e3 * low:.1f} - {1e3 * high:.1f} ms")
    for name in ("auto_by_best", "auto_by_best_in_target"):
        print(f"{name.replace('_', ' ')}: {report[name]}")


def control_failures(report: Mapping[str, Any]) -> list[str]:
    rows = report["rows"].items()
    found = [f"{name}: failed {row['failed']}" for name, row in rows if row["failed"]]
    found += [f"{name}: refused {row['refused']:g}" for name, row in rows if row["refused"]]
    return found + control.failures_in(report)


# ----------------------------------------------------------------------- deadlines


def measure_capacity(factory: ServerFactory, duration_s: float, seed: int) -> dict[str, float]:
    """Return requests per second of a full engine, and the factor of the targets."""
    settings = {**deadlines.POLICIES["fcfs"], "max_num_seqs": MAX_NUM_SEQS}

    async def measure(served: RunningTarget) -> LoadRun:
        await factory.warm_up(served, deadlines.without_targets)
        return await served.send(
            factory.mix(deadlines.without_targets, MAX_NUM_SEQS), duration_s, seed
        )

    with factory.server(settings, deadlines.TIER_NAMES) as served:
        run = proc_stats.run_client(measure(served))
    records = [record_of(one) for one in run.records]
    done = deadlines.finished_after_ramp(records, duration_s)
    if not done:
        errors = summarize_load(run.records).errors
        raise RuntimeError(
            f"{duration_s:g} s is too short: no request ended after the ramp ({errors})"
        )
    real_s, virtual_s = median_tpot(done), median_tpot(deadlines.full_engine(VIRTUAL_DURATION_S, 0))
    return {
        "requests_per_s": deadlines.per_second(done, duration_s),
        "tpot_p50_s": real_s,
        "virtual_tpot_p50_s": virtual_s,
        "scale": real_s / virtual_s,
    }


def bodies_of(policy: str, scale: float) -> dict[str, dict[str, object]]:
    """Return the fields of each tier's requests that the policy honours."""
    return {
        tier.name: {
            **({"priority": tier.priority} if policy != "fcfs" else {}),
            **(body_of(scaled(tier.targets, scale)) if policy in OURS else {}),
        }
        for tier in deadlines.TIERS
    }


async def run_level(
    factory: ServerFactory, served: RunningTarget, rate: float, duration_s: float, seed: int
) -> tuple[LoadRun, proc_stats.Scrape]:
    """Send the requests; return them, and the metrics at the last arrival."""
    await factory.warm_up(served, deadlines.without_targets)
    mix = factory.mix(partial(deadlines.arrivals, rate, duration_s))

    async def scrape_at_end() -> proc_stats.Scrape:
        await asyncio.sleep(duration_s)
        return await served.scrape()

    return await asyncio.gather(served.send(mix, duration_s, seed), scrape_at_end())


def level_report(
    run: LoadRun, metrics: proc_stats.Scrape, scale: float, duration_s: float
) -> dict[str, Any]:
    terms = {
        tier.name: Terms(tier.name, tier.name, targets=scaled(tier.targets, scale))
        for tier in deadlines.TIERS
    }
    records = [record_of(one, terms[one.tenant or ""]) for one in run.records]
    report = deadlines.requests_report(records, duration_s)
    summary = summarize_load(run.records)
    return {
        **report,
        "kept_least": report["kept_share"],
        "refusal_p50_s": summary.refusal_s.get(50),
        "refusal_p99_s": summary.refusal_s.get(99),
        "refused_for": metrics.by_label(REFUSED, "reason"),
        "lateness_p99_s": summary.lateness_s.get(99),
        "model_error": metrics.total(MODEL_ERROR),
        "failed": summary.errors,
        "client_cpu_share": run.cpu_share,
        "steal": steal_plain(run.steal),
    }


def run_deadlines(
    factory: ServerFactory, loads: Sequence[float], duration_s: float, seed: int
) -> dict[str, Any]:
    capacity = measure_capacity(factory, duration_s, seed)
    print(f"capacity: {capacity}")
    print(f"targets are those of the virtual benchmark times {capacity['scale']:.2f}")
    print(f"{deadlines.HEAD}; refusals p50, p99; model error", flush=True)
    levels: list[dict[str, Any]] = []
    for load in loads:
        level: dict[str, Any] = {"load": load}
        for policy in POLICIES:
            settings = {**deadlines.POLICIES[policy], "max_num_seqs": MAX_NUM_SEQS}
            with factory.server(settings, deadlines.TIER_NAMES) as served:
                target = served.with_fields(bodies_of(policy, capacity["scale"]))
                rate = load * capacity["requests_per_s"]
                work = run_level(factory, target, rate, duration_s, seed)
                run, metrics = proc_stats.run_client(work)
            level[policy] = level_report(run, metrics, capacity["scale"], duration_s)
            print(level_row(load, policy, level), flush=True)
        levels.append(level)
    return {"capacity": capacity, "duration_s": duration_s, "seed": seed, "levels": levels}


def level_row(load: float, policy: str, level: Mapping[str, Any]) -> str:
    found = level[policy]
    times = [found["refusal_p50_s"], found["refusal_p99_s"]]
    shown = ", ".join("-" if one is None else f"{1000 * one:.1f} ms" for one in times)
    return f"{deadlines.row_of(load, policy, level)}; {shown}; {found['model_error']:.1%}"


def deadlines_failures(report: Mapping[str, Any]) -> list[str]:
    found = deadlines.failures_in(report, OURS, BASELINES)
    for level in report["levels"]:
        name = f"load {level['load']:g}"
        errors = {policy: level[policy]["failed"] for policy in POLICIES}
        found += [f"{name}: {one} failed {what}" for one, what in errors.items() if what]
        for ours in OURS:
            p99_s = level[ours]["refusal_p99_s"]
            if p99_s is not None and p99_s > MAX_REFUSAL_P99_S:
                found.append(f"{name}: a refusal of {ours} takes {1000 * p99_s:.0f} ms (p99)")
    return found


def print_gains(report: Mapping[str, Any]) -> None:
    for level in report["levels"]:
        gains = [f"{deadlines.gain_over(level, OURS[0], one):.2f} of {one}" for one in BASELINES]
        print(f"load {level['load']:g}: goodput of {OURS[0]}: {'; '.join(gains)}")


def limits_of(text: str) -> tuple[int, int]:
    try:
        running, tokens = map(int, text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError("give running,tokens, such as 32,256") from error
    return running, tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    about = proc_stats.battery_parser(None)
    pace = commands.add_parser("control", parents=[about], conflict_handler="resolve")
    pace.add_argument("--phase", type=float, default=40.0, help="seconds of a phase")
    pace.add_argument("--target-ms", type=float, help="TPOT target; default: calibrated")
    pace.add_argument("--rounds", type=int, default=1)
    pace.add_argument(
        "--fixed", type=limits_of, nargs="+", default=FIXED, help="settings, as running,tokens"
    )
    tiers = commands.add_parser("deadlines", parents=[about], conflict_handler="resolve")
    tiers.add_argument("--loads", type=float, nargs="+", default=[0.8, 1.2, 1.5])
    tiers.add_argument("--duration", type=float, default=60.0, help="seconds of arrivals")
    tiers.add_argument("--seed", type=int, default=0)
    args = proc_stats.arguments(parser)
    factory = ServerFactory(args.model)
    if args.command == "control":
        target_s = None if args.target_ms is None else args.target_ms / 1000
        report = run_control(factory, args.phase, target_s, args.rounds, args.fixed)
        print_control(report)
        return proc_stats.conclude(report, control_failures(report), args)
    report = run_deadlines(factory, args.loads, args.duration, args.seed)
    print_gains(report)
    return proc_stats.conclude(report, deadlines_failures(report), args)


if __name__ == "__main__":
    sys.exit(main())
