"""Checks plans on the real server: the planned load keeps the target, 1.3 times it does not.

    headway profile "$model" -o machine.json
    python -m benchmarks.live.plan_holds "$model" machine.json [--ttft 3] [--percentile 99]
        [--drift 0.04] [--pairs 10] [--seconds 60] [--workloads "labels,..."]
        [--rates 14.1,...]

`--ttft` is the target for a percentile of TTFT. `carried_rate` says how much load one engine
carries within it, as in `headway plan`; `--rates` has what it said before, for example on PyPy.
Then, in pairs with other requests each time, the server gets this load and 1.3 times this load. A
target near what one request takes alone cannot be checked so: the load that keeps it is far from
saturation, where a third more changes the percentile of a minute less than chance does. So it is
with few requests: the work that 300 of `chat` bring differs by 7 % from minute to minute, that of
1,000 short ones by 3 %. Hence the default workloads, of many requests with a few tokens each.

A machine that others share changes its speed from minute to minute, and with it what it carries.
Recorded steps say how slow it was in a run: how many times as long as profiled they took. Each run
has the planned load divided by the slowness of the run before (`--fixed`: the planned load). A plan
is for a machine whose speed differs by `--drift` from what is assumed, in the standard deviation of
its logarithm, as in `headway plan --set drift=0.04`; by default as it differed while the profile
was made. A pair with a run slower or faster than in 90 % of such machines is counted apart,
whatever its TTFT, and another one follows, up to three times `--pairs`. If its first run is that
already, the pair has no second run. A run in which the server refuses requests has an infinite
TTFT.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import dataclass
from math import inf, log

from benchmarks.live.truth import serve
from benchmarks.sim.plans import OVERLOAD, add_drift, planned_rate, profile_of, setup_of
from benchmarks.support.arguments import at_least_one, run
from benchmarks.support.workloads import ALL_WORKLOADS, LABEL_WORKLOADS, parse_names
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
class _Run:
    """TTFT of one run, and how long its steps were."""

    ttft_s: float
    slowness: float
    """Time of the steps by what the profile says."""
    assumed: float
    """The slowness for which the load was set."""

    def is_within(self, drift: float) -> bool:
        """Return whether the machine was as fast as assumed."""
        return abs(log(self.slowness / self.assumed)) <= NORMAL_90 * drift

    @property
    def text(self) -> str:
        """The run in words."""
        return f"{self.ttft_s:.3f} s (slowness {self.slowness:.2f}, assumed {self.assumed:.2f})"


@dataclass(frozen=True)
class _Pair:
    """A run at the planned load, and one at 1.3 times it."""

    planned: _Run
    over: _Run | None
    """None if the machine was slower or faster than assumed in the first run."""

    def is_within(self, drift: float) -> bool:
        """Return whether the machine was as fast as assumed in both runs."""
        return self.over is not None and all(
            run.is_within(drift) for run in (self.planned, self.over)
        )

    def holds(self, ttft_s: float) -> bool:
        """Return whether the target is kept at the planned load alone."""
        return self.over is not None and self.planned.ttft_s <= ttft_s < self.over.ttft_s

    def describe(self, ttft_s: float, drift: float) -> str:
        """Return what was seen, in words."""
        text = f"{self.planned.text} at the planned load"
        if self.over is None:
            return f"{text}: counted apart"
        verdict = "holds" if self.holds(ttft_s) else "DOES NOT HOLD"
        text += f", {self.over.text} at {OVERLOAD} times it: {verdict}"
        return text if self.is_within(drift) else f"{text}, counted apart"


def _ttft_s(figures: Figures, percent: int) -> float:
    """Return a percentile of TTFT; infinite if requests were refused."""
    num_failed = figures.num_requests - figures.num_completed - figures.num_refused
    if num_failed:
        raise SystemExit(f"{num_failed} of {figures.num_requests} requests failed")
    return inf if figures.num_refused else figures.ttft_s[percent]


@dataclass(slots=True)
class _Checks:
    """Pairs on the real server, and how fast the machine was in the last run."""

    arguments: argparse.Namespace
    slowness: float = 1.0
    """That of the last run; the next one has a load for it."""

    @property
    def setup(self) -> Setup:
        return self.arguments.setup

    @property
    def drift(self) -> float:
        return self.setup.profile.drift

    def check(self, name: str, rate: float | None) -> list[_Pair]:
        """Print and return the pairs of a workload, at a rate planned before or planned here."""
        arguments, workload = self.arguments, ALL_WORKLOADS[name]
        goal = Goal(arguments.percentile, ttft_s=arguments.ttft)
        if rate is None:
            rate, most = planned_rate(self.setup, workload, goal, arguments.runs, arguments.seconds)
            print(f"{name}: saturated at {most:.2f} requests/s")
        print(f"{name}: {goal.text} up to {rate:.2f} requests/s", flush=True)
        pairs: list[_Pair] = []
        for number in range(MAX_TRIES * arguments.pairs):
            meter = StealMeter()
            pairs.append(self._measure(workload, rate, SEED + 100 + number))
            about = pairs[-1].describe(arguments.ttft, self.drift)
            print(f"    {about}, {steal_text(meter.read())}", flush=True)
            if sum(one.is_within(self.drift) for one in pairs) == arguments.pairs:
                return pairs
        print(f"    fewer than {arguments.pairs} pairs on the machine as planned: profile it again")
        return pairs

    def _measure(self, workload: Synthetic, rate: float, seed: int) -> _Pair:
        """Serve the planned load, and 1.3 times it if the machine was as fast as assumed."""
        planned = self._run(workload, rate, seed)
        is_usual = planned.is_within(self.drift)
        return _Pair(planned, self._run(workload, OVERLOAD * rate, seed) if is_usual else None)

    def _run(self, workload: Synthetic, rate: float, seed: int) -> _Run:
        arguments, assumed = self.arguments, self.slowness
        load = workload.with_rate(rate / assumed)
        served = serve(arguments.model, (), load, arguments.seconds, seed)
        slowness = served.slowness(arguments.profile)
        if not arguments.fixed:
            self.slowness = slowness
        return _Run(_ttft_s(served.figures, arguments.percentile), slowness, assumed)


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
    parser.add_argument("--pairs", type=at_least_one, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ttft", type=float, default=3.0, help="target in seconds")
    parser.add_argument("--percentile", type=int, choices=(50, 95, 99), default=99)
    parser.add_argument("--runs", type=at_least_one, default=19)
    parser.add_argument(
        "--fixed", action="store_true", help="serve the planned load however fast the machine is"
    )
    parser.add_argument("--workloads", type=parse_names, default=tuple(LABEL_WORKLOADS))
    parser.add_argument(
        "--rates", type=_parse_rates, help="requests/s planned before, one for each workload"
    )
    arguments = parser.parse_args()
    arguments.setup = setup_of(arguments.profile, arguments.drift)
    names = arguments.workloads
    rates = arguments.rates or (None,) * len(names)
    if len(rates) != len(names):
        parser.error(f"--rates has {len(rates)} numbers for {len(names)} workloads")
    checks = _Checks(arguments)
    for name, rate in zip(names, rates, strict=True):
        pairs = checks.check(name, rate)
        within = [one for one in pairs if one.is_within(checks.drift)]
        apart = [one for one in pairs if not one.is_within(checks.drift)]
        num_held = sum(one.holds(arguments.ttft) for one in within)
        num_kept = sum(one.planned.ttft_s <= arguments.ttft for one in apart)
        print(
            f"{name}: {num_held} of {len(within)} pairs hold on the machine as planned; "
            f"{len(apart)} are counted apart, of which {num_kept} keep the target as planned",
            flush=True,
        )


if __name__ == "__main__":
    run(main)
