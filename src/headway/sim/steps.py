"""Step durations, and executors that compute no tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from headway.core.executor import Capacity, Executor, Ticket
from headway.core.plan import (
    Embedding,
    PromptScores,
    Sample,
    ScheduledRequest,
    StepPlan,
    StepResult,
)
from headway.core.slo.steptime import StepCost, StepShape, shape_of

STOP_TOKEN, TOKEN = 0, 7
_SAMPLE, _STOP = Sample((TOKEN,)), Sample((STOP_TOKEN,))
_NO_SCORES: dict[str, PromptScores] = {}
_NO_EMBEDDINGS: dict[str, Embedding] = {}


class StepTime(NamedTuple):
    """Duration of one step."""

    elapsed_s: float
    """Seconds in the executor, which the scheduler is told."""
    overhead_s: float = 0.0
    """Seconds of the engine process besides: planning, updating, reporting, taking commands."""


DrawStep = Callable[[StepShape, int], StepTime]
"""Returns the duration of a step, by its shape and the requests that ended just before it."""


class StepTimes(Protocol):
    """Durations of the steps of one model on one machine."""

    def start(self, rng: random.Random) -> DrawStep:
        """Return the durations of one engine, drawn with `rng`."""
        ...


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Step durations with independent noise."""

    cost: StepCost
    noise: float = 0.0
    """Standard deviation of the logarithm of a step's duration."""
    slow_share: float = 0.0
    """Share of steps that take `slow_factor` times as long, for reasons outside the engine."""
    slow_factor: float = 1.0
    overhead_s: float = 0.0
    """Time of the engine process between two steps."""
    overhead_per_request_s: float = 0.0
    """The same for each request in the step."""

    def scaled(self, factor: float) -> StepProfile:
        """Return the profile with every step `factor` times as long in the executor."""
        cost = self.cost
        scaled = StepCost(
            factor * cost.constant_s,
            factor * cost.per_decode_s,
            factor * cost.per_prefill_token_s,
            factor * cost.per_context_token_s,
            factor * cost.per_attended_s,
        )
        return replace(self, cost=scaled)

    def start(self, rng: random.Random) -> DrawStep:
        return lambda shape, _num_ended: StepTime(self._draw_s(shape, rng), self._overhead_s(shape))

    def _overhead_s(self, shape: StepShape) -> float:
        # Most steps with prefill compute one prompt.
        num_requests = shape.num_decodes + (shape.num_prefill_tokens > 0)
        return self.overhead_s + self.overhead_per_request_s * num_requests

    def _draw_s(self, shape: StepShape, rng: random.Random) -> float:
        seconds = self.cost.predict(shape)
        if self.noise:
            seconds *= rng.lognormvariate(0.0, self.noise)
        if self.slow_share and rng.random() < self.slow_share:
            seconds *= self.slow_factor
        return seconds


SMOLLM2_135M = StepProfile(
    StepCost(
        constant_s=0.0083,
        per_decode_s=0.35e-3,
        per_prefill_token_s=0.26e-3,
        per_context_token_s=0.74e-6,
        per_attended_s=0.122e-6,
    ),
    noise=0.1,
    slow_share=0.002,
    slow_factor=5.0,
)
"""SmolLM2-135M on two cores, fitted to steps measured by benchmarks/sim/step_times.py."""


class CannedExecutor:
    """Samples the same token always, or set outputs, and STOP_TOKEN at set lengths."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self.stop_at: dict[str, int] = {}
        """Request id -> number of tokens at which the request samples STOP_TOKEN."""
        self.outputs: dict[str, tuple[int, Sequence[int]]] = {}
        """Request id -> number of prompt tokens, and output tokens."""
        self._results: dict[int, StepResult] = {}

    def capacity(self) -> Capacity:
        return self._capacity

    def forget(self, request_id: str) -> None:
        """Drop what is set for a request."""
        self.stop_at.pop(request_id, None)
        self.outputs.pop(request_id, None)

    def submit(self, plan: StepPlan) -> Ticket:
        stop_at, outputs = self.stop_at, self.outputs
        outcomes = tuple(
            [
                None if not item.has_sample
                else _STOP if item.start + len(item.token_ids)
                >= stop_at.get(item.request_id, self._capacity.max_model_len)
                else _SAMPLE if item.request_id not in outputs
                else self._sample_output(item)
                for item in plan.scheduled
            ]
        )  # fmt: skip
        self._results[plan.step_id] = StepResult(
            plan.step_id, outcomes, 0.0, 0.0, _NO_SCORES, _NO_EMBEDDINGS
        )
        return Ticket(plan.step_id)

    def _sample_output(self, item: ScheduledRequest) -> Sample:
        num_prompt, output = self.outputs[item.request_id]
        return Sample((output[item.start + len(item.token_ids) - num_prompt],))

    def collect(self, ticket: Ticket) -> StepResult:
        return self._results.pop(ticket.step_id)

    def close(self) -> None:
        self._results.clear()


class TimedExecutor:
    """Wraps an executor and reports drawn step durations, with the copies of KV blocks."""

    def __init__(self, inner: Executor, times: StepTimes, seed: int = 0) -> None:
        self._inner = inner
        self._draw = times.start(random.Random(f"steps/{seed}"))
        self._block_copy_s = inner.capacity().block_copy_s
        self._elapsed_s = self._copy_s = 0.0
        self.num_ended = 0
        """Requests that ended with the step just before the next one."""
        self.step_s = 0.0
        """Duration of the last submitted step on the clock, with its overhead."""

    def capacity(self) -> Capacity:
        return self._inner.capacity()

    def submit(self, plan: StepPlan) -> Ticket:
        drawn = self._draw(shape_of(plan), self.num_ended)
        self._copy_s = self._block_copy_s * (len(plan.saves) + len(plan.loads))
        self._elapsed_s = drawn.elapsed_s + self._copy_s
        self.step_s = self._elapsed_s + drawn.overhead_s
        return self._inner.submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        result = self._inner.collect(ticket)
        return StepResult(
            result.step_id,
            result.outcomes,
            self._elapsed_s,
            self._copy_s,
            result.prompt_scores,
            result.embeddings,
        )

    def close(self) -> None:
        self._inner.close()
