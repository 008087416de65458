"""Clocks: the system clock for a server, a virtual clock for a simulator."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Returns the time in seconds from an arbitrary origin; never runs backwards."""

    def now(self) -> float: ...


class SystemClock:
    """The monotonic clock; all processes of one machine share its origin."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only in `advance_to`."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance_to(self, at: float) -> None:
        if at < self._now:
            raise ValueError(f"a clock cannot run backwards: {at} < {self._now}")
        self._now = at
