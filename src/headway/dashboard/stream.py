"""The stream of the dashboard: two frames a second, each made once for all viewers.

There is no task: the first viewer that wakes in a tick makes the frame, and the others send the
same bytes. Without viewers nothing is made. A viewer that reads slowly misses frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from headway.clock import Clock
from headway.dashboard.frames import FrameMaker
from headway.server.http.errors import ApiError, ErrorResponse
from headway.server.http.sse import EventSource, typed_event

TICK_S = 0.5
HISTORY_TICKS = 5
"""Ticks between two frames with the history."""
MAX_VIEWERS = 16

_FULL = ErrorResponse(
    503,
    f"the dashboard has {MAX_VIEWERS} viewers, which is the most; close one",
    "service_unavailable_error",
    "too_many_viewers",
    headers={"Retry-After": "5"},
)


class DashboardStream:
    """Gives frames to viewers; ends their streams when the server stops."""

    def __init__(self, frames: FrameMaker, clock: Clock, is_over: Callable[[], bool]) -> None:
        self._frames = frames
        self._clock = clock
        self._is_over = is_over
        self.num_viewers = 0
        self._now = (-1, b"")
        self._history = (-1, b"")

    def open(self) -> EventSource:
        """Return the frames for one more viewer, or refuse it."""
        if self.num_viewers >= MAX_VIEWERS:
            raise ApiError(_FULL)
        first = self._make_history() + self._make_now()
        self.num_viewers += 1
        return EventSource(first, self._rest(), self._leave)

    async def _leave(self) -> None:
        self.num_viewers -= 1

    async def _rest(self) -> AsyncGenerator[bytes, None]:
        sent = self._history[0]
        while not self._is_over():
            now = self._clock.now()
            await asyncio.sleep(TICK_S - now % TICK_S)
            frame = self._make_now()
            if self._history_number() != sent:
                frame = self._make_history() + frame
                sent = self._history[0]
            yield frame

    def _history_number(self) -> int:
        return int(self._clock.now() / (TICK_S * HISTORY_TICKS))

    def _make_now(self) -> bytes:
        tick = int(self._clock.now() / TICK_S)
        if self._now[0] != tick:
            self._now = tick, typed_event(self._frames.now())
        return self._now[1]

    def _make_history(self) -> bytes:
        number = self._history_number()
        if self._history[0] != number:
            self._history = number, typed_event(self._frames.history())
        return self._history[1]
