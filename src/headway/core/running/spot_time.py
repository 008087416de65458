"""Spot work beside ordinary requests: a small share of the time of their steps.

A spot request in a step makes it longer for every ordinary request in it. So steps with ordinary
requests have spot work only for SPOT_SHARE of their time, saved up from step to step: a decode now
and then, and none while an ordinary prompt waits or is computed. Steps without ordinary requests
have as much spot work as fits.
"""

from __future__ import annotations

from headway.core.slo.steptime import StepCost, StepShape

SPOT_SHARE = 0.02
"""Share of the time of steps with ordinary requests that goes to spot requests."""
MAX_SAVED_STEPS = 16
"""Steps whose share is saved at most: bounds what one step may have of it."""


class SpotTime:
    """Seconds of spot work that steps with ordinary requests have earned."""

    def __init__(self) -> None:
        self._saved_s = 0.0
        self._most_s = 0.0
        """What may be saved at the length of the last step."""

    def earn(self, step_s: float, num_ordinary: int) -> None:
        """Add the share of a step that sampled for this number of ordinary requests."""
        if num_ordinary:
            share_s = SPOT_SHARE * step_s
            self._most_s = MAX_SAVED_STEPS * share_s
            self._saved_s = min(self._saved_s + share_s, self._most_s)

    def num_tokens(self, cost: StepCost) -> int:
        """Return how many tokens the saved time pays for; at least one if it is the most."""
        token_s = max(cost.per_decode_s, cost.per_prefill_token_s, 1e-9)
        is_full = self._saved_s >= self._most_s > 0.0
        return max(int(self._saved_s / token_s), int(is_full))

    def spend(self, shape: StepShape, cost: StepCost) -> None:
        """Take the predicted time of spot work; later steps pay what was not saved yet."""
        self._saved_s -= cost.work_s(shape)
