"""Compares preemption methods with long prompts on a large model.

    python -m benchmarks.sim.preemption_large [--requests 200] [--seeds 3] [--json FILE]

Recompute is expensive there. A virtual engine (headway.sim), Poisson arrivals, a pool of 60 % of
the need of a full running set. The methods take turns over the same arrivals. A profile has
the costs of a step:

    x20, x100   a prefill token costs 20 and 100 times as much, relative to a decode step, as
                measured on the small model (0.3 ms beside 8 ms, `benchmarks.live.growth`). Decode
                rows cost the same, so these profiles favour methods that save computed tokens.
    gpu         an 8B model in bf16 on a GPU of 2 TB/s and 160 TFLOPS: a decode step reads 16 GB of
                weights (8 ms), a prefill token takes 16 GFLOP (0.1 ms).

A token has 128 KiB of keys and values (32 layers, 8 heads of 128, bf16), a block of 16 has 2 MiB.
Saving or loading a block takes 0.2 ms through memory of 10 GB/s (x20, whose decode step reads
4.5 GB of weights at 30 GB/s: 150 ms) and 84 us over a bus of 25 GB/s (x100, gpu). Attention to one
token of context reads its 128 KiB in a decode, and takes 0.5 MFLOP for each prefill token.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from headway.config import SchedulerConfig
from headway.core.events import Admitted, Event, Finished, Preempted, Stepped, TokensEmitted
from headway.core.executor import Capacity
from headway.core.params import SamplingParams
from headway.core.request import Request
from headway.core.slo.steptime import StepCost
from headway.core.terms import Terms
from headway.percentiles import percentile
from headway.sim import CannedExecutor, StepProfile, TimedExecutor, VirtualEngine
from headway.workload import Bounds, Content, Lognormal, Poisson, Synthetic, WorkItem

METHODS = ("auto", "recompute", "checkpoint", "trim")
BLOCK_SIZE = 16
NUM_SEATS = 16
POOL_SHARE = 0.6
PROMPTS = Lognormal(math.log(8000), 0.5, Bounds(4000, 16000))
OUTPUTS = Lognormal(math.log(350), 0.5, Bounds(100, 900))


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs of a step and of copying a block."""

    name: str
    cost: StepCost
    block_copy_s: float


PROFILES = (
    Profile("x20", StepCost(150e-3, 7.5e-3, 20 * 0.0375 * 150e-3, 4.4e-6, 3.5e-6), 0.2e-3),
    Profile("x100", StepCost(8e-3, 0.4e-3, 100 * 0.0375 * 8e-3, 0.065e-6, 0.94e-6), 84e-6),
    Profile("gpu", StepCost(8e-3, 0.1e-3, 0.1e-3, 0.065e-6, 3e-9), 84e-6),
)
"""Seconds of a step, a decode, a prefill token, and per token of context that either reads."""


@dataclass(slots=True)
class Times:
    """Sink of events: first token and end of each request, tokens computed again."""

    first_at: dict[str, float] = field(default_factory=dict[str, float])
    finished_at: dict[str, float] = field(default_factory=dict[str, float])
    num_preemptions: int = 0
    num_recomputed: int = 0
    num_computed: int = 0
    at: float = 0.0
    fresh: list[str] = field(default_factory=list[str])

    def __call__(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, TokensEmitted):
                self.fresh.append(event.request_id)
            elif isinstance(event, Preempted):
                self.num_preemptions += 1
            elif isinstance(event, Admitted):
                self.num_recomputed += event.num_recomputed
            elif isinstance(event, Stepped):
                self.num_computed += event.num_tokens
                self.at = event.at
            elif isinstance(event, Finished):
                self.finished_at[event.request_id] = event.at
                self.at = event.at
        for request_id in self.fresh:
            self.first_at.setdefault(request_id, self.at)
        self.fresh.clear()


@dataclass(frozen=True, slots=True)
class Case:
    """One setting for the comparison of all methods."""

    profile: Profile
    policy: str
    load: float
    """Arrival rate as a part of the throughput of a saturated run with recompute."""
    has_cache: bool
    store_share: float = 0.25

    def capacity(self, items: Sequence[WorkItem]) -> Capacity:
        sizes = [len(item.prompt_token_ids) + item.num_output_tokens for item in items]
        blocks = [-(-size // BLOCK_SIZE) for size in sizes]
        num_blocks = max(*blocks, round(POOL_SHARE * NUM_SEATS * statistics.mean(blocks)))
        num_slots = int(num_blocks * self.store_share)
        return Capacity(num_blocks, BLOCK_SIZE, 20_000, num_slots, self.profile.block_copy_s)

    def request(self, index: int, item: WorkItem, at: float) -> Request:
        """Return a request; one in four has a higher priority, or under fair is spot."""
        terms = Terms()
        if self.policy == "fair":
            tenant = index // 4 % 4
            terms = Terms(tenant=f"t{tenant}", is_spot=tenant == 3)
        params = SamplingParams(max_tokens=item.num_output_tokens, temperature=0.0, ignore_eos=True)
        return Request(
            id=str(index),
            token_ids=list(item.prompt_token_ids),
            params=params,
            seed=index,
            arrived_at=at,
            priority=-1 if index % 4 == 3 else 0,
            terms=terms,
        )


def items_of(num_requests: int, seed: int) -> list[WorkItem]:
    stream = Synthetic(Poisson(1.0), PROMPTS, OUTPUTS, Content()).items(seed=seed)
    return [next(stream) for _ in range(num_requests)]


def simulate(
    case: Case, items: Sequence[WorkItem], arrivals: Sequence[float], method: str, aging_s: float
) -> Times:
    """Run once, until all requests have finished."""
    capacity, times = case.capacity(items), Times()
    config = SchedulerConfig(
        max_num_seqs=NUM_SEATS,
        preemption_method=method,
        scheduling_policy=case.policy,
        max_wait_s=aging_s,
    )
    executor = TimedExecutor(CannedExecutor(capacity), StepProfile(case.profile.cost))
    engine = VirtualEngine(config, executor, times, case.has_cache)
    engine.send(
        case.request(index, item, at)
        for index, (item, at) in enumerate(zip(items, arrivals, strict=True))
    )
    engine.run()
    return times


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one case with one method, over the requests of all seeds."""

    profile: str
    policy: str
    load: float
    has_cache: bool
    store_share: float
    method: str
    num_requests: int
    p50_s: float
    p95_s: float
    p99_s: float
    ttft_p95_s: float
    requests_per_hour: float
    recomputed: float
    num_preemptions: int


def compare(case: Case, num_requests: int, num_seeds: int) -> list[Row]:
    """Run the methods in turn over the arrivals of each seed."""
    took: dict[str, list[float]] = {method: [] for method in METHODS}
    first: dict[str, list[float]] = {method: [] for method in METHODS}
    runs: dict[str, list[Times]] = {method: [] for method in METHODS}
    for seed in range(1, num_seeds + 1):
        items = items_of(num_requests, seed)
        at_once = simulate(case, items, [0.0] * num_requests, "recompute", math.inf)
        service_s = max(at_once.finished_at.values()) / num_requests
        arrivals = [(item.at or 0.0) * service_s / case.load for item in items]
        for method in METHODS:
            # Ten seconds are a few requests of the small model; aging scales with the profile.
            times = simulate(case, items, arrivals, method, 10.0 * service_s)
            runs[method].append(times)
            took[method] += [times.finished_at[str(i)] - at for i, at in enumerate(arrivals)]
            first[method] += [times.first_at[str(i)] - at for i, at in enumerate(arrivals)]
    rows: list[Row] = []
    for method in METHODS:
        of_method = runs[method]
        spent_s = sum(max(times.finished_at.values()) for times in of_method)
        rows.append(
            Row(
                case.profile.name,
                case.policy,
                case.load,
                case.has_cache,
                case.store_share,
                method,
                len(took[method]),
                percentile(took[method], 50),
                percentile(took[method], 95),
                percentile(took[method], 99),
                percentile(first[method], 95),
                3600 * len(took[method]) / spent_s,
                sum(times.num_recomputed for times in of_method)
                / sum(times.num_computed for times in of_method),
                sum(times.num_preemptions for times in of_method),
            )
        )
    return rows


HEADER = (
    "| profile | policy | load | prefix cache | store | method | p50 s | p95 s | p99 s "
    "| TTFT p95 s | requests/h | computed again | preemptions |\n" + "|---" * 13 + "|"
)


def line(row: Row) -> str:
    cache = "on" if row.has_cache else "off"
    return (
        f"| {row.profile} | {row.policy} | {row.load:.0%} | {cache} | {row.store_share:g} "
        f"| {row.method} | {row.p50_s:.4g} | {row.p95_s:.4g} | {row.p99_s:.4g} "
        f"| {row.ttft_p95_s:.4g} | {row.requests_per_hour:.4g} | {row.recomputed:.2%} "
        f"| {row.num_preemptions} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.9])
    parser.add_argument("--stores", type=float, nargs="+", default=[0.25])
    parser.add_argument("--profiles", nargs="+", default=[it.name for it in PROFILES])
    parser.add_argument("--caches", nargs="+", default=["on", "off"], help="prefix cache")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[Row] = []
    print(HEADER, flush=True)
    for profile in [it for it in PROFILES if it.name in args.profiles]:
        for policy in ("fair", "priority"):
            for load in args.loads:
                for has_cache in [name == "on" for name in args.caches]:
                    for store_share in args.stores:
                        case = Case(profile, policy, load, has_cache, store_share)
                        found = compare(case, args.requests, args.seeds)
                        rows += found
                        print("\n".join(map(line, found)), flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
