"""Checks in simulation what a planned rate promises: that 95 % of further runs keep the target.

    python -m benchmarks.sim.plans [--profile FILE] [--ttft 3] [--percentile 99] [--runs 19]
        [--drift 0.04] [--further 100] [--seconds 60] [--workloads chat,...]

Prints for each workload the rate that one engine is sure to carry, in how many further runs, with
other requests on a machine drawn anew, the target is kept at this rate, and in how many at 1.3
times this rate. The first share should be 95 % or somewhat more: 100 % is a rate that could be
higher, and with a share that is lower by more than chance the command ends with an error.
"""

from __future__ import annotations

import argparse
from math import sqrt
from time import perf_counter

from benchmarks.support.arguments import at_least_one, run
from benchmarks.support.workloads import ALL_WORKLOADS, parse_names
from headway.errors import ConfigError
from headway.sim.prediction.figures import Runs, predict
from headway.sim.prediction.planning import Goal, Study, carried_rate
from headway.sim.prediction.serving import Limits
from headway.sim.prediction.settings import change_settings, parse_drift
from headway.sim.prediction.setup import Setup
from headway.sim.prediction.verdict import saturated_rate
from headway.sim.profile.catalog import find_profile
from headway.sim.profile.machine import MachineProfile
from headway.workload import Synthetic

OVERLOAD = 1.3
PROMISED = 0.95
SEED = 7000


def add_drift(parser: argparse.ArgumentParser) -> None:
    """Add the option that plans for a machine of another drift."""
    about = "standard deviation of the speed of engines, such as 0.04; default: the profile's"
    parser.add_argument("--drift", type=_drift_of, help=about)


def _drift_of(text: str) -> float:
    try:
        return parse_drift(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def profile_of(name: str) -> MachineProfile:
    """Return the profile that an argument names."""
    try:
        return find_profile(name)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def setup_of(profile: MachineProfile, drift: float | None) -> Setup:
    """Return one engine as profiled, or with another drift of its speed."""
    return change_settings(Setup.of(profile), [] if drift is None else [f"drift={drift}"])


def planned_rate(
    setup: Setup, workload: Synthetic, goal: Goal, num_runs: int, seconds: float
) -> tuple[float, float]:
    """Return the rate that is carried within a target at least so long, and the saturated rate."""
    runs = Runs(num_runs, SEED)
    most = saturated_rate(setup, workload, runs).middle
    num_requests = max(100, round(seconds * most))
    return carried_rate(Study(setup, workload, goal, num_requests, runs)).sure, most


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--profile", type=profile_of, default="smollm2-135m-2-cores")
    parser.add_argument("--ttft", type=float, default=3.0, help="target in seconds")
    parser.add_argument("--percentile", type=int, choices=(50, 95, 99), default=99)
    parser.add_argument("--runs", type=at_least_one, default=19)
    parser.add_argument("--further", type=at_least_one, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workloads", type=parse_names, default=tuple(ALL_WORKLOADS))
    add_drift(parser)
    arguments = parser.parse_args()
    setup = setup_of(arguments.profile, arguments.drift)
    goal = Goal(arguments.percentile, ttft_s=arguments.ttft)
    limits = Limits(duration_s=arguments.seconds)
    lowest = PROMISED - 2 * sqrt(PROMISED * (1 - PROMISED) / arguments.further)
    broken: list[str] = []
    for name in arguments.workloads:
        workload, began_at = ALL_WORKLOADS[name], perf_counter()
        rate, most = planned_rate(setup, workload, goal, arguments.runs, arguments.seconds)
        planned_s = perf_counter() - began_at
        kept: list[float] = []
        for factor in (1.0, OVERLOAD):
            load, further = workload.with_rate(factor * rate), Runs(arguments.further, 2 * SEED)
            figures = predict(setup, load, limits, further).figures
            kept.append(sum(goal.ratio(one) <= 1.0 for one in figures) / arguments.further)
        if kept[0] < lowest:
            broken.append(name)
        print(
            f"{name}: {rate:.2f} requests/s, {rate / most:.2f} of saturation, planned in "
            f"{planned_s:.0f} s; {goal.text} in {100 * kept[0]:.0f} % of further runs, at "
            f"{OVERLOAD} times the rate in {100 * kept[1]:.0f} %",
            flush=True,
        )
    if broken:
        raise SystemExit(f"kept in less than {100 * lowest:.0f} % of the runs: {', '.join(broken)}")


if __name__ == "__main__":
    run(main)
