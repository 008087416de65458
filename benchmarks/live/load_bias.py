"""Tells what a profile misses of a load from what the machine changes meanwhile.

    headway profile "$model" -o machine.json
    python -m benchmarks.live.load_bias "$model" machine.json [--rounds 4] [--seconds 15]
        [--share 0.8] [--workloads "short answers,..."]

Loads take turns on one server, in another order in each round: closed loops as `headway profile`
has them, and workloads at a share of what the profile says is the most. Printed is the slowness of
each: how many times as long as profiled its steps took. Between rounds it differs with the speed of
the machine. What a load has beside the others of its round, in the median over the rounds, is an
error of the profile.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from math import inf
from pathlib import Path
from statistics import fmean, median

from benchmarks.sim.plans import profile_of
from benchmarks.support.arguments import at_least_one, run
from benchmarks.support.workloads import (
    ALL_WORKLOADS,
    LABEL_WORKLOADS,
    SHORT_WORKLOADS,
    parse_names,
)
from headway.bench.load.measure import name_model
from headway.bench.load.openai import Target
from headway.bench.load.own_server import OwnServer
from headway.bench.load.runner import LoadRun, RunLimits, run_load
from headway.cli.capacity.profile import OUTPUTS, PROMPTS, steps_in
from headway.record.reader import find_recordings
from headway.sim.prediction.figures import Runs
from headway.sim.prediction.setup import Setup
from headway.sim.prediction.verdict import saturated_rate
from headway.sim.profile.slowness import measure_slowness
from headway.sim.recording.observed import read_observed
from headway.workload import ClosedLoop, Synthetic

NUM_CLIENTS = (8, 48)
NUM_WARM_UP = 8
SEED = 1000


async def _send(
    server: OwnServer, loads: list[Synthetic], rounds: int, seconds: float
) -> list[list[LoadRun]]:
    """Serve every load in every round, in another order each time."""
    target = Target(server.origin, await name_model(server.origin, (), None))
    await run_load(target, loads[0], RunLimits(NUM_WARM_UP), SEED)
    found: list[list[LoadRun]] = []
    for number in range(rounds):
        runs: dict[int, LoadRun] = {}
        for at in random.Random(number).sample(range(len(loads)), len(loads)):
            limits = RunLimits(duration_s=seconds)
            runs[at] = await run_load(target, loads[at], limits, SEED + 100 * number + at)
        found.append([runs[at] for at in range(len(loads))])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("profile", type=profile_of)
    parser.add_argument("--rounds", type=at_least_one, default=4)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument(
        "--workloads", type=parse_names, default=(*SHORT_WORKLOADS, *LABEL_WORKLOADS)
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1 or not all(0 < x < inf for x in (arguments.seconds, arguments.share)):
        parser.error("--rounds must be at least 1, --seconds and --share above 0 and finite")
    setup = Setup.of(arguments.profile)
    loads = {
        f"{number} clients": Synthetic(ClosedLoop(number), PROMPTS, OUTPUTS)
        for number in NUM_CLIENTS
    }
    for name in arguments.workloads:
        workload = ALL_WORKLOADS[name]
        rate = arguments.share * saturated_rate(setup, workload, Runs(1, SEED)).middle
        loads[f"{name}, {rate:.1f} requests/s"] = workload.with_rate(rate)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = OwnServer.start(arguments.model, folder, ["--record", str(folder)])
        try:
            sending = _send(server, list(loads.values()), arguments.rounds, arguments.seconds)
            rounds = asyncio.run(sending)
        finally:
            server.stop()
        (found,) = find_recordings([folder])
        observed = read_observed(found)
    slowness = [
        [measure_slowness(steps_in(observed, run), arguments.profile).total for run in runs]
        for runs in rounds
    ]
    usual = [fmean(of_round) for of_round in slowness]
    print(f"{'rounds':40} {'':8}  " + "  ".join(f"{one:.2f}" for one in usual))
    for at, name in enumerate(loads):
        of_load = [of_round[at] for of_round in slowness]
        bias = median(one / mean for one, mean in zip(of_load, usual, strict=True)) - 1.0
        print(f"{name:40} {100 * bias:+6.1f} %  " + "  ".join(f"{one:.2f}" for one in of_load))


if __name__ == "__main__":
    run(main)
