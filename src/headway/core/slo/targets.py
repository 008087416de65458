"""The targets of one request: due times, remaining work, and `met`.

The first token is due `ttft_s` after arrival, each further one `tpot_s` after the one before it.
The deadline is the due time of the last token.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from headway.core.request import Request
from headway.core.slo.steptime import StepCost, StepShape, prefill_work
from headway.core.terms import Targets

EARLIER = 0.2
"""Share of the time until the latest start by which the planned start is earlier."""


def met(targets: Targets, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None) -> bool:
    """Return whether the measured times are within every target.

    A missing TTFT or E2E time misses its target. An output of one token has no TPOT and meets any
    TPOT target.
    """
    if targets.ttft_s is not None and (ttft_s is None or ttft_s > targets.ttft_s):
        return False
    if targets.tpot_s is not None and tpot_s is not None and tpot_s > targets.tpot_s:
        return False
    return targets.deadline_s is None or (e2e_s is not None and e2e_s <= targets.deadline_s)


def tightness_of(targets: Targets) -> int:
    """Return the octave of TTFT or deadline, the shorter; -1 below 1 s and without either.

    It is the same whenever it is asked for: by the time that is left, a request would be looser
    than others with the same targets that were looked at later.
    """
    horizon_s = min(
        [one for one in (targets.ttft_s, targets.deadline_s) if one is not None], default=0.0
    )
    return min(16, int(horizon_s).bit_length()) if horizon_s >= 1.0 else -1


class RemainingWork(NamedTuple):
    """Remaining work of a request, and its targets."""

    arrived_at: float
    targets: Targets
    num_prefill_left: int
    num_output: int
    num_output_left: int
    """Expected further tokens, the last included."""
    num_context: int
    """Tokens known, which a decode reads."""
    first_token_at: float | None = None
    num_samples: int = 1
    """Samples that will decode, all of the same expected length."""
    num_unscored: int = 0
    """Prompt tokens to score; each counts as one more prefill token."""

    @property
    def next_due_at(self) -> float:
        """When the next token is due; infinity without a target."""
        targets = self.targets
        if self.first_token_at is None:
            return inf if targets.ttft_s is None else self.arrived_at + targets.ttft_s
        if targets.tpot_s is None:
            return inf
        return self.first_token_at + self.num_output * targets.tpot_s

    @property
    def last_due_at(self) -> float:
        """When the last token is due, by the deadline and by the TPOT target."""
        targets, due_at = self.targets, inf
        if targets.deadline_s is not None:
            due_at = self.arrived_at + targets.deadline_s
        if targets.tpot_s is not None:
            paced_s = max(0, self.num_output_left - 1) * targets.tpot_s
            due_at = min(due_at, self.next_due_at + paced_s)
        return due_at

    @property
    def prefill(self) -> StepShape:
        """Remaining prefill."""
        count = self.num_prefill_left
        if count <= 0:
            return StepShape()
        work = prefill_work(count, max(0, self.num_context - count))
        return StepShape(0, count + self.num_unscored, 0, work)

    @property
    def decodes(self) -> StepShape:
        """Remaining decodes of all samples; prefill produces the first token."""
        count = max(0, self.num_output_left - (1 if self.num_prefill_left > 0 else 0))
        num_context = count * self.num_context + count * count // 2
        return StepShape(self.num_samples * count, 0, self.num_samples * num_context)

    @property
    def demands(self) -> tuple[tuple[float, StepShape], ...]:
        """Pairs of a due time and the work due by then; work without a due time is left out."""
        decodes, last_due_at = self.decodes, self.last_due_at
        if self.first_token_at is not None and not self.num_prefill_left:
            return ((last_due_at, decodes),) if last_due_at < inf else ()
        prefill, next_due_at = self.prefill, self.next_due_at
        if next_due_at < last_due_at:
            pairs = ((next_due_at, prefill), (last_due_at, decodes))
        else:
            pairs = ((last_due_at, decodes.plus(prefill)),)
        return tuple([pair for pair in pairs if pair[0] < inf])

    def latest_start_at(self, cost: StepCost, step_s: float) -> float:
        """Return the latest start that meets the targets, alone and with steps of `step_s`."""
        prefill_s = cost.work_s(self.prefill)
        next_at = self.next_due_at - prefill_s
        last_at = self.last_due_at - prefill_s - self.num_output_left * step_s
        return min(next_at, last_at)

    def planned_start_at(self, cost: StepCost, step_s: float) -> float:
        """Return the start by which requests are ordered.

        It is earlier than the latest start, because predictions err.
        """
        latest_at = self.latest_start_at(cost, step_s)
        if latest_at == inf:
            return inf
        return self.arrived_at + (1.0 - EARLIER) * max(0.0, latest_at - self.arrived_at)


def remaining_work(
    request: Request,
    num_output_left: int,
    first_token_at: float | None = None,
    num_cached: int = 0,
) -> RemainingWork:
    """Return the remaining work of a request with `num_output_left` expected tokens.

    `num_cached` tokens of the prompt are in the prefix cache; they count until the request starts.
    """
    num_left = request.num_tokens - request.num_computed
    if num_cached and not request.num_computed:
        num_left = max(2, num_left - num_cached)
    return RemainingWork(
        request.arrived_at,
        request.terms.targets,
        num_left if num_left > 1 else 0,
        request.num_output_tokens,
        num_output_left,
        request.num_tokens,
        first_token_at,
        1 if request.num_output_tokens else request.params.n,
        request.num_unscored,
    )


def slack_s(work: RemainingWork, now: float, cost: StepCost, step_s: float) -> float:
    """Return the seconds for which a request can be deferred; negative if it is late."""
    slack = work.latest_start_at(cost, step_s) - now
    return slack if work.num_prefill_left > 0 else min(slack, work.next_due_at - now - step_s)
