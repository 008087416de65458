"""When is an engine process taken for hung, and how often may it be replaced? Pure decisions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_TICK_S = 1.0
"""What one look at the clock may add to a silence: if this process itself was held up, the
engine's reports are waiting unread, and nobody knows yet whether it was silent."""
STEP_WEIGHT = 0.1
"""Of the newest step in the moving average of step times."""


class Pulse:
    """Tells a hung engine from a busy one: it has work and has not finished a step for long.

    Long is `factor` times the moving average of its step times, and never less than `least_s`.
    """

    def __init__(self, now: float, least_s: float = 10.0, factor: float = 20.0) -> None:
        self._least_s = least_s
        self._factor = factor
        self._looked_at = now
        self._mean_step_s = 0.0
        self._silent_s = 0.0

    @property
    def limit_s(self) -> float:
        return max(self._least_s, self._factor * self._mean_step_s)

    @property
    def is_hung(self) -> bool:
        return self._silent_s > self.limit_s

    def beat(self, step_s: float) -> None:
        """A step has ended."""
        self._mean_step_s += STEP_WEIGHT * (step_s - self._mean_step_s)
        self._silent_s = 0.0

    def look(self, now: float, has_work: bool) -> None:
        """Time has passed."""
        elapsed_s, self._looked_at = now - self._looked_at, now
        self._silent_s = self._silent_s + min(elapsed_s, MAX_TICK_S) if has_work else 0.0


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How often an engine is replaced before it is given up."""

    max_restarts: int = 10
    window_s: float = 600.0


class RestartBudget:
    """Counts replacements within the window."""

    def __init__(self, limits: RestartLimits) -> None:
        self.limits = limits
        self._at: deque[float] = deque()

    def spend(self, now: float) -> bool:
        """Take one, if there is one left."""
        while self._at and self._at[0] <= now - self.limits.window_s:
            self._at.popleft()
        if len(self._at) >= self.limits.max_restarts:
            return False
        self._at.append(now)
        return True
