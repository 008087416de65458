"""Durations of the stages of a request, from events.

Tokens carry no time: they exist from the end of their step. So events are consumed one step at a
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.events import Admitted, Arrived, Event, Finished, Forked, TokensEmitted
from headway.core.request import FinishReason
from headway.core.terms import NO_TERMS, Terms


@dataclass(slots=True)
class Lifetime:
    """Times and counts of one live request or forked sample."""

    num_prompt_tokens: int
    arrived_at: float
    terms: Terms = NO_TERMS
    is_fork: bool = False
    waited_s: float | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of a finished request; None for a stage it did not reach."""

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    e2e_s: float
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    ttft_s: float | None
    terms: Terms

    @property
    def time_per_output_token_s(self) -> float | None:
        """TPOT; None with fewer than two output tokens."""
        if self.decode_s is None or self.num_output_tokens < 2:
            return None
        return self.decode_s / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class TokenGap:
    """Tokens gained in a step, and the time since the previous tokens or the arrival."""

    gap_s: float
    num_tokens: int
    is_first: bool
    num_prompt_tokens: int
    """Tokens of the prompt whose prefill ended; 0 if none did."""


class Lifetimes:
    """Lifetimes of all live requests."""

    def __init__(self) -> None:
        self._live: dict[str, Lifetime] = {}

    def __len__(self) -> int:
        return len(self._live)

    def arrive(self, event: Arrived) -> None:
        """Add a request."""
        self._live[event.request_id] = Lifetime(event.num_prompt_tokens, event.at, event.terms)

    def admit(self, event: Admitted) -> bool:
        """Record an admission; return True for the first one of a prompt."""
        life = self._live.get(event.request_id)
        if life is None or life.waited_s is not None:
            return False
        # From arrival in the API process; `event.waited_s` excludes time without an engine.
        life.waited_s = event.at - life.arrived_at
        life.admitted_at = event.at
        return True

    def fork(self, event: Forked) -> None:
        """Add a forked sample of a request."""
        parent = self._live.get(event.parent_id)
        if parent is None:
            return
        self._live[event.request_id] = Lifetime(
            parent.num_prompt_tokens,
            parent.arrived_at,
            parent.terms,
            is_fork=True,
            waited_s=parent.waited_s,
            admitted_at=parent.admitted_at,
        )

    def emit(self, event: TokensEmitted, at: float) -> TokenGap | None:
        """Record the tokens of a step; None for an unknown request."""
        life = self._live.get(event.request_id)
        if life is None:
            return None
        num_tokens = len(event.token_ids)
        before, life.last_token_at = life.last_token_at, at
        life.num_output_tokens += num_tokens
        if before is not None:
            return TokenGap(at - before, num_tokens, False, 0)
        life.first_token_at = at
        num_prompt = 0 if life.is_fork else life.num_prompt_tokens
        return TokenGap(at - life.arrived_at, num_tokens, True, num_prompt)

    def finish(self, event: Finished) -> Timings | None:
        """Remove a request; return its timings."""
        life = self._live.pop(event.request_id, None)
        if life is None:
            return None
        return Timings(
            event.reason,
            life.num_prompt_tokens,
            life.num_output_tokens,
            event.at - life.arrived_at,
            life.waited_s,
            _between(life.admitted_at, life.first_token_at),
            _between(life.first_token_at, life.last_token_at),
            _between(life.arrived_at, life.first_token_at),
            life.terms,
        )


def step_time(events: Sequence[Event]) -> float:
    """Return the time of the last event, which is the end of the step."""
    return max((event.at for event in events if not isinstance(event, TokensEmitted)), default=0.0)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
