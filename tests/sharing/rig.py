"""An engine on a virtual clock whose steps take about as long as on a small model, with requests
that come and leave at given times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from headway.clock import VirtualClock
from headway.config import SchedulerConfig
from headway.core import invariants
from headway.core.engine import EngineCore
from headway.core.events import Event
from headway.core.executor import Capacity
from headway.core.plan import StepPlan
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.executors.fake import FakeExecutor

BLOCK_SIZE = 16


def step_s(plan: StepPlan) -> float:
    """What a step takes: a constant, and something for every request and prompt token."""
    num_prefill = plan.num_tokens - len(plan.scheduled)
    return 0.008 + 0.35e-3 * len(plan.scheduled) + 0.26e-3 * num_prefill


class TimedEngine:
    """EngineCore over the fake executor. What comes during a step is known when it has ended, as
    in the server."""

    def __init__(self, num_blocks: int, sink: Callable[[Sequence[Event]], None], **settings: Any):
        capacity = Capacity(num_blocks, BLOCK_SIZE, 4096)
        self.clock = VirtualClock()
        self.scheduler = Scheduler(SchedulerConfig(**settings), capacity)
        self.core = EngineCore(self.scheduler, FakeExecutor(capacity), self.clock, sink)
        self.plans: list[StepPlan] = []
        self._arrivals: deque[Request] = deque()
        self._aborts: deque[tuple[float, str]] = deque()

    def send(self, requests: Iterable[Request], aborts: Iterable[tuple[float, str]] = ()) -> None:
        """These will come when it is time, and some of them leave early."""
        self._arrivals.extend(sorted(requests, key=lambda request: request.arrived_at))
        self._aborts.extend(sorted(aborts))

    def step(self) -> StepPlan | None:
        """Take in what has come, and one step; None if there is nothing to do at this time."""
        now = self.clock.now()
        while self._arrivals and self._arrivals[0].arrived_at <= now:
            self.core.add(self._arrivals.popleft())
        while self._aborts and self._aborts[0][0] <= now:
            self.core.abort(self._aborts.popleft()[1])
        plan = self.core.begin_step()
        if plan is not None:
            invariants.check_plan(self.scheduler, plan)
            self.clock.advance_to(now + step_s(plan))
            self.core.end_step()
            self.plans.append(plan)
        return plan

    def run(self, until_s: float = float("inf")) -> None:
        """Until then, or until everybody has come and gone."""
        while self.clock.now() < until_s and (self._arrivals or self.core.has_work):
            if self.step() is None and not self.core.has_work:
                if not self._arrivals:
                    return
                self.clock.advance_to(max(self.clock.now(), self._arrivals[0].arrived_at))
            if len(self.plans) % 64 == 0:
                invariants.check(self.scheduler)
