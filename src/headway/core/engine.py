"""The engine core: a scheduler and an executor, one step at a time.

A server calls `step`. A simulator calls `begin_step` at time t and `end_step` at t + cost. Requests
may be added and aborted between the two calls.
"""

from __future__ import annotations

from math import inf

from headway.clock import Clock
from headway.core.events import Idled, Sink, Stepped
from headway.core.executor import BlockRecorder, Executor, Ticket
from headway.core.owners import BlockOwners
from headway.core.plan import StepPlan
from headway.core.request import FinishReason, Request
from headway.core.scheduler import Scheduler
from headway.errors import EngineStalledError

MAX_IDLE_STEPS = 64
"""Most consecutive steps that schedule nothing although requests are present."""
OWNERS_S = 0.5
"""Seconds between two counts of KV blocks by owner."""
MAX_OWNERS = 16
"""Most tenants in a count of KV blocks."""


class EngineCore:
    """Runs the plans of one scheduler on one executor; sends events to the sink."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        sink: Sink,
        recorder: BlockRecorder | None = None,
    ) -> None:
        """With `recorder`, begin with the KV blocks that an earlier process recorded."""
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._sink = sink
        self._in_flight: tuple[StepPlan, Ticket] | None = None
        self._num_idle_steps = 0
        self._owners_due_at = -inf
        self._recorder = recorder
        if recorder is not None:
            scheduler.kv.restore(recorder)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request, is_resent: bool = False, waited_s: float | None = None) -> None:
        """Add a request to the waiting queue, or refuse it.

        SLO admission does not apply to a resent request: a former engine had admitted it. The wait
        of a resent request began `waited_s` ago, not at arrival, because it may have run since.
        """
        now = self._clock.now()
        if is_resent or waited_s is not None:
            request.state_since = now - (waited_s or 0.0)
        self.scheduler.add(request, now, is_resent)
        self._sink(self.scheduler.take_events())

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request now; return whether it was live. Its blocks are free for the next step.

        The core does not know stop strings: a caller that finds one passes STOP as the reason.
        """
        now = self._clock.now()
        was_live = self.scheduler.abort(request_id, now, reason)
        events = self.scheduler.take_events()
        if was_live and not self.scheduler.has_work:
            num_used = self.scheduler.kv.pool.num_used
            events.append(Idled(now, num_used, self.scheduler.forecast(now)))
        self._sink(events)
        return was_live

    def step(self) -> bool:
        """Run one whole step; return False if there was nothing to run."""
        if self.begin_step() is None:
            return False
        self.end_step()
        return True

    def begin_step(self) -> StepPlan | None:
        """Schedule and submit a step; return None if there is nothing to run."""
        if self._in_flight is not None:
            raise RuntimeError("a step is already in flight")
        plan = self.scheduler.schedule(self._clock.now())
        if not plan.scheduled:
            self._count_idle_step()
            return None
        self._num_idle_steps = 0
        self._in_flight = (plan, self._executor.submit(plan))
        return plan

    def end_step(self) -> None:
        """Wait for the step in flight and apply its result."""
        if self._in_flight is None:
            raise RuntimeError("no step is in flight")
        plan, ticket = self._in_flight
        result = self._executor.collect(ticket)
        self._in_flight = None
        now = self._clock.now()
        self.scheduler.update(plan, result, now)
        if self._recorder is not None:
            self._recorder.record(self.scheduler.kv.take_records(plan, self.scheduler.requests))
        events = self.scheduler.take_events()
        events.append(self._make_stepped(plan, result.elapsed_s, now))
        self._sink(events)

    def close(self) -> None:
        self._executor.close()

    def _count_idle_step(self) -> None:
        if not self.scheduler.has_work:
            self._num_idle_steps = 0
            return
        self._num_idle_steps += 1
        if self._num_idle_steps > MAX_IDLE_STEPS:
            raise EngineStalledError(
                f"nothing was scheduled in {self._num_idle_steps} steps, with "
                f"{len(self.scheduler.running)} running and {len(self.scheduler.waiting)} waiting "
                "requests"
            )

    def _make_stepped(self, plan: StepPlan, elapsed_s: float, now: float) -> Stepped:
        scheduler = self.scheduler
        return Stepped(
            step_id=plan.step_id,
            at=now,
            elapsed_s=elapsed_s,
            num_tokens=plan.num_tokens,
            token_budget=scheduler.pacer.limits.max_num_batched_tokens,
            num_scheduled=len(plan.scheduled),
            max_num_seqs=scheduler.config.max_num_seqs,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks_used=scheduler.kv.pool.num_used,
            num_blocks=scheduler.kv.pool.num_blocks,
            service_gap=scheduler.accounts.service_gap(now),
            forecast=scheduler.forecast(now),
            predicted_s=scheduler.pacer.model.predicted_s,
            owners=self._count_owners(now),
        )

    def _count_owners(self, now: float) -> BlockOwners | None:
        """Return the KV blocks by owner, twice a second and when nothing runs any more."""
        if now < self._owners_due_at and len(self.scheduler.running):
            return None
        self._owners_due_at = now + OWNERS_S
        return self.scheduler.kv.block_owners(MAX_OWNERS)
