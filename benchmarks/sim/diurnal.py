"""Scales a simulated fleet over two days, against a pool that is sized for the peak.

    python -m benchmarks.sim.diurnal [--days 2] [--peak 0.6] [--low 0.06] [--slowness 30]

Real engine cores, the real router and the real autoscaler on a virtual clock, with the step times
of a profile. Requests arrive at a rate that is lowest at midnight and highest at noon. Steps take
`--slowness` times as long as in the profile, as for a model that is as many times larger (30 times
is 4 billion parameters): the pool then has several engines at rates at which two days take minutes
to simulate. A new engine starts within the time of the profile, or within `--start-s`.

A row is one run. `within` is the share of all requests with a TTFT of at most `--ttft` seconds;
`of the peak pool` are engine hours relative to the fixed pool, which has as many engines all the
time as the first autoscaled run had at most.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from time import perf_counter

from headway.core.terms import Targets
from headway.sim.prediction.figures import summarize
from headway.sim.prediction.served import ServedLoad
from headway.sim.prediction.serving import Limits, serve_load
from headway.sim.prediction.setup import Setup
from headway.sim.profile.catalog import find_profile
from headway.sim.profile.machine import MachineProfile, StepFit
from headway.workload import Diurnal, Synthetic, Uniform

DAY_S = 86_400.0
HEADINGS = (
    "pool            start-up, s  requests  TTFT p50    p99  within  most engines  "
    "engine hours  of the peak pool  wall, s"
)


def slowed(profile: MachineProfile, factor: float) -> MachineProfile:
    """Return a profile with every step `factor` times as long."""
    fit = profile.fit
    return replace(
        profile,
        fit=StepFit(
            fit.knots,
            tuple(factor * one for one in fit.coefficients),
            tuple(tuple(factor * one for one in refit) for refit in fit.refits),
        ),
        residuals=tuple(
            replace(run, predicted_s=factor * run.predicted_s) for run in profile.residuals
        ),
    )


def row_of(
    name: str, setup: Setup, load: ServedLoad, peak_s: float, ttft_s: float, wall_s: float
) -> str:
    figures = summarize(load.requests, Targets(ttft_s=ttft_s))
    return (
        f"{name:15} {setup.profile.start_s:11.1f} {figures.num_requests:9} "
        f"{figures.ttft_s[50]:9.2f} {figures.ttft_s[99]:6.2f} {figures.good_share or 0.0:7.4f} "
        f"{load.most_engines:13} {load.engine_s / 3600:13.1f} {load.engine_s / peak_s:17.2f} "
        f"{wall_s:8.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--profile", default="smollm2-135m-2-cores")
    parser.add_argument("--days", type=float, default=2.0)
    parser.add_argument("--peak", type=float, default=0.6, help="requests per second at noon")
    parser.add_argument("--low", type=float, default=0.06, help="requests per second at midnight")
    parser.add_argument("--slowness", type=float, default=30.0)
    parser.add_argument("--ttft", type=float, default=15.0, help="target in seconds")
    parser.add_argument("--start-s", type=float, nargs="*", default=[120.0])
    parser.add_argument("--most", type=int, default=16, help="most engines")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    base = Setup.of(slowed(find_profile(arguments.profile), arguments.slowness))
    setup = replace(base, max_engines=arguments.most)
    arrivals = Diurnal(arguments.peak, arguments.low, DAY_S)
    workload = Synthetic(arrivals, Uniform(32, 480), Uniform(16, 112))
    limits = Limits(duration_s=arguments.days * DAY_S)
    print(HEADINGS, flush=True)

    def run(setup: Setup) -> tuple[ServedLoad, float]:
        began_at = perf_counter()
        load = serve_load(setup, workload, limits, arguments.seed, arguments.seed)
        return load, perf_counter() - began_at

    scaled, wall_s = run(setup)
    peak_s = scaled.most_engines * scaled.span_s
    print(row_of("autoscaled", setup, scaled, peak_s, arguments.ttft, wall_s), flush=True)
    fixed = setup.fixed(scaled.most_engines)
    load, wall_s = run(fixed)
    print(row_of("peak-sized", fixed, load, peak_s, arguments.ttft, wall_s), flush=True)
    for start_s in arguments.start_s:
        slower = replace(setup, profile=replace(setup.profile, start_s=start_s))
        load, wall_s = run(slower)
        print(row_of("autoscaled", slower, load, peak_s, arguments.ttft, wall_s), flush=True)


if __name__ == "__main__":
    main()
