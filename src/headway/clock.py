"""Time as a value that is passed in: the system's for a server, a virtual one for a simulator."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Answers what time it is, in seconds from an arbitrary origin; never runs backwards."""

    def now(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock: the same origin in every process of one machine."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance_to(self, at: float) -> None:
        if at < self._now:
            raise ValueError(f"a clock cannot run backwards: {at} < {self._now}")
        self._now = at
