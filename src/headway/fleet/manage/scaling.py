"""Scales one pool by what its frontends need."""

from __future__ import annotations

from collections.abc import Sequence

from headway.fleet.manage.messages import FleetNeed
from headway.fleet.manage.spec import EnginesSpec
from headway.routing.autoscale import Autoscaler, FleetDemand, total_need


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
