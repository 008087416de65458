"""Checks plans on the real server: the planned load keeps the target, 1.3 times it does not.

    headway profile "$model" -o machine.json
    python -m benchmarks.live.plan_holds "$model" machine.json [--ttft 2] [--pairs 10]
        [--seconds 60] [--workloads chat,...]

`--ttft` is the target for the p99 of TTFT. `carried_rate` says how much load one engine carries
within it. Then, in pairs with other requests each time, the server gets this load and 1.3 times
this load. A target near what one request takes alone cannot be checked so: the load that keeps it
is far from saturation, where a third more changes the p99 of a minute less than chance does.
"""

from __future__ import annotations

import argparse

from benchmarks.live.truth import WORKLOADS, profile_of, serve
from headway.bench.steal import StealMeter
from headway.sim.figures import Runs
from headway.sim.planning import Goal, Study, carried_rate, saturated_rate
from headway.sim.profile import MachineProfile
from headway.sim.setup import Setup
from headway.workload import Synthetic

NAMES = ("chat", "long prompts", "prefixes")
OVERLOAD = 1.3
SEED = 7000


def _plan(
    profile: MachineProfile, workload: Synthetic, goal: Goal, num_runs: int, seconds: float
) -> tuple[float, float]:
    """Return the rate that is carried within a target, and the saturated rate."""
    setup, runs = Setup.of(profile), Runs(num_runs, SEED)
    most = saturated_rate(setup, workload, runs).middle
    num_requests = max(100, round(seconds * most))
    return carried_rate(Study(setup, workload, goal, num_requests, runs)).sure, most


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("profile", type=profile_of)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ttft", type=float, default=2.0, help="target in seconds")
    parser.add_argument("--runs", type=int, default=19)
    parser.add_argument("--workloads", default=",".join(NAMES))
    arguments = parser.parse_args()
    profile: MachineProfile = arguments.profile
    num_held = num_pairs = 0
    speeds: list[float] = []
    goal = Goal(99, ttft_s=arguments.ttft)
    for name in arguments.workloads.split(","):
        workload = WORKLOADS[name]
        rate, most = _plan(profile, workload, goal, arguments.runs, arguments.seconds)

        def measure(rate: float, seed: int, workload: Synthetic = workload) -> float:
            load = workload.with_rate(rate)
            served = serve(arguments.model, (), load, arguments.seconds, seed)
            speeds.append(served.speed(profile))
            return served.figures.ttft_s[99]

        print(
            f"{name}: {goal.text} up to {rate:.2f} requests/s, saturated at {most:.2f}", flush=True
        )
        for number in range(arguments.pairs):
            meter = StealMeter()
            speeds.clear()
            seed = SEED + 100 + number
            kept_s = measure(rate, seed)
            missed_s = measure(OVERLOAD * rate, seed)
            steal = meter.read()
            holds = kept_s <= arguments.ttft < missed_s
            num_held += holds
            num_pairs += 1
            print(
                f"    {kept_s:.3f} s at the planned load, {missed_s:.3f} s at 1.3 times it, target "
                f"{arguments.ttft:.3f}: {'holds' if holds else 'DOES NOT HOLD'}, steal "
                f"{0.0 if steal is None else 100 * steal.share:.1f} %, steps "
                f"{speeds[0]:.2f} and {speeds[1]:.2f} times as long as profiled",
                flush=True,
            )
    print(f"{num_held} of {num_pairs} pairs hold")


if __name__ == "__main__":
    main()
