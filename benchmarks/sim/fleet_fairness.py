"""Measures fairness over a fleet: eight engines, tenants at one to four frontends.

    python -m benchmarks.sim.fleet_fairness [--seconds 20] [--seeds 1] [--only pinned] [--json FILE]
    python -m benchmarks.sim.fleet_fairness --parts

Real schedulers, the real Router, and the messages of `headway router`, on a virtual clock with the
step times of SmolLM2-135M on two cores. The tenant named last is at the last frontend, the
other at all others.

    pinned   a tenant whose prompts share 1,024 tokens, against one that shares nothing; both
             always have requests waiting
    10:1     a tenant with ten times the clients of another; both always have requests waiting
    100:1    a hundred times
    rude     a tenant with the best priority, long prompts and new prefixes, far beyond its share,
             against one that sends a quarter of its share
    targets  the same with targets, which may lead by URGENT_LEAD (headway.core.waiting.fair); what
             is refused for its targets is sent again, so that throughput is not compared

    gap         largest difference in machine-seconds between two tenants while both wait, each for
                longer than a step, and the bound: 2 max(w_p L, w_q M), with M the most tokens that
                the running requests of a tenant held in the fleet; where the router was killed,
                plus what the fleet serves until the standby decides
    Jain        Jain index of the service of tenants that always wait
    throughput  machine-seconds of work per second, over that of routing and engines which do not
                tell tenants apart, with one frontend
    TTFT        p99 of the tenant within its share, beyond that alone on engines of half the speed,
                in full steps of prefill: a step that runs is not cut short

Frontends with routers of their own are shown for comparison, and judged only if there is one. With
--parts: what the parts of the Router give, in TPOT of others and in shares.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from benchmarks.sim.fleet_fair_rig import (
    FULL_STEP_S,
    NUM_ENGINES,
    Figures,
    FleetRig,
    FleetTenant,
    Setup,
)
from headway.core.terms import NO_TARGETS, Targets
from headway.core.waiting.fair import URGENT_LEAD
from headway.routing import PredictedTtft

MIN_JAIN, MIN_THROUGHPUT = 0.95, 0.95
MAX_STEPS = {"rude": 4.0, "targets": 4.0 + URGENT_LEAD / 512}
"""Full steps by which a tenant within its share may have its first token later."""
NUM_CLIENTS = 100
MODEST_RATE = 9.0
"""Requests per second of a quarter of a share, for prompts of 256 and outputs of 48 tokens."""

_CALM = FleetTenant("calm", NUM_CLIENTS, is_last=True)
_HOSTILE = FleetTenant(
    "hostile", 400, targets=Targets(ttft_s=0.5, tpot_s=0.1), priority=-1000, num_prompt=800
)
_GUEST = FleetTenant("calm", rate=MODEST_RATE, is_last=True)
SCENARIOS: dict[str, tuple[FleetTenant, ...]] = {
    "pinned": (
        FleetTenant("spread", NUM_CLIENTS),
        FleetTenant("pinned", NUM_CLIENTS, is_last=True, has_prefix=True, num_prompt=128),
    ),
    "10:1": (FleetTenant("flood", 10 * NUM_CLIENTS), _CALM),
    "100:1": (FleetTenant("flood", 100 * NUM_CLIENTS), _CALM),
    "rude": (replace(_HOSTILE, targets=NO_TARGETS), _GUEST),
    "targets": (_HOSTILE, _GUEST),
}


def setups(seconds: float) -> tuple[Setup, ...]:
    """Return how frontends decide, in the order of the table."""
    kills = (seconds / 3, 2 * seconds / 3)
    return (
        Setup(1, is_shared=False),
        Setup(2),
        Setup(4),
        Setup(2, kills_at_s=kills),
        Setup(2, is_shared=False),
        Setup(4, is_shared=False),
    )


@dataclass(frozen=True, slots=True)
class Job:
    """One run."""

    scenario: str
    setup: Setup
    seed: int
    seconds: float
    slowness: float = 1.0
    only: str = ""
    """The only tenant that sends; empty for all."""


def measure(job: Job) -> Figures:
    tenants = [one for one in SCENARIOS[job.scenario] if job.only in ("", one.name)]
    return FleetRig(job.setup, tenants, job.seed, job.slowness).run(job.seconds)


def judge(
    setup: Setup, figures: Figures, unfair: Figures, alone: Figures | None
) -> dict[str, float]:
    """Return the figures of a run over their bars' bases."""
    outage_s = setup.outage_s * NUM_ENGINES * bool(setup.kills_at_s)
    found = {
        "gap_s": figures.gap_s,
        "bound_s": figures.bound_s + outage_s,
        "jain": figures.jain,
        "throughput": figures.work_per_s / unfair.work_per_s,
    }
    if alone is not None:
        beyond_s = figures.ttft_p99_s["calm"] - alone.ttft_p99_s["calm"]
        found["ttft_steps"] = beyond_s / FULL_STEP_S
    return found


def problems(row: dict[str, Any]) -> list[str]:
    """Return the bars that a row misses."""
    found: list[str] = []
    name = f"{row['scenario']}, {row['setup']}, seed {row['seed']}"
    if row["gap_s"] > row["bound_s"]:
        found.append(f"{name}: gap {row['gap_s']:.2f} s > {row['bound_s']:.2f} s")
    if row["jain"] < MIN_JAIN:
        found.append(f"{name}: Jain index {row['jain']:.3f} < {MIN_JAIN}")
    if row["throughput"] < MIN_THROUGHPUT and row["scenario"] != "targets":
        found.append(f"{name}: throughput {row['throughput']:.3f} < {MIN_THROUGHPUT}")
    limit = MAX_STEPS.get(row["scenario"], inf)
    if row.get("ttft_steps", 0.0) > limit:
        found.append(f"{name}: TTFT {row['ttft_steps']:.1f} > {limit} steps beyond that alone")
    return found


def run_battery(seconds: float, seeds: int, only: str) -> list[dict[str, Any]]:
    """Run every scenario with every setup; print and return the rows."""
    rows: list[dict[str, Any]] = []
    names = [name for name in SCENARIOS if only in name]
    if not names:
        raise SystemExit(f"no scenario has {only!r} in its name: {', '.join(SCENARIOS)}")
    with Pool(2) as pool:
        for scenario in names:
            for seed in range(seeds):
                make = partial(Job, scenario, seed=seed, seconds=seconds)
                jobs = [make(Setup(1, is_shared=False, is_fair=False))]
                jobs += [make(setup) for setup in setups(seconds)]
                has_guest = scenario in MAX_STEPS
                if has_guest:
                    own = Setup(1, is_shared=False)
                    jobs.append(replace(make(own), slowness=2.0, only="calm"))
                found = pool.map(measure, jobs, chunksize=1)
                alone = found.pop() if has_guest else None
                for job, figures in zip(jobs[1 : len(found)], found[1:], strict=True):
                    judged = judge(job.setup, figures, found[0], alone)
                    is_judged = job.setup.is_shared or job.setup.num_frontends == 1
                    row = {
                        "scenario": scenario,
                        "setup": job.setup.name,
                        "seed": seed,
                        "is_judged": is_judged,
                        **judged,
                        **{k: v for k, v in asdict(figures).items() if isinstance(v, dict)},
                    }
                    rows.append(row)
                    print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    text = (
        f"{row['scenario']:8} {row['setup']:33} gap {row['gap_s']:6.2f} of {row['bound_s']:6.1f} s"
        f"  Jain {row['jain']:.3f}  throughput {row['throughput']:.3f}"
    )
    return text + (f"  TTFT +{row['ttft_steps']:.1f} steps" if "ttft_steps" in row else "")


# --------------------------------------------------------------------- parts

DECODERS = FleetTenant("decoders", rate=20.0, num_prompt=64, num_output=200)
PARTS: dict[str, tuple[FleetTenant, ...]] = {
    "long prompts": (FleetTenant("prompts", rate=6.0, num_prompt=1500, num_output=8), DECODERS),
    "one prefix": (
        FleetTenant("bursts", rate=20.0, num_prompt=64, num_output=16, has_prefix=True),
        DECODERS,
    ),
    "pinned": SCENARIOS["pinned"],
}
VARIANTS: dict[str, Setup] = {
    "as it is": Setup(1, is_shared=False),
    "delays not counted": Setup(
        1, is_shared=False, make_rule=partial(PredictedTtft, delay_share=0.0)
    ),
    "delays in full": Setup(1, is_shared=False, make_rule=partial(PredictedTtft, delay_share=1.0)),
    "sent at once": Setup(1, is_shared=False, ahead_steps=inf),
}


def measure_part(job: tuple[str, str, int, float]) -> Figures:
    load, variant, seed, seconds = job
    return FleetRig(VARIANTS[variant], PARTS[load], seed).run(seconds)


def run_parts(seconds: float, seeds: int) -> list[dict[str, Any]]:
    """Run the variants of the Router; print and return the rows."""
    rows: list[dict[str, Any]] = []
    with Pool(2) as pool:
        for load in PARTS:
            for variant in VARIANTS:
                jobs = [(load, variant, seed, seconds) for seed in range(seeds)]
                found = pool.map(measure_part, jobs, chunksize=1)
                rows.append({"load": load, "variant": variant, **mean_of(found)})
                print(part_line(rows[-1]), flush=True)
    return rows


def mean_of(found: Sequence[Figures]) -> dict[str, Any]:
    """Return the means over the seeds."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    names = found[0].services
    total = [sum(one.services.values()) for one in found]
    pairs = list(zip(found, total, strict=True))
    return {
        "share": {name: mean([one.services[name] / all_ for one, all_ in pairs]) for name in names},
        "ttft_p99_s": {name: mean([one.ttft_p99_s[name] for one in found]) for name in names},
        "tpot_s": {name: mean([one.tpot_mean_s[name] for one in found]) for name in names},
        "work_per_s": mean([one.work_per_s for one in found]),
    }


def part_line(row: dict[str, Any]) -> str:
    text = f"{row['load']:13} {row['variant']:19} work {row['work_per_s']:.2f}/s"
    for name in row["share"]:
        text += (
            f"  {name}: share {row['share'][name]:.3f} TTFT p99 {row['ttft_p99_s'][name]:.2f} s "
            f"TPOT {1000 * row['tpot_s'][name]:.1f} ms"
        )
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="virtual seconds of a run")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="", help="run only scenarios whose name contains this")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    failures: list[str] = []
    if args.parts:
        rows = run_parts(args.seconds, args.seeds)
    else:
        rows = run_battery(args.seconds, args.seeds, args.only)
        failures = [one for row in rows if row["is_judged"] for one in problems(row)]
    if args.json is not None:
        args.json.write_text(json.dumps({"rows": rows, "failures": failures}, indent=1) + "\n")
    for failure in failures:
        print(f"missed: {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
