"""Scales the pools of a fleet by what their frontends need."""

from __future__ import annotations

from collections.abc import Sequence

from headway.fleet.manage.members import FleetState
from headway.fleet.manage.messages import FleetNeed
from headway.fleet.manage.spec import EnginesSpec
from headway.routing.autoscale import (
    Autoscaler,
    FleetDemand,
    PoolNeed,
    share_engines,
    total_need,
)


class PoolScaler:
    """The need of a pool, and the engines that follow from it."""

    def __init__(self) -> None:
        self.need = 0.0
        """Engines that the work of all frontends needs, not rounded."""
        self._autoscaler = Autoscaler()

    def decide(
        self, needs: Sequence[FleetNeed], current: int, engines: EnginesSpec, now: float
    ) -> int:
        """Return how many engines the pool should have.

        Without a report of a frontend nothing is known, so nothing changes.
        """
        if not needs:
            return current
        demands = [
            FleetDemand(one.work_rate, one.backlog_s, one.ttft_s, one.speed) for one in needs
        ]
        self.need = total_need(demands)
        return self._autoscaler.decide(self.need, current, engines.min, engines.most, now)


class FleetScaler:
    """Sets the engines of every pool; moves them between pools where they are limited."""

    def __init__(self, pool_names: Sequence[str]) -> None:
        self._scalers = {name: PoolScaler() for name in pool_names}

    def need_of(self, pool: str) -> float:
        """Return the engines that the work of a pool needs, not rounded."""
        return self._scalers[pool].need

    def set_targets(self, state: FleetState, now: float) -> None:
        """Set how many engines each pool should have."""
        pools: dict[str, PoolNeed] = {}
        for pool in state.spec.pools:
            scaler, current = self._scalers[pool.name], state.targets[pool.name]
            reports = state.needs_of(pool.name, now)
            wanted = scaler.decide([one.need for one in reports], current, pool.engines, now)
            least = pool.engines.min
            if pool.name in state.fixed or not reports:
                wanted = least = current
            pools[pool.name] = PoolNeed(scaler.need, wanted, least, current)
        if state.is_ending:
            return
        most = state.spec.max_engines
        if most is None:
            state.targets.update({name: pool.wanted for name, pool in pools.items()})
        else:
            state.targets.update(share_engines(pools, most))
