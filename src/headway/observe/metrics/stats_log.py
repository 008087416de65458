"""The statistics line of the log, from events and the request table."""

from __future__ import annotations

from headway.core.events import Admitted, Stepped
from headway.observe.requests.table import Changes, RequestTable


class StatsLog:
    """Counts tokens; `line` summarises the time since the last line."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self._last_at = 0.0
        self._last_step: Stepped | None = None
        self._is_quiet = True
        self._clear()

    def _clear(self) -> None:
        self._num_events = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_output_tokens = 0

    def start(self, now: float) -> None:
        """Start the time of the first line."""
        self._last_at = now

    def consume(self, changes: Changes) -> None:
        """Count the tokens of at most one step."""
        self._num_output_tokens += changes.num_output_tokens
        self._num_events += len(changes.events)
        for event in changes.events:
            match event:
                case Stepped():
                    self._last_step = event
                case Admitted() if not event.is_resumed:
                    self._num_prompt_tokens += event.num_tokens
                    self._num_cached_tokens += event.num_cached_tokens
                case _:
                    pass

    def line(self, now: float) -> str | None:
        """Return the line for the time since the last call; None if idle.

        After the last activity follows one more line, so that the log ends with an idle state.
        """
        is_idle = self._num_events == 0 and not self._requests.num_live_parts
        text = None if is_idle and self._is_quiet else self._text(max(now - self._last_at, 1e-9))
        self._is_quiet = is_idle
        self._last_at = now
        self._clear()
        return text

    def _text(self, elapsed_s: float) -> str:
        step = self._last_step
        num_running = num_waiting = 0
        kv_share = 0.0
        # After an abort of the last request, the last step is out of date.
        if step is not None and self._requests.num_live_parts:
            num_running, num_waiting = step.num_running, step.num_waiting
            kv_share = step.num_blocks_used / step.num_blocks
        hit_share = self._num_cached_tokens / (self._num_prompt_tokens or 1)
        return (
            f"running {num_running}, waiting {num_waiting}, KV {kv_share:.1%}, "
            f"prompt {self._num_prompt_tokens / elapsed_s:.1f} tok/s, "
            f"output {self._num_output_tokens / elapsed_s:.1f} tok/s, "
            f"prefix hits {hit_share:.1%}"
        )
