"""Step-time model: predicts the duration of a step from measured steps.

A step's time is a sum of non-negative parts: a constant, its decodes and prefill tokens, the
context that decodes read, and the attention of prefill chunks. The coefficients are a non-negative
least squares fit over recent steps, in relative error, so that short steps count as much as long
steps. A separate factor follows changes of the machine's speed much faster than the fit.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import isclose
from typing import NamedTuple

from headway.core.plan import ScheduledRequest, StepPlan

FORGETTING = 0.998
"""Decay of a step's weight per step: about the last 500 steps count."""
RIDGE = 0.5
"""Weight of the prior of each coefficient, in steps."""
FOLLOWING = 0.4
"""Smoothing of the factor from step to step: slow phases mostly last for several steps."""
SLOW_FOLLOWING = 0.02
"""Smoothing of the factor for predictions over many steps."""
MAX_RATIO = 1.5
"""Largest ratio of measured to predicted time that counts; larger ratios are cut."""
NUM_ERRORS = 128
MIN_STEPS = 16


_Shares = tuple[float, float, float, float, float]
"""One value per coefficient."""


class StepShape(NamedTuple):
    """Properties of a step that determine its time."""

    num_decodes: int = 0
    num_prefill_tokens: int = 0
    num_context_tokens: int = 0
    """Context tokens that all decodes read together."""
    prefill_work: int = 0
    """Sum over prefill tokens of the tokens attended to."""

    def plus_prefill(self, num_tokens: int, start: int = 0) -> StepShape:
        """Return the step with one more prefill chunk."""
        return self._replace(
            num_prefill_tokens=self.num_prefill_tokens + num_tokens,
            prefill_work=self.prefill_work + prefill_work(num_tokens, start),
        )

    def plus(self, other: StepShape) -> StepShape:
        """Return the sum of both shapes."""
        a, b, c, d = self
        e, f, g, h = other
        return StepShape(a + e, b + f, c + g, d + h)


def prefill_work(num_tokens: int, start: int = 0) -> int:
    """Return the tokens attended to by a chunk that begins at position `start`."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def shape_of(plan: StepPlan) -> StepShape:
    """Return the shape of a planned step.

    A scored row counts as one more prefill token, as in the token budget.
    """
    shape = shape_of_items(plan.scheduled)
    num_rows = plan.num_scored_rows
    return shape.plus(StepShape(0, num_rows)) if num_rows else shape


def shape_of_items(scheduled: Iterable[ScheduledRequest]) -> StepShape:
    """Return the shape of a part of a step; a chunk of one token counts as a decode."""
    num_decodes = num_prefill = num_context = work = 0
    for item in scheduled:
        count = len(item.token_ids)
        if count == 1:
            num_decodes += 1
            num_context += item.start
        else:
            num_prefill += count
            work += prefill_work(count, item.start)
    return StepShape(num_decodes, num_prefill, num_context, work)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Step-time coefficients in seconds, and the error of their predictions.

    A plain value, so that other processes can predict steps too.
    """

    constant_s: float = 0.008
    per_decode_s: float = 0.3e-3
    per_prefill_token_s: float = 0.25e-3
    per_context_token_s: float = 1e-6
    per_attended_s: float = 0.1e-6
    error: float = 1.0
    """Median relative error of the last predictions."""
    num_steps: int = 0

    @property
    def is_known(self) -> bool:
        """Whether enough steps were measured to use the coefficients."""
        return self.num_steps >= MIN_STEPS

    def is_close(self, other: StepCost, tolerance: float) -> bool:
        """Return whether all coefficients are within a relative tolerance of the other's."""
        return (
            self.is_known == other.is_known
            and isclose(self.constant_s, other.constant_s, rel_tol=tolerance)
            and isclose(self.per_decode_s, other.per_decode_s, rel_tol=tolerance)
            and isclose(self.per_prefill_token_s, other.per_prefill_token_s, rel_tol=tolerance)
            and isclose(self.per_context_token_s, other.per_context_token_s, rel_tol=tolerance)
            and isclose(self.per_attended_s, other.per_attended_s, rel_tol=tolerance)
        )

    def predict(self, shape: StepShape) -> float:
        """Return the predicted seconds of a step."""
        return self.constant_s + self.work_s(shape)

    def work_s(self, shape: StepShape) -> float:
        """Return the seconds that this work adds to its steps."""
        num_decodes, num_prefill, num_context, attended = shape
        return (
            self.per_decode_s * num_decodes
            + self.per_prefill_token_s * num_prefill
            + self.per_context_token_s * num_context
            + self.per_attended_s * attended
        )

    def prefill_s(self, num_tokens: int, start: int = 0) -> float:
        """Return the seconds that a prefill adds to its steps."""
        work = self.per_attended_s * prefill_work(num_tokens, start)
        return self.per_prefill_token_s * num_tokens + work

    def decode_s(self, num_context_tokens: float) -> float:
        """Return the seconds that one decode adds to a step."""
        return self.per_decode_s + self.per_context_token_s * num_context_tokens


class StepTimeModel:
    """Fits StepCost to measured steps; a few microseconds each."""

    def __init__(self, prior: StepCost | None = None) -> None:
        cost = prior or StepCost()
        self._prior = (
            cost.constant_s,
            cost.per_decode_s,
            cost.per_prefill_token_s,
            cost.per_context_token_s,
            cost.per_attended_s,
        )
        # In units of the prior: each feature is its time by the prior, each coefficient begins
        # at 1, and the fit works on shares of a step's time.
        self._squares = (0.0,) * 15
        """Sums of products of two shares, row by row; the matrix is symmetric."""
        self._products = (0.0,) * 5
        self._weights = (1.0,) * 5
        self._factor = self._slow_factor = 1.0
        self._num_steps = 0
        self.predicted_s = 0.0
        """Predicted time of the last observed step, before its time was known."""
        self._errors: deque[float] = deque(maxlen=NUM_ERRORS)
        self._sorted_errors: list[float] = []

    @property
    def error(self) -> float:
        """Median relative error of the last predictions, made before their steps."""
        count = len(self._sorted_errors)
        return self._sorted_errors[count // 2] if count else 1.0

    @property
    def cost(self) -> StepCost:
        """Coefficients for the next step."""
        return self._cost(self._factor)

    @property
    def slow_cost(self) -> StepCost:
        """Coefficients for predictions over many steps, such as SLO admission control."""
        return self._cost(self._slow_factor)

    def _cost(self, factor: float) -> StepCost:
        a, b, c, d, e = self._prior
        v, w, x, y, z = self._weights
        return StepCost(
            factor * v * a,
            factor * w * b,
            factor * x * c,
            factor * y * d,
            factor * z * e,
            self.error,
            self._num_steps,
        )

    def observe(self, shape: StepShape, elapsed_s: float) -> None:
        """Update the fit with a step of this shape that took `elapsed_s`."""
        if not elapsed_s > 0.0:
            self.predicted_s = 0.0
            return
        a, b, c, d, e = self._features(shape)
        v, w, x, y, z = self._weights
        base_s = max(v * a + w * b + x * c + y * d + z * e, 1e-9)
        self.predicted_s = self._factor * base_s if self._num_steps else 0.0
        ratio = elapsed_s / (self._factor * base_s)
        if self._num_steps == 0:  # the first step sets the machine's speed
            self._factor, ratio = ratio, 1.0
            self._slow_factor = self._factor
        else:
            self._note_error(abs(ratio - 1.0) / ratio)
        self._num_steps += 1
        ratio = min(MAX_RATIO, max(1.0 / MAX_RATIO, ratio))
        self._fit((a / base_s, b / base_s, c / base_s, d / base_s, e / base_s), ratio)
        self._factor *= ratio ** max(FOLLOWING, 1.0 / self._num_steps)
        share = max(SLOW_FOLLOWING, 1.0 / self._num_steps)
        self._slow_factor += share * (self._factor - self._slow_factor)

    def _features(self, shape: StepShape) -> _Shares:
        a, b, c, d, e = self._prior
        decodes, tokens, context, work = shape
        return (a, b * decodes, c * tokens, d * context, e * work)

    def _fit(self, shares: _Shares, ratio: float) -> None:
        """Do one sweep of coordinate descent over the sums of squares.

        The sweep starts from the last solution, so one per step stays near the optimum. It is
        written out, because loops over five take four times as long, in every step.
        """
        a, b, c, d, e = shares
        aa, ab, ac, ad, ae, bb, bc, bd, be, cc, cd, ce, dd, de, ee = self._squares
        aa, ab, ac = FORGETTING * aa + a * a, FORGETTING * ab + a * b, FORGETTING * ac + a * c
        ad, ae, bb = FORGETTING * ad + a * d, FORGETTING * ae + a * e, FORGETTING * bb + b * b
        bc, bd, be = FORGETTING * bc + b * c, FORGETTING * bd + b * d, FORGETTING * be + b * e
        cc, cd, ce = FORGETTING * cc + c * c, FORGETTING * cd + c * d, FORGETTING * ce + c * e
        dd, de, ee = FORGETTING * dd + d * d, FORGETTING * de + d * e, FORGETTING * ee + e * e
        self._squares = aa, ab, ac, ad, ae, bb, bc, bd, be, cc, cd, ce, dd, de, ee
        p, q, r, s, t = self._products
        p, q = FORGETTING * p + a * ratio, FORGETTING * q + b * ratio
        r, s = FORGETTING * r + c * ratio, FORGETTING * s + d * ratio
        t = FORGETTING * t + e * ratio
        self._products = p, q, r, s, t
        v, w, x, y, z = self._weights
        pull = p + RIDGE - (aa * v + ab * w + ac * x + ad * y + ae * z)
        v = max(0.0, v + (pull - RIDGE * v) / (aa + RIDGE))
        pull = q + RIDGE - (ab * v + bb * w + bc * x + bd * y + be * z)
        w = max(0.0, w + (pull - RIDGE * w) / (bb + RIDGE))
        pull = r + RIDGE - (ac * v + bc * w + cc * x + cd * y + ce * z)
        x = max(0.0, x + (pull - RIDGE * x) / (cc + RIDGE))
        pull = s + RIDGE - (ad * v + bd * w + cd * x + dd * y + de * z)
        y = max(0.0, y + (pull - RIDGE * y) / (dd + RIDGE))
        pull = t + RIDGE - (ae * v + be * w + ce * x + de * y + ee * z)
        z = max(0.0, z + (pull - RIDGE * z) / (ee + RIDGE))
        self._weights = v, w, x, y, z

    def _note_error(self, error: float) -> None:
        ordered = self._sorted_errors
        if len(self._errors) == NUM_ERRORS:
            del ordered[bisect_left(ordered, self._errors[0])]
        self._errors.append(error)
        insort(ordered, error)
