"""Limits of a step: closed-loop control of the token budget and the running limit.

A step should take no longer than the tightest TPOT target of the running requests. Prefill gets the
time that the model predicts to be left beside the decodes. If prefill is at its floor and measured
steps are still too long, the running limit falls at once by a factor. The running limit rises by
one when decodes leave room again. Between the two thresholds the limit stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from headway.config import SchedulerConfig
from headway.core.budget import TokenBudget
from headway.core.slo.steptime import StepCost, StepShape

AIM = 0.9
"""Share of a target for which a step is planned: predictions err."""
LOW = 0.8
"""Decodes predicted to take less than this share of a step leave room for one more request."""
DECREASE = 0.85
COOLDOWN_STEPS = 8
"""Steps between two changes of the running limit, to measure a change before the next."""
SMOOTHING = 0.2
MIN_RUNNING = 4
THROUGHPUT_FACTOR = 4
"""Factor of the token budget in throughput mode."""
LATENCY_TARGET_S = 0.1
"""Step target of the latency mode if no running request has a TPOT target."""


class StepLimits(NamedTuple):
    """Token budget and running limit of one step."""

    max_num_batched_tokens: int
    prefill_floor: int
    prefill_cap: int
    max_num_seqs: int
    step_s: float | None = None
    """Target time of the step; None without a target."""

    @property
    def budget(self) -> TokenBudget:
        return TokenBudget(self.max_num_batched_tokens, self.prefill_floor, self.prefill_cap)


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Running requests of the next step, and their targets."""

    num_running: int
    """Requests that take part in the step."""
    decodes: StepShape
    tightest_s: float | None = None
    """The smallest TPOT target of the running requests."""
    prefill_start: int = 0
    """Most tokens computed of a prompt in prefill: attention to them is work too."""
    pace_s: float | None = None
    """The smallest time per token that a running request needs from now on; below its target if
    the request is late."""
    num_deferred: int = 0
    """Deferred decodes: running, but not in this step."""


class Controller:
    """Sets the limits of each step from the load, the model and measured steps."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.free_limits = StepLimits(
            config.max_num_batched_tokens,
            config.prefill_floor,
            config.prefill_cap or config.max_num_batched_tokens,
            config.max_num_seqs,
        )
        """Limits of a step without a target."""
        self._running_limit = float(config.max_num_seqs)
        self._step_s: float | None = None
        """Smoothed measured time of steps with decodes."""
        self._num_since_change = 0

    def observe(self, shape: StepShape, elapsed_s: float) -> None:
        """Add a measured step; steps without decodes delay no token and do not count."""
        if not shape.num_decodes:
            return
        before = elapsed_s if self._step_s is None else self._step_s
        # One slow step must not look like a slow machine.
        bounded_s = min(elapsed_s, 3.0 * before)
        self._step_s = before + SMOOTHING * (bounded_s - before)
        self._num_since_change += 1

    def decide(self, load: StepLoad, cost: StepCost) -> StepLimits:
        """Return the limits of the next step."""
        mode, fixed = self._config.mode, self.free_limits
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
        """Change the running limit: additive increase, multiplicative decrease.

        The limit rises if decodes alone leave room, because prefill fills any step. The limit falls
        only if prefill is at its floor: before that, prefill can be cut.
        """
        if self._step_s is None or self._num_since_change < COOLDOWN_STEPS:
            return
        limit, most, step_s = self._running_limit, self._config.max_num_seqs, AIM * target_s
        num_running = load.num_running + load.num_deferred
        is_cut = largest_chunk(load, cost, step_s) <= self.free_limits.prefill_floor
        has_room = not load.num_deferred and cost.predict(load.decodes) < LOW * step_s
        if self._step_s > target_s and is_cut and num_running > MIN_RUNNING:
            limit = max(MIN_RUNNING, DECREASE * min(limit, num_running))
        elif has_room and num_running >= int(limit):
            limit = min(most, limit + 1)
        if limit != self._running_limit:
            self._running_limit, self._num_since_change = min(limit, most), 0
            self._step_s = None  # steps under the old limit do not predict steps under the new one


def largest_chunk(load: StepLoad, cost: StepCost, step_s: float) -> int:
    """Return the most prefill tokens with which a step is predicted to take `step_s`."""
    left_s = step_s - cost.predict(load.decodes)
    linear = cost.per_prefill_token_s + cost.per_attended_s * load.prefill_start
    square = cost.per_attended_s / 2
    if left_s <= 0.0:
        return 0
    if square <= 0.0:
        return int(left_s / linear) if linear > 0.0 else 1 << 30
    return int((-linear + (linear * linear + 4 * square * left_s) ** 0.5) / (2 * square))
