"""Measures the simulator: a million requests over a thousand engines, of which some are killed.

    python -m benchmarks.sim.million [--requests 1000000] [--engines 1000] [--loads 0.3 0.7 1.1]

Real engine cores, real frontends and the real router process on a virtual clock, with the step
times of a profile. With `--frontends 1` the frontend has a router of its own. A load is relative to
what the engines can serve. Every 10 s an engine is killed, and another one starts. Prints minutes,
the most memory of the process, simulated steps, and requests that were lost. With PyPy, of a clone:

    export PYTHONPATH=src:. PYPY_GC_NURSERY=1G PYPY_GC_MAJOR_COLLECT=1.4
    export GLIBC_TUNABLES=glibc.malloc.hugetlb=1
    pypy3 -m benchmarks.sim.million --loads 0.7
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import perf_counter, process_time

from benchmarks.support.arguments import at_least_one, run
from headway.fleet.router.simulated import SharedFrontends
from headway.sim.prediction.figures import Runs, summarize
from headway.sim.prediction.serving import Limits, serve_load
from headway.sim.prediction.setup import Setup
from headway.sim.prediction.verdict import saturated_rate
from headway.sim.profile.catalog import find_profile
from headway.workload import Poisson, Synthetic, Uniform, WorkItem

PROMPTS, OUTPUTS = Uniform(16, 240), Uniform(8, 56)


@dataclass(frozen=True, slots=True)
class Watched(Synthetic):
    """A workload that says how far it is, twenty times."""

    num_requests: int = 1

    def items(self, seed: int) -> Iterator[WorkItem]:
        began_at, every = perf_counter(), max(1, self.num_requests // 20)
        for number, item in enumerate(Synthetic.items(self, seed)):
            if number % every == 0 and number:
                minutes = (perf_counter() - began_at) / 60
                text = f"  {number / self.num_requests:.0%} sent after {minutes:.1f} minutes"
                print(text, file=sys.stderr, flush=True)
            yield item


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--profile", default="smollm2-135m-2-cores")
    parser.add_argument("--requests", type=at_least_one, default=1_000_000)
    parser.add_argument("--engines", type=at_least_one, default=1000)
    parser.add_argument("--frontends", type=at_least_one, default=4)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.7, 1.1])
    parser.add_argument("--kill-every", type=float, default=10.0)
    arguments = parser.parse_args()
    one = Setup.of(find_profile(arguments.profile))
    workload = Synthetic(Poisson(1.0), PROMPTS, OUTPUTS)
    most = arguments.engines * saturated_rate(one, workload, Runs(3)).middle
    num_frontends = arguments.frontends
    setup = replace(
        one,
        num_engines=arguments.engines,
        make_frontends=partial(SharedFrontends.make, num_frontends) if num_frontends > 1 else None,
        kill_every_s=arguments.kill_every,
    )
    print(f"{arguments.engines} engines can serve {most:.0f} requests/s", flush=True)
    for load in arguments.loads:
        began_at, cpu_began_at = perf_counter(), process_time()
        num_requests = arguments.requests
        sent = Watched(Poisson(load * most), PROMPTS, OUTPUTS, num_requests=num_requests)
        served = serve_load(setup, sent, Limits(num_requests))
        minutes = (perf_counter() - began_at) / 60
        cpu_minutes = (process_time() - cpu_began_at) / 60
        memory_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        figures = summarize(served.requests)
        num_lost = sum(not (one.finished_at or one.is_refused) for one in served.requests)
        span_s = max(one.finished_at or -inf for one in served.requests)
        print(
            f"load {load:g}: {minutes:.1f} minutes ({cpu_minutes:.1f} of CPU), {memory_gb:.1f} GB, "
            f"{served.num_steps:,} steps ({60e3 * cpu_minutes / served.num_steps:.3f} ms each), "
            f"{span_s:.0f} simulated s, "
            f"{served.num_kills} kills, {num_lost} requests lost; TTFT p50 "
            f"{1e3 * figures.ttft_s[50]:.0f}, p99 {1e3 * figures.ttft_s[99]:.0f} ms",
            flush=True,
        )
        del served, figures
        gc.collect()


if __name__ == "__main__":
    run(main)
