"""The account of a request: timeline, waits by cause, token counts.

Plain values, written as JSON. Times within a request are seconds since its arrival.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from headway.core.causes import WaitCause

ENGINE_RESTART = "engine_restart"
"""Cause: from an engine failure until the request was resent."""
ROUTER = "router"
"""Cause: in the router, until an engine could begin the request."""
UNRECORDED = "unrecorded"
"""Cause: the engine that knew the cause of this wait is gone."""
OTHER_TENANT = "another tenant"
_CAUSES_WITH_HOLDER = frozenset({WaitCause.KV_BLOCKS, WaitCause.RUNNING_LIMIT})


class CauseShare(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds of a wait with one cause."""

    cause: str
    seconds: float
    held_by: str = ""
    """Tenant that held most of the resource the request waited for."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of the timeline.

    `kind` is arrived, waited, admitted, first_token, preempted, engine_lost, adopted or
    finished, and for a live request also waiting.
    """

    at_s: float
    kind: str
    part: str = ""
    """Prompt or sample; empty for the first."""
    seconds: float | None = None
    """Duration of a wait, or of an interruption until the request ran again."""
    causes: tuple[CauseShare, ...] = ()
    num_tokens: int = 0
    """Tokens of the prompt, of the prefix hit, lost to a preemption, or of the output."""
    by: str = ""
    """The requester of a preemption."""
    by_tenant: str = ""
    cause: str = ""
    """What the requester needed, or the finish reason."""
    method: str = ""


class RequestAccount(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The account of an HTTP request.

    Sums go over all its prompts and samples.
    """

    id: str
    state: str
    """waiting, running or finished."""
    arrived_at: float
    """Seconds since 1970; the only wall-clock time here."""
    duration_s: float
    tenant: str = ""
    tier: str = ""
    client_id: str = ""
    """The X-Request-Id header of the response."""
    max_tokens: int = 0
    """Most output tokens of a sample; 0 also in rows of releases that did not write it."""
    n: int = 1
    """Samples of each prompt."""
    priority: int = 0
    weight: float = 1.0
    max_kv_share: float = 1.0
    is_spot: bool = False
    target_ttft_s: float | None = None
    target_tpot_s: float | None = None
    deadline_s: float | None = None
    finish_reason: str = ""
    num_parts: int = 1
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_billed_prompt_tokens: int = 0
    num_billed_cached_tokens: int = 0
    first_token_s: float | None = None
    queue_s: float = 0.0
    """Sum of all waits; equals the sum of `causes`."""
    kv_block_s: float = 0.0
    causes: tuple[CauseShare, ...] = ()
    num_preemptions: int = 0
    num_engines_lost: int = 0
    timeline: tuple[Entry, ...] = ()
    num_entries_left_out: int = 0


def add_up(shares: Iterable[CauseShare]) -> tuple[CauseShare, ...]:
    """Return one share per cause, longest first, with its main holder."""
    seconds: dict[str, float] = {}
    holders: dict[str, dict[str, float]] = {}
    for share in shares:
        seconds[share.cause] = seconds.get(share.cause, 0.0) + share.seconds
        if share.held_by:
            of_cause = holders.setdefault(share.cause, {})
            of_cause[share.held_by] = of_cause.get(share.held_by, 0.0) + share.seconds
    by_length = sorted(seconds, key=lambda cause: -seconds[cause])
    return tuple(
        CauseShare(
            cause, seconds[cause], max(of_cause, key=lambda name: of_cause[name], default="")
        )
        for cause in by_length
        for of_cause in (holders.get(cause, {}),)
    )


def cause_shares(seconds: Iterable[tuple[str, float]], held_by: str) -> tuple[CauseShare, ...]:
    """Return shares with a duration above 0; `held_by` only where a holder applies."""
    return tuple(
        CauseShare(str(cause), value, held_by if cause in _CAUSES_WITH_HOLDER else "")
        for cause, value in seconds
        if value > 0.0
    )


def for_tenant(account: RequestAccount) -> RequestAccount:
    """Return the account without the names of other tenants."""
    own = account.tenant
    return replace(
        account,
        causes=_without_others(account.causes, own),
        timeline=tuple(_entry_for(entry, own) for entry in account.timeline),
    )


def _entry_for(entry: Entry, own: str) -> Entry:
    entry = replace(entry, causes=_without_others(entry.causes, own))
    if not entry.by or entry.by_tenant == own:
        return entry
    return replace(entry, by="", by_tenant=OTHER_TENANT)


def _without_others(shares: Iterable[CauseShare], own: str) -> tuple[CauseShare, ...]:
    return tuple(
        replace(share, held_by=OTHER_TENANT) if share.held_by not in ("", own) else share
        for share in shares
    )
