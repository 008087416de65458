"""A thread that keeps the last frames of a server, and connects again when they end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from headway.cli.top.client import DashboardClient, TopError
from headway.cli.top.messages import HistoryFrame, NowFrame, SlowRequests, StreamFrame

RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class TopState:
    """What is known of the server; `problem` says why it may be old."""

    now: NowFrame | None = None
    history: HistoryFrame | None = None
    requests: SlowRequests | None = None
    problem: str = ""

    @property
    def is_complete(self) -> bool:
        return self.now is not None and self.history is not None and self.requests is not None


def read_once(client: DashboardClient) -> TopState:
    """Return one state; rates need two frames."""
    state, num_frames = TopState(), 0
    for frame in client.frames():
        state = _with_frame(state, frame)
        num_frames += isinstance(frame, NowFrame)
        if num_frames == 2 and state.history is not None:
            return replace(state, requests=client.requests())
    raise TopError(f"{client.url} ended the stream; does it stop?")


def _with_frame(state: TopState, frame: StreamFrame) -> TopState:
    if isinstance(frame, NowFrame):
        return replace(state, now=frame, problem="")
    return replace(state, history=frame)


class Follower:
    """Reads frames in a thread of its own; `on_change` is called in that thread."""

    def __init__(self, client: DashboardClient, on_change: Callable[[], None]) -> None:
        self._client = client
        self._on_change = on_change
        self.state = TopState()
        """Replaced as a whole, by the thread alone."""
        self.failure: TopError | None = None
        """Why the thread has ended."""
        self._thread = threading.Thread(target=self._run, name="frames", daemon=True)

    def start(self) -> None:
        """Start the thread; it ends with the process, or with a failure."""
        self._thread.start()

    def _run(self) -> None:
        while self.failure is None:
            try:
                self._read_frames()
                problem = "the server has ended the stream"
            except TopError as error:
                problem = str(error)
                if error.is_final or not (error.is_answer or self.state.is_complete):
                    self.failure = error
            self.state = replace(self.state, problem=problem)
            self._on_change()
            time.sleep(RETRY_S if self.failure is None else 0.0)

    def _read_frames(self) -> None:
        for frame in self._client.frames():
            self.state = _with_frame(self.state, frame)
            if isinstance(frame, HistoryFrame):
                self.state = replace(self.state, requests=self._client.requests())
            if self.state.is_complete:
                self._on_change()
