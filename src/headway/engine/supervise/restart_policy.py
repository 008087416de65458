"""When is an engine process taken for hung, and how often may it be replaced? Pure decisions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_TICK_S = 1.0
"""What one look at the clock may add to a silence: if this process itself was held up, the
engine's reports are waiting unread, and nobody knows yet whether it was silent."""
HANG_FACTOR = 20.0
STEP_WEIGHT = 0.1
"""Of the newest step in the moving average of step times."""
NUM_LENIENT_STEPS = 8


class HangDetector:
    """Tells a hung engine from a busy one: it has work and has not finished a step for long.

    Long is 20 times the moving average of its step times, and never less than `min_hang_s`. One
    that follows an engine that hung has twice the time for its first steps: if the cause was a step
    that is merely long, it gets through at the second try.
    """

    def __init__(self, now: float, min_hang_s: float = 10.0, after_hang: bool = False) -> None:
        self._min_hang_s = min_hang_s
        self._num_lenient = NUM_LENIENT_STEPS if after_hang else 0
        self._advanced_at = now
        self._mean_step_s = 0.0
        self._stalled_s = 0.0

    @property
    def limit_s(self) -> float:
        min_hang_s = 2 * self._min_hang_s if self._num_lenient else self._min_hang_s
        return max(min_hang_s, HANG_FACTOR * self._mean_step_s)

    @property
    def is_hung(self) -> bool:
        return self._stalled_s > self.limit_s

    def record_step(self, step_s: float) -> None:
        """A step has ended."""
        self._mean_step_s += STEP_WEIGHT * (step_s - self._mean_step_s)
        self._num_lenient = max(0, self._num_lenient - 1)
        self._stalled_s = 0.0

    def advance(self, now: float, has_work: bool) -> None:
        """Time has passed."""
        elapsed_s, self._advanced_at = now - self._advanced_at, now
        self._stalled_s = self._stalled_s + min(elapsed_s, MAX_TICK_S) if has_work else 0.0


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How often an engine is replaced before it is given up."""

    max_restarts: int = 10
    window_s: float = 600.0
    hang_s: float = 10.0
    """The least time without a step that is taken for a hang."""


class RestartBudget:
    """Counts replacements within the window."""

    def __init__(self, limits: RestartLimits) -> None:
        self.limits = limits
        self._spent_at: deque[float] = deque()

    def spend(self, now: float) -> bool:
        """Take one, if there is one left."""
        while self._spent_at and self._spent_at[0] <= now - self.limits.window_s:
            self._spent_at.popleft()
        if len(self._spent_at) >= self.limits.max_restarts:
            return False
        self._spent_at.append(now)
        return True
