"""Measures goodput, refusals and recovery of a server beyond its capacity.

    python -m benchmarks.live.overload MODEL [--duration 120] [--rounds 1]
        [--json FILE] [--plot FILE]
    python -m benchmarks.live.overload --fake --duration 5 --capacity-s 5

First the capacity: a closed loop of `max_num_seqs` clients. Then an open loop: Poisson arrivals at
0.5, 1, 2, 3 and 10 times that rate, with an idle gap between two levels. Every level has its own
prompts, so that no prefix is cached.

Rates and goodput count requests that ended between the end of a ramp (a fifth of the time) and the
last arrival. A request is good if its answer was complete and within both targets. TTFT counts from
the scheduled arrival. Capacity is measured without waiting requests, so at 1.0 the waiting queue
just begins to grow.

After the last arrival of the last level the script sends a probe every second. The server has
recovered when the median TTFT of three probes in a row is within 1.5 times that of the unloaded
server; a refused probe counts as infinitely slow. The recovery time ends when the first of the
three is sent.

Client and server share the machine: the report shows the client's CPU share for each level.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.support import proc_stats
from benchmarks.support.servers import RunningServer
from headway.bench.load.http import HttpClient
from headway.bench.load.openai import Target, ask
from headway.bench.load.records import LoadRecord, Outcome
from headway.bench.load.runner import LoadRun, RunLimits, run_load
from headway.bench.load.stats import LoadTargets, summarize_load
from headway.bench.steal import steal_plain
from headway.clock import SystemClock
from headway.workload import (
    Bounds,
    ClosedLoop,
    Content,
    Lognormal,
    Poisson,
    Synthetic,
    Vocabulary,
    WorkItem,
)

FACTORS = (0.5, 1.0, 2.0, 3.0, 10.0)
NUM_SEATS = 64
SMALL = {"kv_cache_memory_bytes": "1G"}
"""A KV cache that is fully used before the first level: later growth is a leak."""
PROMPT_TOKENS = Lognormal(math.log(100), 0.5, Bounds(8, 512))
OUTPUT_TOKENS = Lognormal(math.log(60), 0.5, Bounds(4, 256))
RAMP_SHARE = 0.2
MAX_CONCURRENCY = 8192
NUM_PROBES = 11
PROBE_TOKENS = (64, 4)
"""Tokens of prompt and answer."""
PROBE_EVERY_S = 1.0
MAX_PROBES = 90
RECOVERED_RATIO = 1.5
MAX_RECOVERY_S = 30.0
MIN_GOODPUT_RATIO = 0.9
MAX_REFUSAL_P99_S = 0.05


def workload(arrivals: ClosedLoop | Poisson, vocabulary: Vocabulary) -> Synthetic:
    return Synthetic(arrivals, PROMPT_TOKENS, OUTPUT_TOKENS, Content(vocabulary))


@dataclass(frozen=True, slots=True)
class Rates:
    """Requests and tokens that ended per second while the load was steady."""

    requests_per_s: float
    good_per_s: float
    output_tokens_per_s: float


def steady_rates(records: Sequence[LoadRecord], duration_s: float, targets: LoadTargets) -> Rates:
    begin_s = RAMP_SHARE * duration_s
    window_s = duration_s - begin_s
    done = [
        record
        for record in records
        if record.outcome is Outcome.COMPLETED and begin_s <= (record.ended_at or 0.0) < duration_s
    ]
    num_tokens = sum(
        count
        for record in records
        for at, count in zip(record.chunk_times, record.chunk_tokens, strict=True)
        if begin_s <= at < duration_s
    )
    num_good = sum(targets.are_met_by(record) for record in done)
    return Rates(len(done) / window_s, num_good / window_s, num_tokens / window_s)


async def measure_capacity(
    target: Target, vocabulary: Vocabulary, duration_s: float, seed: int = 0
) -> Rates:
    """Measure the rates with a full running set and no waiting requests."""
    work = workload(ClosedLoop(NUM_SEATS), vocabulary)
    run = await run_load(target, work, RunLimits(duration_s=duration_s), seed - 1)
    return steady_rates(run.records, duration_s, LoadTargets())


@dataclass(slots=True)
class Prober:
    """Sends small requests, one at a time, each with its own prompt."""

    target: Target
    vocabulary: Vocabulary
    num_sent: int = 0

    async def ttft_s(self) -> float:
        """Send a probe; return its TTFT, or infinity without an answer."""
        self.num_sent += 1
        client, clock = HttpClient(self.target.origin), SystemClock()
        num_prompt, num_output = PROBE_TOKENS
        prompt = self.vocabulary.token_ids(random.Random(f"probe/{self.num_sent}"), num_prompt)
        record = LoadRecord(0, None, clock.now(), num_prompt)
        try:
            await ask(client, self.target, WorkItem(tuple(prompt), num_output), record, clock)
        finally:
            client.close()
        is_answered = record.outcome is Outcome.COMPLETED and record.ttft_s is not None
        return record.ttft_s or math.inf if is_answered else math.inf

    async def unloaded_s(self) -> float:
        """Return the median TTFT without load; the first probe is a warm-up."""
        values = [await self.ttft_s() for _ in range(NUM_PROBES)]
        return statistics.median(values[1:])

    async def recovery_s(self, normal_s: float) -> float | None:
        """Return the seconds until probes are fast again; None at the timeout."""
        clock = SystemClock()
        began_at = clock.now()
        sent: list[tuple[float, float]] = []
        for number in range(MAX_PROBES):
            await asyncio.sleep(max(0.0, began_at + number * PROBE_EVERY_S - clock.now()))
            sent_at = clock.now() - began_at
            sent.append((sent_at, await self.ttft_s()))
            last = sent[-3:]
            if len(last) == 3:
                median_s = statistics.median([ttft_s for _, ttft_s in last])
                if median_s <= RECOVERED_RATIO * normal_s:
                    return last[0][0]
        return None


@dataclass(frozen=True, slots=True)
class Options:
    """Duration, targets and factors of the levels."""

    duration_s: float
    idle_s: float
    targets: LoadTargets
    factors: tuple[float, ...] = FACTORS


@dataclass(slots=True)
class Bench:
    """Runs the levels on one server, one after another."""

    server: RunningServer
    target: Target
    vocabulary: Vocabulary
    options: Options
    prober: Prober

    async def level(self, factor: float, capacity: float, seed: int) -> dict[str, Any]:
        """Run one level, and wait until the server is empty."""
        options, run = self.options, LoadRun()
        before = proc_stats.both_usages(self.server)
        work = workload(Poisson(factor * capacity), self.vocabulary)
        limits = RunLimits(duration_s=options.duration_s, max_concurrency=MAX_CONCURRENCY)
        await run_load(self.target, work, limits, seed, run)
        return {
            "factor": factor,
            **level_report(run, options),
            "memory_mib": _memory(before, proc_stats.both_usages(self.server)),
        }

    async def last_level(self, factor: float, capacity: float, seed: int) -> dict[str, Any]:
        """Run the last level, with probes from its last arrival on."""
        normal_s = await self.prober.unloaded_s()

        async def recover() -> float | None:
            await asyncio.sleep(self.options.duration_s)
            return await self.prober.recovery_s(normal_s)

        level, recovery_s = await asyncio.gather(self.level(factor, capacity, seed), recover())
        return {**level, "probe_ttft_s": normal_s, "recovery_s": recovery_s}


def level_report(run: LoadRun, options: Options) -> dict[str, Any]:
    summary = summarize_load(run.records, options.targets)
    rates = steady_rates(run.records, options.duration_s, options.targets)
    return {
        "offered": summary.num_requests,
        "offered_per_s": summary.num_requests / options.duration_s,
        "completed": summary.outcomes[Outcome.COMPLETED],
        "failed": summary.errors,
        "refused": {str(status): count for status, count in summary.refusals.items()},
        "retry_after_share": summary.retry_after_share,
        "refusal_p50_s": summary.refusal_s.get(50),
        "refusal_p99_s": summary.refusal_s.get(99),
        "goodput_per_s": rates.good_per_s,
        "completed_per_s": rates.requests_per_s,
        "output_tokens_per_s": rates.output_tokens_per_s,
        "ttft_p50_s": summary.ttft_s.get(50),
        "ttft_p99_s": summary.ttft_s.get(99),
        "tpot_p99_s": summary.tpot_s.get(99),
        "lateness_p99_s": summary.lateness_s.get(99),
        "client_cpu_share": run.cpu_share,
        "steal": steal_plain(run.steal),
    }


def _memory(*usages: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the memory of each process at the start and at the end."""
    return {
        name: [usage[name].memory_bytes / proc_stats.MIB for usage in usages if name in usage]
        for name in ("api", "engine")
    }


async def run(
    server: RunningServer, vocabulary: Vocabulary, options: Options, capacity_s: float, rounds: int
) -> dict[str, Any]:
    target = await proc_stats.target_of(server)
    bench = Bench(server, target, vocabulary, options, Prober(target, vocabulary))
    warm_up = workload(ClosedLoop(8), vocabulary)
    await run_load(target, warm_up, RunLimits(num_requests=16), -1000)
    capacity = await measure_capacity(target, vocabulary, capacity_s)
    print(f"capacity: {asdict(capacity)}", flush=True)
    found: list[list[dict[str, Any]]] = []
    for number in range(rounds):
        levels = []
        for place, factor in enumerate(options.factors):
            await proc_stats.until_quiet(server)
            await asyncio.sleep(options.idle_s)
            is_last = place == len(options.factors) - 1
            measure = bench.last_level if is_last else bench.level
            seed = 1 + number * len(options.factors) + place
            levels.append(await measure(factor, capacity.requests_per_s, seed))
            print(_row(levels[-1]), flush=True)
        found.append(levels)
    return {
        "capacity": asdict(capacity),
        "targets": asdict(options.targets),
        "rounds": found,
        "levels": [_median_level([levels[at] for levels in found]) for at in range(len(found[0]))],
        "tracebacks": server.log.count("Traceback"),
    }


def _median_level(levels: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the rounds, and the spread of the goodput."""
    merged = dict(levels[0])
    for name, value in levels[0].items():
        if isinstance(value, int | float):
            known = [level[name] for level in levels if level[name] is not None]
            merged[name] = statistics.median(known)
    goodputs = [level["goodput_per_s"] for level in levels]
    return {**merged, "goodput_lowest": min(goodputs), "goodput_highest": max(goodputs)}


HEADINGS = (
    ("factor", "load", "6.1f"),
    ("offered_per_s", "offered/s", "10.2f"),
    ("completed_per_s", "done/s", "8.2f"),
    ("goodput_per_s", "good/s", "8.2f"),
    ("output_tokens_per_s", "tokens/s", "9.1f"),
    ("ttft_p50_s", "TTFT p50", "9.3f"),
    ("ttft_p99_s", "TTFT p99", "9.3f"),
    ("refusal_p50_s", "ref. p50", "9.4f"),
    ("refusal_p99_s", "ref. p99", "9.4f"),
    ("retry_after_share", "retry-aft", "10.2f"),
    ("client_cpu_share", "client CPU", "11.2f"),
)


def _row(level: Mapping[str, Any]) -> str:
    cells = []
    for name, _, shape in HEADINGS:
        value = level[name]
        cells.append(f"{'-':>{shape.split('.')[0]}}" if value is None else f"{value:{shape}}")
    memory = ", ".join(
        f"{name} {' -> '.join(f'{value:.0f}' for value in ends)} MiB"
        for name, ends in level["memory_mib"].items()
    )
    return " ".join([*cells, f" refused {level['refused'] or 0}, {memory}"])


def table(report: Mapping[str, Any]) -> str:
    head = " ".join(f"{title:>{shape.split('.')[0]}}" for _, title, shape in HEADINGS)
    return "\n".join([head, *map(_row, report["levels"])])


def goodput_ratio(report: Mapping[str, Any]) -> float | None:
    """Return the goodput at 3 times the capacity over that at 1."""
    by_factor = {level["factor"]: level["goodput_per_s"] for level in report["levels"]}
    if not by_factor.get(1.0) or 3.0 not in by_factor:
        return None
    return by_factor[3.0] / by_factor[1.0]


def failures_in(report: Mapping[str, Any]) -> list[str]:
    """Return the failures that a report shows."""
    found = []
    ratio = goodput_ratio(report)
    if ratio is None or ratio < MIN_GOODPUT_RATIO:
        found.append(f"goodput at 3 times the capacity, by that at 1: {ratio}")
    for level in report["levels"]:
        name = f"load {level['factor']:g}"
        if level["failed"]:
            found.append(f"{name}: {level['failed']}")
        if level["refused"] and level["retry_after_share"] < 1.0:
            found.append(f"{name}: refusals without Retry-After")
        if level["refused"] and level["refusal_p99_s"] > MAX_REFUSAL_P99_S:
            found.append(f"{name}: a refusal takes {level['refusal_p99_s']:.2f} s (p99)")
    recovery_s = report["levels"][-1]["recovery_s"]
    if recovery_s is None or recovery_s > MAX_RECOVERY_S:
        found.append(f"time to recover: {recovery_s}")
    if report["tracebacks"]:
        found.append(f"{report['tracebacks']} tracebacks in the log")
    return found


def draw(path: Path, report: Mapping[str, Any]) -> None:
    """Draw goodput and p99 TTFT against offered load."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    levels, capacity = report["levels"], report["capacity"]["requests_per_s"]
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    goodput, latency = figure.subplots(1, 2)
    loads = [level["factor"] for level in levels]
    lowest, highest = ([one[f"goodput_{end}"] for one in levels] for end in ("lowest", "highest"))
    goodput.fill_between(loads, lowest, highest, color="#2a7f62", alpha=0.2)
    good = [one["goodput_per_s"] for one in levels]
    goodput.plot(loads, good, "o-", color="#2a7f62", label="within the targets")
    goodput.axhline(capacity, color="#888888", linestyle="--", label="capacity")
    goodput.set(title="goodput", ylabel="requests/s")
    goodput.set_ylim(0, 1.15 * max(capacity, *highest))
    known = [one for one in levels if one["ttft_p99_s"] is not None]
    for name, label, color in (("ttft_p99_s", "p99", "#b0413e"), ("ttft_p50_s", "p50", "#2a7f62")):
        values = [one[name] for one in known]
        latency.plot([one["factor"] for one in known], values, "o-", color=color, label=label)
    latency.axhline(report["targets"]["ttft_s"], color="#888888", linestyle="--", label="target")
    latency.set(title="time to first token of completed requests", ylabel="seconds")
    latency.set_ylim(bottom=0)
    for panel in (goodput, latency):
        panel.set_xscale("log")
        panel.set_xticks(loads, [f"{load:g}" for load in loads])
        panel.minorticks_off()
        panel.set_xlabel(f"offered load, 1 = {capacity:.2f} requests/s")
        panel.grid(alpha=0.3)
        panel.legend(loc="lower right" if panel is goodput else "best")
    figure.savefig(path, dpi=120, format="png")


def main() -> int:
    parser = proc_stats.battery_parser(__doc__)
    parser.add_argument("--duration", type=float, default=120.0, help="seconds for each level")
    parser.add_argument("--capacity-s", type=float, default=90.0)
    parser.add_argument("--idle", type=float, default=5.0, help="seconds between two levels")
    parser.add_argument("--ttft", type=float, default=8.0, help="TTFT target, in seconds")
    parser.add_argument("--tpot", type=float, default=1.0, help="TPOT target, in seconds")
    parser.add_argument("--max-queue-wait-s", type=float, default=4.0, help="setting of the server")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="draw the picture here")
    args = proc_stats.arguments(parser)
    options = Options(args.duration, args.idle, LoadTargets(ttft_s=args.ttft, tpot_s=args.tpot))
    vocabulary = proc_stats.LETTERS if args.fake else Vocabulary()
    settings = {"max_queue_wait_s": args.max_queue_wait_s}
    with (
        tempfile.TemporaryDirectory() as name,
        proc_stats.started(args.model, Path(name), settings, SMALL, step_s=0.05) as server,
    ):
        work = run(server, vocabulary, options, args.capacity_s, args.rounds)
        report = proc_stats.run_client(work)
    print(table(report))
    print(f"goodput at 3x by that at 1x: {goodput_ratio(report)}")
    print(f"recovered {report['levels'][-1]['recovery_s']} s after the end of the last level")
    if args.plot:
        draw(args.plot, report)
    return proc_stats.conclude(report, failures_in(report), args)


if __name__ == "__main__":
    sys.exit(main())
