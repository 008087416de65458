"""A virtual engine over the fake executor, with the invariants checked as it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from headway.config import SchedulerConfig
from headway.core import invariants
from headway.core.events import Event
from headway.core.executor import Capacity
from headway.core.plan import StepPlan
from headway.core.slo.steptime import StepCost
from headway.executors.fake import FakeExecutor
from headway.sim import StepProfile, TimedExecutor, VirtualEngine

BLOCK_SIZE = 16
PROFILE = StepProfile(StepCost(0.008, 0.35e-3, 0.26e-3, 0.0, 0.0))


def make_engine(
    num_blocks: int, sink: Callable[[Sequence[Event]], None], **settings: Any
) -> VirtualEngine:
    """An engine whose steps take about as long as on a small model."""
    fake = FakeExecutor(Capacity(num_blocks, BLOCK_SIZE, 4096))
    engine = VirtualEngine(SchedulerConfig(**settings), TimedExecutor(fake, PROFILE), sink)
    numbers = count(1)

    def check_now_and_then(_plan: StepPlan) -> None:
        if next(numbers) % 64 == 0:
            invariants.check(engine.scheduler)

    engine.on_planned = lambda plan: invariants.check_plan(engine.scheduler, plan)
    engine.on_step = check_now_and_then
    return engine
