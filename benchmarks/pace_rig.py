"""The engine core on a virtual clock, with steps that take what they take on the real model.

Shared by benchmarks/deadlines.py and benchmarks/control.py. Nothing is computed: an executor
answers at once, and says how long the step would have taken by coefficients that were fitted to
steps measured on SmolLM2-135M (benchmarks/step_times.py), with noise. The scheduler learns them
anew in each run.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import quantiles
from typing import Any, NamedTuple

from headway.clock import VirtualClock
from headway.config import SchedulerConfig
from headway.core.engine import EngineCore
from headway.core.events import Admitted, Event, Finished, Preempted, Refused, TokensEmitted
from headway.core.executor import Capacity, Ticket
from headway.core.params import SamplingParams
from headway.core.plan import Sample, StepPlan, StepResult
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.core.slo.steptime import StepCost, StepShape, shape_of
from headway.core.slo.targets import met
from headway.core.terms import NO_TARGETS, Targets, Terms

MEASURED = StepCost(
    constant_s=0.0083,
    per_decode_s=0.35e-3,
    per_prefill_token_s=0.26e-3,
    per_context_token_s=0.74e-6,
    per_attended_s=0.122e-6,
)
"""Fitted to all steps of tests/core/data/steps.csv together."""
NOISE = 0.1
"""Standard deviation of the logarithm of a step's time."""
SLOW_SHARE, SLOW_FACTOR = 0.002, 5.0
"""Now and then a step takes much longer, for reasons outside."""
CAPACITY = Capacity(num_blocks=3000, block_size=16, max_model_len=4096)
NUM_SEATS = 64
SAMPLE, STOP = Sample((7,)), Sample((0,))


class SimulatedExecutor:
    """Answers with the same token always, and with the time of a real step."""

    def __init__(self, seed: int) -> None:
        self.lengths: dict[str, int] = {}
        """At which length each request stops."""
        self._draw = random.Random(f"steps/{seed}")
        self._results: dict[int, StepResult] = {}

    def capacity(self) -> Capacity:
        return CAPACITY

    def submit(self, plan: StepPlan) -> Ticket:
        elapsed_s = MEASURED.predict(shape_of(plan)) * self._draw.lognormvariate(0.0, NOISE)
        if self._draw.random() < SLOW_SHARE:
            elapsed_s *= SLOW_FACTOR
        lengths = self.lengths
        outcomes = tuple(
            [
                None if not item.has_sample
                else STOP if item.start + len(item.token_ids) >= lengths[item.request_id]
                else SAMPLE
                for item in plan.scheduled
            ]
        )  # fmt: skip
        self._results[plan.step_id] = StepResult(plan.step_id, outcomes, elapsed_s)
        return Ticket(plan.step_id)

    def elapsed_s(self, plan: StepPlan) -> float:
        return self._results[plan.step_id].elapsed_s

    def collect(self, ticket: Ticket) -> StepResult:
        return self._results.pop(ticket.step_id)

    def close(self) -> None:
        self._results.clear()


class Step(NamedTuple):
    """A step that was, and what the model made of it before."""

    began_at: float
    shape: StepShape
    elapsed_s: float
    predicted_s: float
    num_running: int
    num_seats: int


@dataclass(slots=True)
class Record:
    """One request from beginning to end."""

    id: str
    arrived_at: float
    num_prompt: int
    num_output: int
    max_tokens: int
    terms: Terms
    priority: int = 0
    first_token_at: float | None = None
    finished_at: float | None = None
    is_refused: bool = False
    num_preemptions: int = 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def tpot_s(self) -> float | None:
        if self.first_token_at is None or self.finished_at is None or self.num_output < 2:
            return None
        return (self.finished_at - self.first_token_at) / (self.num_output - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.finished_at is None else self.finished_at - self.arrived_at

    @property
    def is_good(self) -> bool:
        """Finished, and everything as promised."""
        is_met = met(self.terms.targets, self.ttft_s, self.tpot_s, self.e2e_s)
        return self.finished_at is not None and is_met


class Rig:
    """One engine with its clock. What is `upcoming` arrives when it is time; a finished request
    may bring another (a closed loop)."""

    def __init__(self, settings: dict[str, Any], seed: int = 0) -> None:
        self.clock = VirtualClock()
        self.executor = SimulatedExecutor(seed)
        self.scheduler = Scheduler(SchedulerConfig(**settings), CAPACITY, False)
        self.core = EngineCore(self.scheduler, self.executor, self.clock, self._take_in)
        self.upcoming: deque[Record] = deque()
        """In order of arrival."""
        self.unsent: list[Record] = []
        """Arrived during a step: the engine will know of them when it ends."""
        self.records: dict[str, Record] = {}
        self.steps: list[Step] = []
        self.num_admitted = 0
        self.may_join: Callable[[Record], bool] = lambda _record: True
        """Asked when a request arrives, whatever the engine is doing: the server's gate."""
        self.on_finish: Callable[[Record], None] = lambda _record: None
        self.on_step: Callable[[], None] = lambda: None

    def run(self, until_s: float, drain: bool = True) -> None:
        """Serve what arrives before `until_s`; then, if asked to, what is left."""
        while self.clock.now() < until_s or (drain and self.core.has_work):
            if self.clock.now() >= until_s:
                self.upcoming.clear()
            self._arrive_until(self.clock.now())
            for record in self.unsent:
                self.core.add(self._request(record))
            self.unsent.clear()
            if not self._step():
                if not self.upcoming:
                    return
                at = max(self.clock.now(), self.upcoming[0].arrived_at)
                self.clock.advance_to(min(at, until_s))

    def _step(self) -> bool:
        began_at = self.clock.now()
        plan = self.core.begin_step()
        if plan is None:
            return False
        elapsed_s = self.executor.elapsed_s(plan)
        shape = shape_of(plan)
        self.steps.append(
            Step(
                began_at,
                shape,
                elapsed_s,
                self.scheduler.pacer.cost.predict(shape),
                len(self.scheduler.running),
                self.scheduler.pacer.limits.max_num_seqs,
            )
        )
        self._arrive_until(began_at + elapsed_s)
        self.clock.advance_to(began_at + elapsed_s)
        self.core.end_step()
        self.on_step()
        return True

    def _arrive_until(self, at: float) -> None:
        """Those that come during a step meet the gate at once, and the engine at its end."""
        while self.upcoming and self.upcoming[0].arrived_at <= at:
            record = self.upcoming.popleft()
            self.clock.advance_to(max(self.clock.now(), record.arrived_at))
            self.records[record.id] = record
            if self.may_join(record):
                self.unsent.append(record)
            else:
                record.is_refused = True

    @property
    def num_queued(self) -> int:
        return len(self.scheduler.waiting) + len(self.unsent)

    def _request(self, record: Record) -> Request:
        # The last token is sampled from all those before it.
        self.executor.lengths[record.id] = record.num_prompt + record.num_output - 1
        return Request(
            id=record.id,
            token_ids=[1] * record.num_prompt,
            params=SamplingParams(max_tokens=record.max_tokens, stop_token_ids=(0,)),
            seed=0,
            arrived_at=record.arrived_at,
            priority=record.priority,
            terms=record.terms,
        )

    def _take_in(self, events: Sequence[Event]) -> None:
        now = self.clock.now()
        for event in events:
            if isinstance(event, TokensEmitted):
                record = self.records[event.request_id]
                if record.first_token_at is None:
                    record.first_token_at = now
            elif isinstance(event, Finished):
                record = self.records[event.request_id]
                if event.num_output_tokens != record.num_output:
                    raise RuntimeError(f"request {event.request_id}: {event.reason}")
                record.finished_at = now
                self.on_finish(record)
            elif isinstance(event, Refused):
                self.records[event.request_id].is_refused = True
            elif isinstance(event, Admitted):
                self.num_admitted += not event.is_resumed
            elif isinstance(event, Preempted):
                self.records[event.request_id].num_preemptions += 1


@dataclass(frozen=True, slots=True)
class Tier:
    """A kind of request: its share of them, how long they are, and what they are promised."""

    name: str
    share: float
    median_prompt: int
    median_output: int
    targets: Targets = NO_TARGETS
    priority: int = 0


def draw_record(number: int, at: float, tier: Tier, draw: random.Random) -> Record:
    """Lengths are lognormal around the tier's medians. Requests allow for up to three times what
    they come to: the scheduler does not know lengths beforehand."""
    num_prompt = min(2000, max(8, int(tier.median_prompt * draw.lognormvariate(0.0, 0.6))))
    num_output = min(400, max(2, int(tier.median_output * draw.lognormvariate(0.0, 0.6))))
    max_tokens = int(num_output * draw.uniform(1.0, 3.0))
    terms = Terms(tenant=tier.name, tier=tier.name, targets=tier.targets)
    return Record(f"r{number}", at, num_prompt, num_output, max_tokens, terms, tier.priority)


def percentile(values: Sequence[float], percent: int) -> float | None:
    """None of nothing."""
    if not values:
        return None
    return values[0] if len(values) == 1 else quantiles(values, n=100)[percent - 1]
