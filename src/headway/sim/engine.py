"""One engine on a virtual clock, with scheduled arrivals and aborts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf

from headway.clock import VirtualClock
from headway.config import SchedulerConfig
from headway.core.engine import EngineCore
from headway.core.events import Event
from headway.core.plan import StepPlan
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.sim.steps import TimedExecutor


class VirtualEngine:
    """EngineCore on a clock that advances by the duration of each step.

    As in the server, a request that arrives during a step passes `may_join` on arrival and is added
    to the engine when the step ends.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        executor: TimedExecutor,
        sink: Callable[[Sequence[Event]], None],
        enable_prefix_caching: bool = True,
    ) -> None:
        self.clock = VirtualClock()
        self.executor = executor
        self.scheduler = Scheduler(config, executor.capacity(), enable_prefix_caching)
        self.core = EngineCore(self.scheduler, executor, self.clock, sink)
        self.may_join: Callable[[Request], bool] = lambda _request: True
        """Called when a request arrives; False drops the request."""
        self.on_planned: Callable[[StepPlan], None] = lambda _plan: None
        self.on_step: Callable[[StepPlan], None] = lambda _plan: None
        """Called after each step, when its events were emitted."""
        self._order = count()
        self._arrivals: list[tuple[float, int, Request]] = []
        self._aborts: list[tuple[float, str]] = []
        self._joining: list[Request] = []

    def send(self, requests: Iterable[Request], aborts: Iterable[tuple[float, str]] = ()) -> None:
        """Schedule requests to arrive at `arrived_at`, and aborts as (time, request id)."""
        for request in requests:
            heappush(self._arrivals, (request.arrived_at, next(self._order), request))
        for abort in aborts:
            heappush(self._aborts, abort)

    @property
    def num_queued(self) -> int:
        return len(self.scheduler.waiting) + len(self._joining)

    def run(self, until_s: float = inf, drain: bool = True) -> None:
        """Serve requests that arrive before `until_s`; with `drain`, until all finished."""
        while self.clock.now() < until_s or (drain and self.core.has_work):
            if self.clock.now() >= until_s:
                self._arrivals.clear()
            if self.step() is None:
                if not self._arrivals:
                    if self.core.has_work:
                        continue  # the core ends a stall with an error
                    return
                at = max(self.clock.now(), self._arrivals[0][0])
                self.clock.advance_to(min(at, until_s))

    def step(self) -> StepPlan | None:
        """Add arrived requests and run one step; return None without work."""
        self._add_arrived()
        began_at = self.clock.now()
        plan = self.core.begin_step()
        if plan is None:
            return None
        self.on_planned(plan)
        ends_at = began_at + self.executor.step_s
        self._arrive_until(ends_at)
        self.clock.advance_to(ends_at)
        self.core.end_step()
        self.on_step(plan)
        return plan

    def _add_arrived(self) -> None:
        now = self.clock.now()
        self._arrive_until(now)
        for request in self._joining:
            self.core.add(request)
        self._joining.clear()
        while self._aborts and self._aborts[0][0] <= now:
            self.core.abort(heappop(self._aborts)[1])

    def _arrive_until(self, at: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= at:
            arrived_at, _, request = heappop(self._arrivals)
            self.clock.advance_to(max(self.clock.now(), arrived_at))
            if self.may_join(request):
                self._joining.append(request)
