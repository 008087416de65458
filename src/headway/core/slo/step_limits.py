"""How large a step may be: closed-loop control of the token budget and the running limit.

The aim is a step no longer than the tightest promise that is active. Prefill gets what the model
predicts to fit beside the decodes. Where that is no more than the least it must have, and measured
steps are too long all the same, the limit on running requests comes down, at once and by a share;
it goes up one by one when decodes leave room again. Between the two lies a band in which nothing
changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headway.config import SchedulerConfig
from headway.core.budget import TokenBudget
from headway.core.slo.steptime import StepCost, StepShape

AIM = 0.9
"""Share of a target that a step is planned to take: predictions err."""
LOW = 0.8
"""Decodes predicted to take less than this share of a step leave room for one more request."""
DECREASE = 0.85
COOLDOWN_STEPS = 8
"""Steps between two changes of the limit, so that a change is seen before the next."""
SMOOTHING = 0.2
MIN_RUNNING = 4
THROUGHPUT_FACTOR = 4
"""How many times the token budget a step may have when only throughput counts."""
LATENCY_TARGET_S = 0.1
"""The aim of the latency mode where no request has a target of its own."""


class StepLimits(NamedTuple):
    """What one step may hold."""

    max_num_batched_tokens: int
    prefill_floor: int
    prefill_cap: int
    max_num_seqs: int
    step_s: float | None = None
    """How long the step should take at most; None if that is nobody's concern."""

    @property
    def budget(self) -> TokenBudget:
        return TokenBudget(self.max_num_batched_tokens, self.prefill_floor, self.prefill_cap)


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What the next step is for."""

    num_running: int
    """Those who have a part in it."""
    decodes: StepShape
    tightest_s: float | None = None
    """The smallest time per output token that was promised to anyone running."""
    prefill_start: int = 0
    """Tokens already computed of the prompt that has most: attention to them is work too."""
    pace_s: float | None = None
    """The smallest that anyone running needs from now on: less than promised for those who are
    late."""
    num_held: int = 0
    """Decodes that give way in this step: running as well."""


class Controller:
    """Decides the limits of each step from the load, the model and the steps measured."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._fixed = StepLimits(
            config.max_num_batched_tokens,
            config.prefill_floor,
            config.prefill_cap or config.max_num_batched_tokens,
            config.max_num_seqs,
        )
        self._running_limit = float(config.max_num_seqs)
        self._step_s: float | None = None
        """Smoothed measured time of steps that had decodes in them."""
        self._num_since_change = 0

    def observe(self, shape: StepShape, elapsed_s: float) -> None:
        """A step was measured. Those without decodes keep nobody waiting for a token."""
        if not shape.num_decodes:
            return
        before = elapsed_s if self._step_s is None else self._step_s
        # One slow step must not look like a slow machine.
        seen_s = min(elapsed_s, 3.0 * before)
        self._step_s = before + SMOOTHING * (seen_s - before)
        self._num_since_change += 1

    def decide(self, load: StepLoad, cost: StepCost) -> StepLimits:
        """The limits of the next step."""
        mode, fixed = self._config.mode, self._fixed
        if mode == "throughput":
            most = THROUGHPUT_FACTOR * fixed.max_num_batched_tokens
            return fixed._replace(max_num_batched_tokens=most, prefill_cap=most)
        target_s = load.tightest_s if mode != "fixed" else None
        if target_s is None and mode == "latency":
            target_s = LATENCY_TARGET_S
        if target_s is None or not cost.is_known:
            self._running_limit = float(fixed.max_num_seqs)
            return fixed
        self._adapt(load, target_s, cost)
        step_s = AIM * (target_s if load.pace_s is None else load.pace_s)
        cap = max(fixed.prefill_floor, largest_chunk(load, cost, step_s))
        return fixed._replace(
            prefill_cap=min(cap, fixed.prefill_cap),
            max_num_seqs=int(self._running_limit),
            step_s=step_s,
        )

    def _adapt(self, load: StepLoad, target_s: float, cost: StepCost) -> None:
        """Additive increase, multiplicative decrease of the limit on running requests. There is
        room when decodes alone leave some. Prefill is sized to fill whatever there is; while it
        can be cut, a step that is too long is no reason to run fewer."""
        if self._step_s is None or self._num_since_change < COOLDOWN_STEPS:
            return
        limit, most, step_s = self._running_limit, self._config.max_num_seqs, AIM * target_s
        num_running = load.num_running + load.num_held
        is_cut = largest_chunk(load, cost, step_s) <= self._fixed.prefill_floor
        has_room = not load.num_held and cost.predict(load.decodes) < LOW * step_s
        if self._step_s > target_s and is_cut and num_running > MIN_RUNNING:
            limit = max(MIN_RUNNING, DECREASE * min(limit, num_running))
        elif has_room and num_running >= int(limit):
            limit = min(most, limit + 1)
        if limit != self._running_limit:
            self._running_limit, self._num_since_change = min(limit, most), 0
            self._step_s = None  # how long steps were before says nothing of those to come


def largest_chunk(load: StepLoad, cost: StepCost, step_s: float) -> int:
    """Most prefill tokens with which the step is predicted to take at most `step_s`."""
    left_s = step_s - cost.predict(load.decodes)
    linear = cost.per_prefill_token_s + cost.per_attended_s * load.prefill_start
    square = cost.per_attended_s / 2
    if left_s <= 0.0:
        return 0
    if square <= 0.0:
        return int(left_s / linear) if linear > 0.0 else 1 << 30
    return int((-linear + (linear * linear + 4 * square * left_s) ** 0.5) / (2 * square))
