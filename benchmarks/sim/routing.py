"""Compares rules of the router: real schedulers behind a real router, on a virtual clock.

    python -m benchmarks.sim.routing [--loads chat hot unique slow] [--engines 8] [--share 0.85]
        [--rules ttft least-loaded ...] [--seeds 3] [--seconds 60] [--blocks 2000] [--json FILE]
    python -m benchmarks.sim.routing --loads mooncake --trace FILE

First the rate is found that the rule `ttft` carries: the highest at which its p99 TTFT stays within
MAX_P99_S, or within twice that of a fleet with hardly any load, if prompts take longer than that.
Then every rule runs at a share of that rate. Rules of others send requests as long as an engine has
free sequences and KV blocks; `ttft` holds them back for longer. Variants of `ttft` show what each
part gives:

    ttft           assigned early, sent late, moved if 30 % better, delays counted by a quarter
    ttft-at-once   sent as long as the engine has free sequences and KV blocks
    ttft-unmoved   never moved
    ttft-restless  moved for any gain
    ttft-selfish   delays of other requests not counted
    ttft-delay-1   delays of other requests counted in full

TTFT is in seconds, over the requests that arrive after the warm-up; hit rate is the share of prompt
tokens found in prefix caches; goodput the share of requests with a TTFT of at most 1 s.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from multiprocessing import Pool
from pathlib import Path
from statistics import fmean

from benchmarks.sim.routing_load import MEASURED, NAMES, Load, check_trace
from benchmarks.support.records import write_record
from headway.bench.steal import StealMeter
from headway.config import SchedulerConfig
from headway.core.executor import Capacity
from headway.percentiles import percentile_if_any
from headway.routing import RULES, PredictedTtft, Router
from headway.sim.fleet import EngineSpec, VirtualFleet

CAPACITY = Capacity(num_blocks=2000, block_size=16, max_model_len=4096)
CONFIG = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512, scheduling_policy="fair")
DRAIN_S = 60.0
MAX_P99_S = 1.0
MAX_TTFT_S = 1.0
LIGHT_RATE = 0.1
"""Requests per second and engine that hardly ever wait for each other."""
FIRST_RATE = 4.0
"""Requests per second and engine at which the search for the carried rate begins."""

ROUTERS: dict[str, Callable[[], Router]] = {
    "ttft": Router,
    "ttft-at-once": lambda: Router(ahead_steps=inf),
    "ttft-unmoved": lambda: Router(move_gain=1.0),
    "ttft-restless": lambda: Router(move_gain=0.0),
    "ttft-selfish": lambda: Router(PredictedTtft(delay_share=0.0)),
    "ttft-delay-1": lambda: Router(PredictedTtft(delay_share=1.0)),
    **{
        name: lambda make=make: Router(make(), ahead_steps=inf)
        for name, make in RULES.items()
        if name != "ttft"
    },
}


@dataclass(frozen=True, slots=True)
class Run:
    """One run: a rule, a load, a number of engines."""

    rule: str
    load: Load
    num_engines: int
    num_blocks: int
    """KV blocks of each engine."""

    def at_rate(self, rate: float) -> Run:
        return replace(self, load=replace(self.load, rate=rate))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run measured."""

    rule: str
    load: str
    rate: float
    seed: int
    num_requests: int
    p50_s: float
    p99_s: float
    hit_rate: float
    expected_hit_rate: float
    goodput: float
    wait_p99_s: float
    """Wait in the router."""


def measure(run: Run, router: Router | None = None, noise_seed: int | None = None) -> Outcome:
    """Run a load on a fleet, behind the router of a rule's name unless one is given.

    `noise_seed` draws the noise of the steps; by default that is the seed of the load.
    """
    load = run.load
    profiles = load.profiles(run.num_engines)
    capacity = replace(CAPACITY, num_blocks=run.num_blocks)
    routers = [router or ROUTERS[run.rule]()]
    noise_seed = load.seed if noise_seed is None else noise_seed
    fleet = VirtualFleet(routers, profiles, EngineSpec(CONFIG, capacity), noise_seed)
    load.send(fleet, run.num_engines)
    fleet.run(end := load.until_s + DRAIN_S)
    records = [one for one in fleet.records.values() if one.arrived_at >= load.warm_up_s]
    if load.name in MEASURED:
        records = [one for one in records if one.terms.tenant == MEASURED[load.name]]
    # A request that had no token by the end counts with the time it has waited.
    ttfts = [end - one.arrived_at if one.ttft_s is None else one.ttft_s for one in records]
    num_prompt = sum(len(one.token_ids) for one in records)
    return Outcome(
        run.rule,
        load.name,
        load.rate,
        load.seed,
        len(records),
        percentile_if_any(ttfts, 50) or 0.0,
        percentile_if_any(ttfts, 99) or 0.0,
        sum(one.num_cached for one in records) / num_prompt,
        sum(one.predicted_cached for one in records) / num_prompt,
        sum(ttft <= MAX_TTFT_S for ttft in ttfts) / len(records),
        percentile_if_any([one.waited_s for one in records], 99) or 0.0,
    )


def carried_rate(run: Run) -> float:
    """Return the highest rate at which a run keeps its p99 TTFT, to 3 %."""
    name, num_engines = run.load.name, run.num_engines

    def p99_s(rate: float) -> float:
        outcome = measure(run.at_rate(rate))
        print(f"{name}: {rate:.1f}/s p99 {outcome.p99_s:.2f} s", file=sys.stderr)
        return outcome.p99_s

    light_s = p99_s(LIGHT_RATE * num_engines)
    limit_s = MAX_P99_S if light_s <= MAX_P99_S else 2.0 * light_s

    def is_carried(rate: float) -> bool:
        return p99_s(rate) <= limit_s

    low = FIRST_RATE * num_engines
    while not is_carried(low):
        low /= 2
    high = 1.5 * low
    while is_carried(high):
        low, high = high, 1.5 * high
    while high / low > 1.03:
        middle = (low + high) / 2
        low, high = (middle, high) if is_carried(middle) else (low, middle)
    return low


def print_table(outcomes: Sequence[Outcome], rates: dict[str, float]) -> None:
    """Print means over the seeds, one row per rule."""
    names = list(dict.fromkeys(one.load for one in outcomes))
    rules = list(dict.fromkeys(one.rule for one in outcomes))
    print("p50 / p99 TTFT in s (hit rate, goodput)")
    heads = [f"{name} {rates[name]:.0f}/s" for name in names]
    print("| rule | " + " | ".join(heads) + " |")
    print("|---" * (len(names) + 1) + "|")
    for rule in rules:
        cells = []
        for name in names:
            found = [one for one in outcomes if one.rule == rule and one.load == name]
            p50, p99 = fmean(one.p50_s for one in found), fmean(one.p99_s for one in found)
            hit, good = fmean(one.hit_rate for one in found), fmean(one.goodput for one in found)
            cells.append(f"{p50:.2f} / {p99:.2f} ({hit:.2f}, {good:.3f})")
        print(f"| {rule} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--loads", nargs="+", choices=NAMES, default=NAMES[:4])
    parser.add_argument("--rules", nargs="+", choices=list(ROUTERS), default=list(ROUTERS))
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=2000, help="KV blocks of each engine")
    parser.add_argument("--share", type=float, default=0.85, help="of the carried rate")
    parser.add_argument("--rates", type=float, nargs="+", help="carried rates, if known")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="after the warm-up")
    parser.add_argument("--trace", type=Path, help="trace file of the load mooncake")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the outcomes here")
    args = parser.parse_args()
    check_trace(parser, args.loads, args.trace)
    if args.blocks < 1:
        parser.error("--blocks must be at least 1")
    if args.rates is not None and len(args.rates) != len(args.loads):
        parser.error(f"--rates needs a rate for each load: {' '.join(args.loads)}")
    meter = StealMeter()
    with Pool(args.processes) as pool:
        loads = [Load(name, 0.0, args.seconds, 0, args.trace) for name in args.loads]
        searches = [Run("ttft", load, args.engines, args.blocks) for load in loads]
        carried = args.rates or pool.map(carried_rate, searches)
        print({load.name: round(rate, 1) for load, rate in zip(loads, carried, strict=True)})
        loads = [
            replace(load, rate=args.share * rate) for load, rate in zip(loads, carried, strict=True)
        ]
        rates = {load.name: load.rate for load in loads}
        runs = [
            Run(rule, replace(load, seed=seed), args.engines, args.blocks)
            for load in loads
            for rule in args.rules
            for seed in range(args.seeds)
        ]
        outcomes: list[Outcome] = []
        for outcome in pool.imap(measure, runs):
            outcomes.append(outcome)
            text = f"{len(outcomes)} of {len(runs)}: {outcome.load} {outcome.rule} "
            print(text + f"p99 {outcome.p99_s:.2f} s", file=sys.stderr)
    print_table(outcomes, rates)
    report = {"engines": args.engines, "blocks": args.blocks, "share": args.share}
    report["carried"] = carried
    write_record({**report, "outcomes": [asdict(one) for one in outcomes]}, meter, args.json)


if __name__ == "__main__":
    main()
