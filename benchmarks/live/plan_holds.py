"""Checks plans on the real server: the planned load keeps the target, 1.3 times it does not.

    headway profile "$model" -o machine.json
    python -m benchmarks.live.plan_holds "$model" machine.json [--ttft 3] [--percentile 99]
        [--drift 0.04] [--pairs 10] [--seconds 60] [--workloads "short answers,..."]
        [--rates 14.1,...]

`--ttft` is the target for a percentile of TTFT. `carried_rate` says how much load one engine
carries within it, as in `headway plan`; `--rates` has what it said before, for example on PyPy.
Then, in pairs with other requests each time, the server gets this load and 1.3 times this load. A
target near what one request takes alone cannot be checked so: the load that keeps it is far from
saturation, where a third more changes the percentile of a minute less than chance does. So it is
with few requests: the work that 300 of `chat` bring differs by 7 % from minute to minute, that of
1,000 short ones by 3 %.

A plan is for a machine whose speed differs by `--drift` from what was profiled, in the standard
deviation of its logarithm, as in `headway plan --set drift=0.04`; by default as it differed while
the profile was made. Recorded steps say how fast the machine was in a run. A pair with a run slower
or faster than in 90 % of such machines is printed and counted apart, and another pair follows, up
to three times `--pairs`. A run in which the server refuses requests has an infinite TTFT.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import dataclass
from math import inf, log

from benchmarks.live.truth import serve
from benchmarks.sim.plans import OVERLOAD, add_drift, planned_rate, profile_of, setup_of
from benchmarks.support.workloads import SHORT_WORKLOADS, WORKLOADS, parse_names
from headway.bench.steal import StealMeter, steal_text
from headway.sim.prediction.figures import Figures
from headway.sim.prediction.planning import Goal
from headway.sim.prediction.setup import Setup
from headway.workload import Synthetic

NORMAL_90 = 1.645
"""Standard deviations on either side of the middle 90 % of a normal distribution."""
MAX_TRIES = 3
SEED = 7000


@dataclass(frozen=True)
class _Pair:
    """TTFT at the planned load and at 1.3 times it, and how long steps were."""

    kept_s: float
    missed_s: float
    speeds: tuple[float, float]
    """Time of the steps by what the profile says, in both runs."""

    def is_within(self, drift: float) -> bool:
        """Return whether the machine was as fast as the plan assumed."""
        return all(abs(log(speed)) <= NORMAL_90 * drift for speed in self.speeds)

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
        _ttft_s(kept.figures, arguments.percentile),
        _ttft_s(missed.figures, arguments.percentile),
        (kept.speed(profile), missed.speed(profile)),
    )


def _ttft_s(figures: Figures, percent: int) -> float:
    """Return a percentile of TTFT; infinite if requests were refused."""
    num_failed = figures.num_requests - figures.num_completed - figures.num_refused
    if num_failed:
        raise SystemExit(f"{num_failed} of {figures.num_requests} requests failed")
    return inf if figures.num_refused else figures.ttft_s[percent]


def _check(arguments: argparse.Namespace, name: str, rate: float | None) -> list[_Pair]:
    """Print and return the pairs of a workload, at a rate that was planned or is planned here."""
    workload = (SHORT_WORKLOADS | WORKLOADS)[name]
    goal = Goal(arguments.percentile, ttft_s=arguments.ttft)
    setup: Setup = arguments.setup
    drift = setup.profile.drift
    if rate is None:
        rate, most = planned_rate(setup, workload, goal, arguments.runs, arguments.seconds)
        print(f"{name}: saturated at {most:.2f} requests/s")
    print(f"{name}: {goal.text} up to {rate:.2f} requests/s", flush=True)
    pairs: list[_Pair] = []
    for number in range(MAX_TRIES * arguments.pairs):
        meter = StealMeter()
        pair = _measure(arguments, workload, rate, SEED + 100 + number)
        pairs.append(pair)
        print(
            f"    {pair.kept_s:.3f} s at the planned load, {pair.missed_s:.3f} s at 1.3 times it: "
            f"{'holds' if pair.holds(arguments.ttft) else 'DOES NOT HOLD'}, "
            f"{steal_text(meter.read())}, steps {pair.speeds[0]:.2f} and {pair.speeds[1]:.2f} "
            f"times as long as profiled{'' if pair.is_within(drift) else ', counted apart'}",
            flush=True,
        )
        if sum(one.is_within(drift) for one in pairs) == arguments.pairs:
            return pairs
    print(f"    fewer than {arguments.pairs} pairs on the machine as planned: profile it again")
    return pairs


def _parse_rates(text: str) -> tuple[float, ...]:
    """Parse requests/s, with commas between them."""
    with suppress(ValueError):
        rates = tuple(float(rate) for rate in text.split(","))
        if all(0 < rate < inf for rate in rates):
            return rates
    raise argparse.ArgumentTypeError(f"must be numbers above 0 with commas between them: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("profile", type=profile_of)
    add_drift(parser)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ttft", type=float, default=3.0, help="target in seconds")
    parser.add_argument("--percentile", type=int, choices=(50, 95, 99), default=99)
    parser.add_argument("--runs", type=int, default=19)
    parser.add_argument("--workloads", type=parse_names, default=tuple(SHORT_WORKLOADS))
    parser.add_argument(
        "--rates", type=_parse_rates, help="requests/s planned before, one for each workload"
    )
    arguments = parser.parse_args()
    arguments.setup = setup_of(arguments.profile, arguments.drift)
    names, drift = arguments.workloads, arguments.setup.profile.drift
    rates = arguments.rates or (None,) * len(names)
    if len(rates) != len(names):
        parser.error(f"--rates has {len(rates)} numbers for {len(names)} workloads")
    pairs = [
        one
        for name, rate in zip(names, rates, strict=True)
        for one in _check(arguments, name, rate)
    ]
    for machine, chosen in (
        ("the machine as planned", [one for one in pairs if one.is_within(drift)]),
        ("a slower or faster machine", [one for one in pairs if not one.is_within(drift)]),
    ):
        num_held = sum(one.holds(arguments.ttft) for one in chosen)
        print(f"{num_held} of {len(chosen)} pairs hold on {machine}")


if __name__ == "__main__":
    main()
