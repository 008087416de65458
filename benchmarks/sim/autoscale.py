"""Scales a simulated fleet by its work, and by the number of its requests, as others do.

    python -m benchmarks.sim.autoscale [--minutes 60] [--peak 40] [--start-s 8] [--seeds 2]

Real schedulers, a real router and the real autoscaler on a virtual clock. The load rises from none
to its peak and falls again, twice; in the second half prompts are four times as long, and requests
as rare. A new engine takes `--start-s` to start. Rules:

    work      the autoscaler of a fleet: arriving work, backlog, target
    requests  as many engines as requests in the fleet over `--target` (Ray Serve, KEDA): measured
              over 30 s, the same steps down
    fixed     always as many engines as `work` had at most

TTFT is in seconds over all requests; cost is the sum of engine minutes.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from functools import partial
from math import ceil, sin

from benchmarks.sim.routing import CAPACITY, CONFIG
from headway.percentiles import percentile_if_any
from headway.routing import Router
from headway.routing.autoscale import Autoscaler
from headway.sim import SMOLLM2_135M
from headway.sim.fleet import EngineSpec, FleetRecord, VirtualFleet

TICK_S = 1.0
MAX_ENGINES = 16
LOOK_BACK_S = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run measured."""

    rule: str
    num_requests: int
    ttft_p50_s: float
    ttft_p99_s: float
    within_1_s: float
    most_engines: int
    engine_minutes: float


class ScaledFleet:
    """A virtual fleet, and a rule that changes its number of engines every second."""

    def __init__(self, arguments: argparse.Namespace, rule: str, seed: int, fixed: int) -> None:
        self._rule = rule
        self._start_s = arguments.start_s
        self._target = arguments.target
        self._until_s = 60.0 * arguments.minutes
        first = [SMOLLM2_135M] * max(1, fixed)
        self.fleet = VirtualFleet([Router()], first, EngineSpec(CONFIG, CAPACITY), seed)
        self._scaler = Autoscaler()
        self._num_starting = 0
        self._loads: list[float] = []
        self.most_engines = len(first)
        self.engine_s = 0.0
        self._send(random.Random(f"autoscale/{seed}"), arguments.peak)
        self.fleet.at(TICK_S, self._tick)

    def _send(self, draw: random.Random, peak: float) -> None:
        at, number = 0.0, 0
        while True:
            at += draw.expovariate(peak)
            if at >= self._until_s:
                return
            is_late = at > self._until_s / 2
            share = sin(2 * 3.1416 * at / self._until_s) ** 2
            if draw.random() > share / (4 if is_late else 1):
                continue
            number += 1
            length = int((1024 if is_late else 256) * draw.lognormvariate(0.0, 0.6))
            prompt = [10_000 + number] * min(2048, max(16, length))
            num_output = min(256, max(4, int(48 * draw.lognormvariate(0.0, 0.6))))
            self.fleet.send(FleetRecord(f"r{number}", prompt, num_output, arrived_at=at))

    def _tick(self) -> None:
        fleet, now = self.fleet, self.fleet.clock.now()
        current = fleet.num_engines + self._num_starting
        wanted = self._wanted(current, now)
        for _ in range(wanted - current):
            self._num_starting += 1
            fleet.at(now + self._start_s, self._join)
        for _ in range(current - wanted):
            fleet.drain_engine()
        self.most_engines = max(self.most_engines, wanted)
        self.engine_s += TICK_S * (fleet.num_present + self._num_starting)
        if now < self._until_s:
            fleet.at(now + TICK_S, self._tick)

    def _join(self) -> None:
        self._num_starting -= 1
        self.fleet.add_engine(SMOLLM2_135M)

    def _wanted(self, current: int, now: float) -> int:
        router = self.fleet.routers[0]
        if self._rule == "work":
            return self._scaler.decide(router.demand(now).need, current, 1, MAX_ENGINES, now)
        if self._rule == "requests":
            num_sent = sum(len(engine.sent) for engine in router.engines)
            self._loads.append(num_sent + router.num_waiting)
            recent = self._loads[-int(LOOK_BACK_S / TICK_S) :]
            need = sum(recent) / len(recent) / self._target
            return self._scaler.decide(need, current, 1, MAX_ENGINES, now)
        return current

    def run(self) -> Outcome:
        self.fleet.run(end := self._until_s + 120.0)
        # A request that had no token by the end counts with the time it has waited.
        times = [
            end - one.arrived_at if one.ttft_s is None else one.ttft_s
            for one in self.fleet.records.values()
        ]
        return Outcome(
            self._rule,
            len(self.fleet.records),
            percentile_if_any(times, 50) or 0.0,
            percentile_if_any(times, 99) or 0.0,
            sum(1 for one in times if one <= 1.0) / max(1, len(self.fleet.records)),
            self.most_engines,
            self.engine_s / 60.0,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--peak", type=float, default=40.0, help="most requests per second")
    parser.add_argument("--start-s", type=float, default=8.0)
    parser.add_argument("--target", type=float, default=8.0, help="requests per engine")
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    print("rule      seed  requests  TTFT p50   p99  within 1 s  most engines  engine minutes")
    for seed in range(arguments.seeds):
        run = partial(ScaledFleet, arguments)
        work = run("work", seed, 0).run()
        for one in (
            work,
            run("requests", seed, 0).run(),
            run("fixed", seed, work.most_engines).run(),
        ):
            print(
                f"{one.rule:9} {seed:4} {one.num_requests:9} {one.ttft_p50_s:9.2f} "
                f"{one.ttft_p99_s:5.2f} {one.within_1_s:11.3f} {one.most_engines:13} "
                f"{ceil(one.engine_minutes):15}",
                flush=True,
            )


if __name__ == "__main__":
    main()
