"""A run of recorded requests on one virtual engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headway.config import SchedulerConfig
from headway.core.events import Admitted, Event, Finished, Preempted, Refused, TokensEmitted
from headway.core.executor import Capacity
from headway.core.plan import StepPlan
from headway.core.request import Request
from headway.core.slo.steptime import StepShape, shape_of
from headway.sim.engine import VirtualEngine
from headway.sim.records import Record
from headway.sim.steps import CannedExecutor, StepProfile, TimedExecutor


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step, with the prediction of the step-time model."""

    began_at: float
    shape: StepShape
    elapsed_s: float
    predicted_s: float
    num_running: int
    max_num_seqs: int


class Simulation:
    """A virtual engine whose requests have the output lengths of their records."""

    def __init__(
        self, config: SchedulerConfig, capacity: Capacity, profile: StepProfile, seed: int = 0
    ) -> None:
        self._canned = CannedExecutor(capacity)
        executor = TimedExecutor(self._canned, profile, seed)
        self.engine = VirtualEngine(config, executor, self._record_events, False)
        self.engine.may_join = self._record_arrival
        self.engine.on_planned = self._record_step
        self.records: dict[str, Record] = {}
        """Request id -> record, for requests that have arrived."""
        self.steps: list[SimulatedStep] = []
        self.num_admitted = 0
        self.may_join: Callable[[Record], bool] = lambda _record: True
        self.on_finish: Callable[[Record], None] = lambda _record: None
        self.on_events: Callable[[Sequence[Event]], None] = lambda _events: None
        self._sent: dict[str, Record] = {}

    def send(self, records: Iterable[Record]) -> None:
        """Schedule the arrival of these records as requests."""
        for record in records:
            self._sent[record.id] = record
            # The last token is sampled when all tokens before it are known.
            self._canned.stop_at[record.id] = record.num_prompt + record.num_output - 1
            self.engine.send([record.make_request()])

    def run(self, until_s: float, drain: bool = True) -> None:
        """Serve records that arrive before `until_s`; with `drain`, until all finished."""
        self.engine.run(until_s, drain)

    def _record_arrival(self, request: Request) -> bool:
        record = self.records[request.id] = self._sent.pop(request.id)
        record.is_refused = not self.may_join(record)
        return not record.is_refused

    def _record_step(self, plan: StepPlan) -> None:
        scheduler, shape = self.engine.scheduler, shape_of(plan)
        self.steps.append(
            SimulatedStep(
                self.engine.clock.now(),
                shape,
                self.engine.executor.step_s,
                scheduler.pacer.cost.predict(shape),
                len(scheduler.running),
                scheduler.pacer.limits.max_num_seqs,
            )
        )

    def _record_events(self, events: Sequence[Event]) -> None:
        now = self.engine.clock.now()
        self.on_events(events)
        for event in events:
            if isinstance(event, TokensEmitted):
                record = self.records[event.request_id]
                if record.first_token_at is None:
                    record.first_token_at = now
            elif isinstance(event, Finished):
                record = self.records[event.request_id]
                if event.num_output_tokens != record.num_output:
                    raise RuntimeError(
                        f"request {event.request_id} finished ({event.reason}) after "
                        f"{event.num_output_tokens} of {record.num_output} output tokens"
                    )
                record.finished_at = now
                self.on_finish(record)
            elif isinstance(event, Refused):
                self.records[event.request_id].is_refused = True
            elif isinstance(event, Admitted):
                self.num_admitted += not event.is_resumed
            elif isinstance(event, Preempted):
                self.records[event.request_id].num_preemptions += 1
