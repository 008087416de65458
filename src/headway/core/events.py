"""What happened, as frozen values. Metrics, logs, streams, audit and billing all read these;
the core knows none of them.

Each accepted request (and each forked sample) has exactly one Finished event.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headway.core.causes import CauseTime, PreemptionMethod, WaitCause
from headway.core.plan import TokenLogprobs
from headway.core.request import FinishReason
from headway.core.slo.forecast import Forecast
from headway.core.terms import NO_TERMS, Terms


@dataclass(frozen=True, slots=True)
class Arrived:
    """A request was accepted into the waiting line."""

    request_id: str
    at: float
    num_prompt_tokens: int
    terms: Terms = NO_TERMS


@dataclass(frozen=True, slots=True)
class Refused:
    """A request was turned away; it never waited and holds nothing."""

    request_id: str
    at: float
    reason: str
    message: str
    retry_after_s: float = 0.0
    """When it may be different; 0 if that is not known, or never."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request joined the running ones, at first or again."""

    request_id: str
    at: float
    waited_s: float
    """Since it arrived or was last preempted; of a resent request, without the time in which it
    ran or there was no engine."""
    num_cached_tokens: int
    num_tokens: int
    is_resumed: bool
    causes: tuple[CauseTime, ...] = ()
    """What it waited for; the seconds add up to `waited_s`."""
    held_by: str = ""
    """The tenant that held most of what it waited for, if it waited for seats or blocks."""
    num_recomputed: int = 0
    """Tokens it had computed before it was preempted, and has to compute again."""


@dataclass(frozen=True, slots=True)
class Forked:
    """A prompt's prefill is done and one more sample of it begins."""

    request_id: str
    at: float
    parent_id: str


class TokensEmitted(NamedTuple):
    """A request gained output tokens; they are final."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclass(frozen=True, slots=True)
class Preempted:
    """A running request gave up its seat, and as many of its blocks as were needed."""

    request_id: str
    at: float
    by: str
    num_tokens_lost: int
    """Lost at once. What it kept may be taken later: Admitted says what came to be lost."""
    method: PreemptionMethod = PreemptionMethod.RECOMPUTE
    cause: WaitCause = WaitCause.KV_BLOCKS
    """What the request that caused it was in need of."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A request left; its blocks are free."""

    request_id: str
    at: float
    reason: FinishReason
    num_output_tokens: int
    message: str = ""
    causes: tuple[CauseTime, ...] = ()
    """What it was waiting for, if it left from the waiting line."""
    kv_block_s: float = 0.0
    """Blocks it held, times the seconds it held them."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step ended, with the state of the engine after it."""

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
    """What the engine can still take on, for SLO admission in other processes."""


@dataclass(frozen=True, slots=True)
class Idled:
    """The last request was aborted: no step will follow to say what is left."""

    at: float
    num_blocks_used: int


@dataclass(frozen=True, slots=True)
class EngineLost:
    """An engine failed, and every request in it is in none now. Told by who owns the engine, as
    the engine itself no longer can."""

    at: float


@dataclass(frozen=True, slots=True)
class Resent:
    """A request that had no engine, since the one before failed, was given to the next."""

    request_id: str
    at: float


Event = (
    Arrived
    | Refused
    | Admitted
    | Forked
    | TokensEmitted
    | Preempted
    | Finished
    | Stepped
    | Idled
    | EngineLost
    | Resent
)
Sink = Callable[[Sequence[Event]], None]
