"""Checks plans on the real server: the planned load keeps the target, 1.3 times it does not.

    headway profile "$model" -o machine.json
    python -m benchmarks.live.plan_holds "$model" machine.json [--ttft 2] [--percentile 99]
        [--pairs 10] [--seconds 60] [--workloads chat,...]

`--ttft` is the target for a percentile of TTFT. `carried_rate` says how much load one engine
carries within it. Then, in pairs with other requests each time, the server gets this load and 1.3
times this load. A target near what one request takes alone cannot be checked so: the load that
keeps it is far from saturation, where a third more changes the percentile of a minute less than
chance does.

A plan is for the machine as it was profiled. Recorded steps say how fast the machine was in a run.
A pair with a run slower or faster than profiled by more than sqrt(1.3), half of the step between
the two loads, is printed and counted apart, and another pair follows, up to three times `--pairs`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import sqrt

from benchmarks.live.truth import WORKLOADS, profile_of, serve
from headway.bench.steal import StealMeter, steal_text
from headway.sim.figures import Runs
from headway.sim.planning import Goal, Study, carried_rate, saturated_rate
from headway.sim.profile import MachineProfile
from headway.sim.setup import Setup
from headway.workload import Synthetic

NAMES = ("chat", "prefixes", "long outputs")
OVERLOAD = 1.3
MAX_DRIFT = sqrt(OVERLOAD)
MAX_TRIES = 3
SEED = 7000


def _plan(
    profile: MachineProfile, workload: Synthetic, goal: Goal, num_runs: int, seconds: float
) -> tuple[float, float]:
    """Return the rate that is carried within a target, and the saturated rate."""
    setup, runs = Setup.of(profile), Runs(num_runs, SEED)
    most = saturated_rate(setup, workload, runs).middle
    num_requests = max(100, round(seconds * most))
    return carried_rate(Study(setup, workload, goal, num_requests, runs)).sure, most


@dataclass(frozen=True)
class _Pair:
    """TTFT at the planned load and at 1.3 times it, and how long steps were."""

    kept_s: float
    missed_s: float
    speeds: tuple[float, float]
    """Time of the steps by what the profile says, in both runs."""

    @property
    def as_profiled(self) -> bool:
        return all(1 / MAX_DRIFT <= speed <= MAX_DRIFT for speed in self.speeds)

    def holds(self, ttft_s: float) -> bool:
        return self.kept_s <= ttft_s < self.missed_s


def _measure(arguments: argparse.Namespace, workload: Synthetic, rate: float, seed: int) -> _Pair:
    """Serve the planned load and 1.3 times it."""
    kept, missed = (
        serve(arguments.model, (), workload.with_rate(one), arguments.seconds, seed)
        for one in (rate, OVERLOAD * rate)
    )
    profile = arguments.profile
    return _Pair(
        kept.figures.ttft_s[arguments.percentile],
        missed.figures.ttft_s[arguments.percentile],
        (kept.speed(profile), missed.speed(profile)),
    )


def _check(arguments: argparse.Namespace, name: str) -> list[_Pair]:
    """Print and return the pairs of a workload."""
    workload, goal = WORKLOADS[name], Goal(arguments.percentile, ttft_s=arguments.ttft)
    rate, most = _plan(arguments.profile, workload, goal, arguments.runs, arguments.seconds)
    print(f"{name}: {goal.text} up to {rate:.2f} requests/s, saturated at {most:.2f}", flush=True)
    pairs: list[_Pair] = []
    for number in range(MAX_TRIES * arguments.pairs):
        meter = StealMeter()
        pair = _measure(arguments, workload, rate, SEED + 100 + number)
        pairs.append(pair)
        print(
            f"    {pair.kept_s:.3f} s at the planned load, {pair.missed_s:.3f} s at 1.3 times it: "
            f"{'holds' if pair.holds(arguments.ttft) else 'DOES NOT HOLD'}, "
            f"{steal_text(meter.read())}, steps {pair.speeds[0]:.2f} and {pair.speeds[1]:.2f} "
            f"times as long as profiled{'' if pair.as_profiled else ', counted apart'}",
            flush=True,
        )
        if sum(one.as_profiled for one in pairs) == arguments.pairs:
            return pairs
    print(f"    fewer than {arguments.pairs} pairs on the machine as profiled: profile it again")
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("profile", type=profile_of)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ttft", type=float, default=2.0, help="target in seconds")
    parser.add_argument("--percentile", type=int, choices=(50, 95, 99), default=99)
    parser.add_argument("--runs", type=int, default=19)
    parser.add_argument("--workloads", default=",".join(NAMES))
    arguments = parser.parse_args()
    pairs = [one for name in arguments.workloads.split(",") for one in _check(arguments, name)]
    for machine, chosen in (
        ("the machine as profiled", [one for one in pairs if one.as_profiled]),
        ("a slower or faster machine", [one for one in pairs if not one.as_profiled]),
    ):
        num_held = sum(one.holds(arguments.ttft) for one in chosen)
        print(f"{num_held} of {len(chosen)} pairs hold on {machine}")


if __name__ == "__main__":
    main()
