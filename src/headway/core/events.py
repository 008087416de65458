"""Events of the engine, as frozen values.

Streams, the request table, metrics and logs read them; the core knows none of these readers.
Each accepted request and each forked sample has exactly one Finished event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.core.causes import CauseTime, PreemptionMethod, WaitCause
from headway.core.owners import BlockOwners
from headway.core.plan import TokenLogprobs
from headway.core.request import FailureCause, FinishReason
from headway.core.slo.forecast import Forecast
from headway.core.terms import NO_TERMS, Terms


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request joined the waiting queue."""

    request_id: str
    at: float
    num_prompt_tokens: int
    terms: Terms = NO_TERMS
    max_tokens: int = 0
    """Most output tokens of each sample."""
    n: int = 1
    """Samples of the prompt."""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was refused; it never waited and has no blocks."""

    request_id: str
    at: float
    reason: str
    message: str
    retry_after_s: float = 0.0
    """Seconds until a retry may succeed; 0 if unknown or never."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request joined the running set, for the first time or after a preemption."""

    request_id: str
    at: float
    waited_s: float
    """Seconds since arrival or the last preemption.

    A resent request does not count the time in which it ran or had no engine.
    """
    num_cached_tokens: int
    num_tokens: int
    is_resumed: bool
    causes: tuple[CauseTime, ...] = ()
    """The wait by cause; the seconds add up to `waited_s`."""
    held_by: str = ""
    """The tenant with the most sequences or blocks, if the wait was for either."""
    num_recomputed: int = 0
    """Tokens computed before the preemption that must be computed again."""


@dataclass(frozen=True, slots=True)
class Forked:
    """The prefill of a prompt is complete and another sample of it begins."""

    request_id: str
    at: float
    parent_id: str


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of prompt tokens from position `start` on; each position comes once."""

    request_id: str
    start: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Embedded:
    """The prompt of a request is computed, and this is its embedding, as fp32."""

    request_id: str
    values: bytes


class TokensEmitted(NamedTuple):
    """A request gained output tokens, which never change."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request left the running set and lost as many blocks as were needed."""

    request_id: str
    at: float
    by: str
    """Id of the requester."""
    num_tokens_lost: int
    """Computed tokens dropped at once.

    Kept blocks may be freed later: `Admitted.num_recomputed` has the final count.
    """
    method: PreemptionMethod = PreemptionMethod.RECOMPUTE
    cause: WaitCause = WaitCause.KV_BLOCKS
    """What the requester needed."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended; its blocks are free."""

    request_id: str
    at: float
    reason: FinishReason
    num_output_tokens: int
    message: str = ""
    causes: tuple[CauseTime, ...] = ()
    """The wait by cause, if the request ended in the waiting queue."""
    kv_block_s: float = 0.0
    """Blocks held times seconds, over the whole life of the request."""
    failure_cause: FailureCause | None = None
    """What made a request fail in a step; None if none did."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step ended; the counts are those after the step."""

    step_id: int
    at: float
    elapsed_s: float
    num_tokens: int
    token_budget: int
    num_scheduled: int
    max_num_seqs: int
    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_blocks: int
    service_gap: float = 0.0
    """Largest difference between the service counters of waiting tenants, in weighted tokens."""
    forecast: Forecast | None = None
    """State for SLO admission in other processes."""
    predicted_s: float = 0.0
    """Time of this step by the step-time model before it; 0 if there was no prediction."""
    owners: BlockOwners | None = None
    """KV blocks by owner, in some of the steps."""


@dataclass(frozen=True, slots=True)
class Idled:
    """The last request was aborted, so no Stepped follows with the engine's state."""

    at: float
    num_blocks_used: int
    forecast: Forecast | None = None
    """State for SLO admission in other processes."""


@dataclass(frozen=True, slots=True)
class EngineLost:
    """An engine failed, and its requests have no engine.

    The owner of the requests emits this event, not an engine.
    """

    at: float
    request_ids: tuple[str, ...] | None = None
    """Samples of the requests that the engine had; None for all requests."""


@dataclass(frozen=True, slots=True)
class Resent:
    """A request of a failed engine was sent to its replacement."""

    request_id: str
    at: float


@dataclass(frozen=True, slots=True)
class Routed:
    """A request was sent to the engine that a router chose.

    The owner of the requests emits this event, not an engine.
    """

    request_id: str
    at: float
    engine: str
    reason: str
    waited_s: float
    """Seconds in the router."""
    num_cached_tokens: int
    """Prompt tokens that the engine was expected to have cached."""
    predicted_ttft_s: float = 0.0
    """Predicted time from arrival to the first token; 0 if none was predicted."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """This process took over a sample of another frontend, with its output so far.

    The owner of the requests emits this event, not an engine.
    """

    request_id: str
    at: float
    arrived_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    terms: Terms = NO_TERMS
    num_cached_tokens: int | None = None
    """Prefix hit of the first admission; None before it."""
    attempt: int = 0
    """Number of the attempt that begins here: higher than that of any frontend before."""
    is_fork: bool = False
    max_tokens: int = 0
    n: int = 1
    priority: int = 0


Event = (
    Arrived
    | Refused
    | Admitted
    | Forked
    | PromptScored
    | Embedded
    | TokensEmitted
    | Preempted
    | Finished
    | Stepped
    | Idled
    | EngineLost
    | Resent
    | Routed
    | Adopted
)
Sink = Callable[[Sequence[Event]], None]
