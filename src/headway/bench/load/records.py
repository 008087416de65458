"""Record of one request of a load run: times and outcome."""

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
    """The server answered 429 or 503."""
    FAILED = "failed"
    """Any other status, no connection, a broken stream, a timeout."""
    UNFINISHED = "unfinished"
    """In flight when the run was interrupted."""


@dataclass(slots=True)
class LoadRecord:
    """One request; times are seconds since the start of the run.

    Latencies count from `scheduled_at`, the planned send time, so that a slow server that delays
    the client does not hide the wait. In a closed loop `scheduled_at` is the send time.
    """

    index: int
    tenant: str | None
    scheduled_at: float
    num_prompt_tokens: int
    """Prompt tokens by the usage of the server, if it reports any."""
    sent_at: float | None = None
    chunk_times: list[float] = field(default_factory=list[float])
    chunk_tokens: list[int] = field(default_factory=list[int])
    """Tokens per chunk; see `spread_tokens` for chunks of several tokens."""
    ended_at: float | None = None
    status: int | None = None
    retry_after: str | None = None
    error: str | None = None
    num_cached_tokens: int | None = None
    has_usage: bool = False
    """Whether the server reported output tokens; else events were counted."""
    finish_reason: str | None = None
    request_id: str | None = None
    """Id that the server gave the request."""

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
        """Delay of the client against the planned send time."""
        return None if self.sent_at is None else self.sent_at - self.scheduled_at

    @property
    def ttft_s(self) -> float | None:
        return self.chunk_times[0] - self.scheduled_at if self.chunk_times else None

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_at is None else self.ended_at - self.scheduled_at

    @property
    def tpot_s(self) -> float | None:
        """TPOT; None for a response of one token."""
        num_tokens = self.num_output_tokens
        if num_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (num_tokens - 1)

    def gaps_s(self) -> list[float]:
        """Times between chunks."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]


def spread_tokens(num_tokens: int, weights: Sequence[int]) -> list[int]:
    """Divide a total over chunks in proportion to their weights; the sum stays exact.

    For servers that put several tokens into a chunk without a count.
    """
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
