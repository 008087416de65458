"""When an engine process counts as hung, and how often it is replaced."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_TICK_S = 1.0
"""Most that one reading of the clock adds to a stall.

If the API process itself was delayed, reports are unread, and the engine may have made progress.
"""
COMPUTING_WEIGHT = 0.1
"""What time counts in which the engine used a CPU: a long step, a busy machine or a large model.

A process that is stopped or waits for a lock uses none.
"""
HANG_FACTOR = 20.0
STEP_WEIGHT = 0.1
"""Weight of the newest step in the moving average of step times."""
NUM_LENIENT_STEPS = 8


class HangDetector:
    """Detects a hung engine: it has work and has ended no step for `limit_s`.

    Time in which the engine computes counts a tenth. The limit is 20 times the moving average of
    its step times, and at least `min_hang_s`. After a hang, the next engine has twice the time for
    its first steps: a step that is merely long then ends at the second attempt.
    """

    def __init__(self, now: float, min_hang_s: float = 10.0, after_hang: bool = False) -> None:
        self._min_hang_s = min_hang_s
        self._num_lenient = NUM_LENIENT_STEPS if after_hang else 0
        self._advanced_at = now
        self._cpu_s = 0.0
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
        """Record a step that ended."""
        self._mean_step_s += STEP_WEIGHT * (step_s - self._mean_step_s)
        self._num_lenient = max(0, self._num_lenient - 1)
        self._stalled_s = 0.0

    def advance(self, now: float, has_work: bool, cpu_s: float) -> None:
        """Add the time since the last call, in which nothing was reported, to the stall.

        `cpu_s` is the CPU time that the engine process has used since its start.
        """
        elapsed_s, self._advanced_at = min(now - self._advanced_at, MAX_TICK_S), now
        is_computing, self._cpu_s = cpu_s > self._cpu_s, cpu_s
        stalled_s = elapsed_s * COMPUTING_WEIGHT if is_computing else elapsed_s
        self._stalled_s = self._stalled_s + stalled_s if has_work else 0.0


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How often an engine is replaced in a time window before it is given up."""

    max_restarts: int = 10
    window_s: float = 600.0
    hang_s: float = 10.0
    """Shortest time without a step that counts as a hang."""


class RestartBudget:
    """Counts replacements within the window."""

    def __init__(self, limits: RestartLimits) -> None:
        self.limits = limits
        self._spent_at: deque[float] = deque()

    def spend(self, now: float) -> bool:
        """Count one replacement; return False if none is left."""
        while self._spent_at and self._spent_at[0] <= now - self.limits.window_s:
            self._spent_at.popleft()
        if len(self._spent_at) >= self.limits.max_restarts:
            return False
        self._spent_at.append(now)
        return True
