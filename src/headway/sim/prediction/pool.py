"""The engines of a simulated load: started, drained and killed, and counted.

The autoscaler is that of a fleet, with the demand of all routers. A new engine takes the start-up
time of the profile, and costs from the order to start it.
"""

from __future__ import annotations

import random
from itertools import repeat

from headway.core.slo.steptime import StepShape
from headway.routing import RULES, Router
from headway.routing.autoscale import Autoscaler, total_need
from headway.sim.direct import DirectRouter
from headway.sim.fleet import DELAY_S, VirtualFleet
from headway.sim.prediction.served import ServedLoad
from headway.sim.prediction.setup import Setup
from headway.sim.profile.machine import MeasuredTimes
from headway.sim.steps import DrawStep, StepTime

SCALE_S = 1.0
"""Seconds between two decisions of the autoscaler."""


class _CountedTimes:
    """Step times of a profile that count steps beyond it."""

    def __init__(self, times: MeasuredTimes, load: ServedLoad) -> None:
        self._times = times
        self._load = load

    def start(self, rng: random.Random) -> DrawStep:
        draw, profile, load = self._times.start(rng), self._times.profile, self._load

        def counted(shape: StepShape, num_ended: int) -> StepTime:
            load.num_steps += 1
            load.num_extrapolated += profile.is_beyond(shape)
            return draw(shape, num_ended)

        return counted


class EnginePool:
    """A fleet, and who changes its number of engines."""

    def __init__(self, setup: Setup, served: ServedLoad, machine_seed: int | None) -> None:
        """Start the first engines; without a seed, all have the expected speed."""
        self._setup = setup
        self._served = served
        self._rng = random.Random(f"pool/{machine_seed}")
        machines = random.Random(f"machines/{machine_seed}")
        self._engines = (
            repeat(setup.profile.expected())
            if machine_seed is None
            else setup.profile.engines(machines)
        )
        self._scaler = Autoscaler()
        self._starting: list[int] = []
        """Numbers of the engines that start."""
        self._num_paid, self._counted_at = setup.num_engines, 0.0
        self._is_over = False
        self.fleet = self._make_fleet(machine_seed or 0)
        self.fleet.on_leave = self._count
        served.most_engines = setup.num_engines

    def _make_fleet(self, machine_seed: int) -> VirtualFleet:
        setup = self._setup
        times = [self._draw_times() for _ in range(setup.num_engines)]
        if setup.is_alone:
            return VirtualFleet([DirectRouter()], times, setup.spec, machine_seed, delay_s=0.0)
        if setup.make_frontends is None:
            router = Router(RULES[setup.rule]())
            return VirtualFleet([router], times, setup.spec, machine_seed, DELAY_S)
        frontends = setup.make_frontends(setup.rule)
        fleet = VirtualFleet(frontends.routers, times, setup.spec, machine_seed, DELAY_S)
        frontends.connect(fleet)
        return fleet

    def _draw_times(self) -> _CountedTimes:
        return _CountedTimes(next(self._engines), self._served)

    def start(self) -> None:
        """Begin to kill engines and to scale."""
        if self._setup.kill_every_s is not None:
            self.fleet.at(self._setup.kill_every_s, self._kill, self._setup.kill_every_s)
        if self._setup.max_engines is not None:
            self.fleet.at(SCALE_S, self._scale, self._setup.max_engines)

    def end(self) -> None:
        """End with the load: nothing changes or costs any more."""
        if not self._is_over:
            self._count()
            self._served.span_s = self.fleet.clock.now()
            self._is_over = True

    def _kill(self, every_s: float) -> None:
        """Kill an engine; another one starts."""
        if self._is_over:
            return
        if live := self.fleet.live_engines:
            self._served.num_kills += 1
            self.fleet.kill_engine(self._rng.choice(live))
            self._order_engine()
        self.fleet.at(self.fleet.clock.now() + every_s, self._kill, every_s)

    def _scale(self, max_engines: int) -> None:
        """Have as many engines as the autoscaler says."""
        fleet, now = self.fleet, self.fleet.clock.now()
        if self._is_over:
            return
        current = fleet.num_engines + len(self._starting)
        need = total_need([router.demand(now) for router in fleet.routers])
        wanted = self._scaler.decide(need, current, self._setup.num_engines, max_engines, now)
        for _ in range(wanted - current):
            self._order_engine()
        for _ in range(current - wanted):
            self._drop_engine()
        fleet.at(now + SCALE_S, self._scale, max_engines)

    def _order_engine(self) -> None:
        served, now = self._served, self.fleet.clock.now()
        served.num_starts += 1
        self._starting.append(served.num_starts)
        self._count()
        served.most_engines = max(served.most_engines, self._num_paid)
        self.fleet.at(now + self._setup.profile.start_s, self._join, served.num_starts)

    def _drop_engine(self) -> None:
        """Give up an engine that starts; without one, drain the newest."""
        if self._starting:
            self._starting.pop()
            self._count()
        else:
            self.fleet.drain_engine()

    def _join(self, number: int) -> None:
        if number in self._starting and not self._is_over:
            self._starting.remove(number)
            self.fleet.add_engine(self._draw_times())
            self.fleet.tick()

    def _count(self) -> None:
        """Add the engine seconds since the last change of their number."""
        if self._is_over:
            return
        now = self.fleet.clock.now()
        self._served.engine_s += self._num_paid * (now - self._counted_at)
        self._num_paid, self._counted_at = self.fleet.num_present + len(self._starting), now
