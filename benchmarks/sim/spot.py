"""What ordinary requests notice of spot requests, by the share of their steps that spot may have.

    python -m benchmarks.sim.spot [--loads 0.2 0.5 0.7 0.9] [--shares 0 0.02 0.05 0.1 1e6]
        [--seeds 3] [--minutes 10] [--json FILE]

Ordinary requests arrive at a share of what the engine carries without spot requests (Poisson), in
turn alone and beside spot requests, of which a fixed number is always there. Reported: p50 and p99
TTFT of the ordinary requests and their TPOT p50, relative to the same arrivals alone, and the spot
output tokens per second. A share of 1e6 sets no limit. The engine core with its real scheduler on a
virtual clock; steps take as long as on the real model (headway.sim).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import asdict, dataclass
from functools import cache
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.sim.pace_rig import Tier, draw_record, make_simulation
from headway.core.running import spot_time
from headway.core.terms import Terms
from headway.percentiles import percentile
from headway.sim import Record

ORDINARY = Tier("ordinary", 1.0, 120, 60)
SPOT = Tier("spot", 1.0, 120, 60)
SPOT_TERMS = Terms(tenant="spot", tier="spot", is_spot=True)
WARM_UP_S = 20.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times of the ordinary requests of one run, and what the spot requests got."""

    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    spot_tokens_per_s: float


@cache
def measure_capacity() -> float:
    """Return the ordinary requests per second of an engine that is never idle."""
    simulation, draw = make_simulation({}, 0), random.Random("capacity")
    simulation.send([draw_record(number, 0.0, ORDINARY, draw) for number in range(400)])
    simulation.run(1e9)
    return 400 / simulation.engine.clock.now()


def run(load: float, num_spot: int, seed: int, seconds: float) -> Outcome:
    """Run arrivals at a load, beside `num_spot` spot requests at every moment."""
    simulation, draw = make_simulation({}, seed), random.Random(f"spot/{seed}")
    rate, at = load * measure_capacity(), 0.0
    for number in count():
        at += draw.expovariate(rate)
        if at >= seconds:
            break
        simulation.send([draw_record(number, at, ORDINARY, draw)])
    spot_draw, numbers = random.Random(f"lines/{seed}"), count(10**6)

    def send_spot(at: float) -> None:
        record = draw_record(next(numbers), at, SPOT, spot_draw)
        record.terms = SPOT_TERMS
        simulation.send([record])

    def resend(record: Record) -> None:
        if record.terms.is_spot:
            send_spot(simulation.engine.clock.now())

    simulation.on_finish = resend
    for _ in range(num_spot):
        send_spot(0.0)
    simulation.run(seconds, drain=False)
    ordinary = [one for one in simulation.records.values() if not one.terms.is_spot]
    ordinary = [one for one in ordinary if one.arrived_at >= WARM_UP_S]
    ttft_s = [one.ttft_s for one in ordinary if one.ttft_s is not None]
    tpot_s = [one.tpot_s for one in ordinary if one.tpot_s is not None]
    spot = [one for one in simulation.records.values() if one.terms.is_spot and one.finished_at]
    num_tokens = sum(one.num_output for one in spot)
    ttft_p50_s, ttft_p99_s = percentile(ttft_s, 50), percentile(ttft_s, 99)
    return Outcome(ttft_p50_s, ttft_p99_s, percentile(tpot_s, 50), num_tokens / seconds)


def compare(load: float, share: float, options: argparse.Namespace) -> dict[str, Any]:
    """Return the medians over the seeds of the ratios to runs without spot requests."""
    spot_time.SPOT_SHARE = share
    seconds = 60.0 * options.minutes
    pairs = [
        (run(load, 0, seed, seconds), run(load, options.spot, seed, seconds))
        for seed in range(options.seeds)
    ]
    return {
        "load": load,
        "share": share,
        "ttft_p50": median(after.ttft_p50_s / alone.ttft_p50_s for alone, after in pairs),
        "ttft_p99": median(after.ttft_p99_s / alone.ttft_p99_s for alone, after in pairs),
        "tpot_p50": median(after.tpot_p50_s / alone.tpot_p50_s for alone, after in pairs),
        "spot_tokens_per_s": median(after.spot_tokens_per_s for _, after in pairs),
        "runs": [[asdict(alone), asdict(after)] for alone, after in pairs],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.2, 0.5, 0.7, 0.9])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.02, 0.05, 0.1, 1e6])
    parser.add_argument("--spot", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"capacity {measure_capacity():.2f} requests/s; ratios to the same arrivals alone")
    print("load   share  TTFT p50   p99  TPOT p50  spot tokens/s")
    rows: list[dict[str, Any]] = []
    for load in options.loads:
        for share in options.shares:
            row = compare(load, share, options)
            rows.append(row)
            print(
                f"{load:<6} {share:<6g} {row['ttft_p50']:8.2f} {row['ttft_p99']:5.2f} "
                f"{row['tpot_p50']:9.2f} {row['spot_tokens_per_s']:14.1f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
