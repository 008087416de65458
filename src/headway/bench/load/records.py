"""What a load run leaves behind for each request: when things happened, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

REFUSAL_STATUSES = (429, 503)


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    REFUSED = "refused"
    """Answered 429 or 503: the server chose not to serve it now."""
    FAILED = "failed"
    """Any other status, no connection, a broken stream, a timeout."""
    UNFINISHED = "unfinished"
    """Still under way when the run was interrupted."""


@dataclass(slots=True)
class LoadRecord:
    """One request. Times are seconds since the run began.

    Latencies count from `scheduled_at`, when the request should have been sent, so that a client
    held up by a slow server does not hide the wait. In a closed loop that is when it was sent.
    """

    index: int
    tenant: str | None
    scheduled_at: float
    num_prompt_tokens: int
    """As the server counted it, where it said so."""
    sent_at: float | None = None
    chunk_times: list[float] = field(default_factory=list[float])
    chunk_tokens: list[int] = field(default_factory=list[int])
    """Tokens that arrived at each of the times; see `spread_tokens` where a chunk held several."""
    ended_at: float | None = None
    status: int | None = None
    retry_after: str | None = None
    error: str | None = None
    num_cached_tokens: int | None = None
    has_usage: bool = False
    """The server gave the number of output tokens; else events were counted."""
    finish_reason: str | None = None

    @property
    def outcome(self) -> Outcome:
        if self.ended_at is None:
            return Outcome.UNFINISHED
        if self.status in REFUSAL_STATUSES:
            return Outcome.REFUSED
        return Outcome.COMPLETED if self.error is None else Outcome.FAILED

    @property
    def num_output_tokens(self) -> int:
        return sum(self.chunk_tokens)

    @property
    def first_token_at(self) -> float | None:
        return self.chunk_times[0] if self.chunk_times else None

    @property
    def lateness_s(self) -> float | None:
        """How much later than planned the client sent it."""
        return None if self.sent_at is None else self.sent_at - self.scheduled_at

    @property
    def ttft_s(self) -> float | None:
        return self.chunk_times[0] - self.scheduled_at if self.chunk_times else None

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_at is None else self.ended_at - self.scheduled_at

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        num_tokens = self.num_output_tokens
        if num_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (num_tokens - 1)

    def gaps_s(self) -> list[float]:
        """The waits between chunks, as a reader sees them."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]


def spread_tokens(num_tokens: int, weights: Sequence[int]) -> list[int]:
    """Divide an exact total over chunks in proportion to their weights, rounding so that the sum
    is kept. Used where a server put several tokens into a chunk without saying how many."""
    total = sum(weights)
    if total == 0:
        return [num_tokens, *[0] * (len(weights) - 1)] if weights else []
    given: list[int] = []
    seen = handed_out = 0
    for weight in weights:
        seen += weight
        given.append(num_tokens * seen // total - handed_out)
        handed_out += given[-1]
    return given
