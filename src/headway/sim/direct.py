"""An engine without a router: what `headway serve` is to its only engine."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from headway.core.slo.steptime import StepCost
from headway.routing import EngineLimits, NoEngineInTime, Router
from headway.routing.requests import RoutedRequest

UNBOUNDED = 2**62


class DirectRouter(Router):
    """Sends every request at once, so that only the policy of the engine orders and refuses.

    A router keeps requests that its engines have no room for, in fair order.
    """

    def __init__(self) -> None:
        super().__init__(ahead_steps=inf)

    def engine_joined(self, name: str, limits: EngineLimits, cost: StepCost | None = None) -> None:
        # Prefixes decide nothing with one engine, and would be kept without bound.
        unbounded = replace(
            limits, num_blocks=UNBOUNDED, max_num_seqs=UNBOUNDED, has_prefix_cache=False
        )
        super().engine_joined(name, unbounded, cost)

    def _judge(self, one: RoutedRequest, now: float) -> NoEngineInTime | None:
        return None
