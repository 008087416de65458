"""Step profiles, and executors that compute no tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from headway.core.executor import Capacity, Executor, Ticket
from headway.core.plan import Sample, StepPlan, StepResult
from headway.core.slo.steptime import StepCost, shape_of

STOP_TOKEN = 0
_SAMPLE, _STOP = Sample((7,)), Sample((STOP_TOKEN,))


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Step durations of one model on one machine."""

    cost: StepCost
    noise: float = 0.0
    """Standard deviation of the logarithm of a step's duration."""
    slow_share: float = 0.0
    """Share of steps that take `slow_factor` times as long, for reasons outside the engine."""
    slow_factor: float = 1.0

    def scaled(self, factor: float) -> StepProfile:
        """Return the profile with every step `factor` times as long."""
        cost = self.cost
        scaled = StepCost(
            factor * cost.constant_s,
            factor * cost.per_decode_s,
            factor * cost.per_prefill_token_s,
            factor * cost.per_context_token_s,
            factor * cost.per_attended_s,
        )
        return replace(self, cost=scaled)

    def draw_s(self, plan: StepPlan, rng: random.Random) -> float:
        """Return the duration of a step with this plan, drawn with noise."""
        seconds = self.cost.predict(shape_of(plan))
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
    """Samples the same token always, and STOP_TOKEN at set lengths."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self.stop_at: dict[str, int] = {}
        """Request id -> number of tokens at which the request samples STOP_TOKEN."""
        self._results: dict[int, StepResult] = {}

    def capacity(self) -> Capacity:
        return self._capacity

    def submit(self, plan: StepPlan) -> Ticket:
        stop_at = self.stop_at
        outcomes = tuple(
            [
                None if not item.has_sample
                else _STOP if item.start + len(item.token_ids)
                >= stop_at.get(item.request_id, self._capacity.max_model_len)
                else _SAMPLE
                for item in plan.scheduled
            ]
        )  # fmt: skip
        self._results[plan.step_id] = StepResult(plan.step_id, outcomes, 0.0)
        return Ticket(plan.step_id)

    def collect(self, ticket: Ticket) -> StepResult:
        return self._results.pop(ticket.step_id)

    def close(self) -> None:
        self._results.clear()


class TimedExecutor:
    """Wraps an executor and reports step durations of a profile."""

    def __init__(self, inner: Executor, profile: StepProfile, seed: int = 0) -> None:
        self._inner = inner
        self._profile = profile
        self._rng = random.Random(f"steps/{seed}")
        self.step_s = 0.0
        """Duration of the last submitted step."""

    def capacity(self) -> Capacity:
        return self._inner.capacity()

    def submit(self, plan: StepPlan) -> Ticket:
        self.step_s = self._profile.draw_s(plan, self._rng)
        return self._inner.submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        return replace(self._inner.collect(ticket), elapsed_s=self.step_s)

    def close(self) -> None:
        self._inner.close()
