"""What a recording of a router holds, as msgspec structs.

Engines and requests go by numbers, in the order in which they joined and arrived. Whether an engine
may have a request is asked of the frontend: of the questions of a call, those answered with no are
recorded, by their position.
"""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import msgspec

from headway.core.slo.steptime import StepCost
from headway.core.terms import NO_TERMS, Terms
from headway.record.entries import ClosedEntry, Header

ROUTER = "router"
NO_ENGINE = -1


class RouterHeader(Header, frozen=True, kw_only=True):
    """What a router was made with."""

    kind: str = ROUTER
    rule: str
    """How it chooses an engine."""


class RecordedCost(NamedTuple):
    """A StepCost, field by field."""

    constant_s: float
    per_decode_s: float
    per_prefill_token_s: float
    per_context_token_s: float
    per_attended_s: float
    error: float
    num_steps: int

    @staticmethod
    def of(cost: StepCost) -> RecordedCost:
        return RecordedCost(*(getattr(cost, one.name) for one in fields(cost)))


class KnownHashes(NamedTuple):
    """Salted hashes of the full blocks of a live request."""

    request: int
    hashes: bytes


class MovedRequest(NamedTuple):
    """A request that waits, and the engine that it waits for now."""

    request: int
    engine: int


class JoinedEntry(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """An engine joined."""

    name: str
    num_blocks: int
    block_size: int
    max_num_seqs: int
    token_budget: int
    has_prefix_cache: bool
    cost: RecordedCost | None = None
    """Step-time coefficients, if they are known before its first report."""
    hashes: list[KnownHashes] = []
    """Of requests that arrived before the size of a block was known."""


class LostEntry(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """An engine was lost."""

    now: float
    engine: int
    moved: list[MovedRequest] = []
    """Requests that waited for it."""
    denied: list[int] = []


class DrainingEntry(msgspec.Struct, frozen=True, array_like=True, tag=22):
    """An engine gets no further requests."""

    now: float
    engine: int
    moved: list[MovedRequest] = []
    """Requests that waited for it."""
    denied: list[int] = []


class SteppedEntry(msgspec.Struct, frozen=True, array_like=True, tag=23):
    """An engine reported a step."""

    now: float
    engine: int
    elapsed_s: float
    num_tokens: int
    token_budget: int
    num_scheduled: int
    num_known: int
    """Requests that the engine has, running or waiting."""
    num_blocks_used: int
    cost: RecordedCost | None = None
    """Step-time coefficients of the engine; None: as in its last report."""


class IdleEntry(msgspec.Struct, frozen=True, array_like=True, tag=24):
    """An engine reported that it has no requests."""

    engine: int
    num_blocks_used: int


class ArrivedEntry(msgspec.Struct, array_like=True, tag=25, kw_only=True):
    """A request arrived and was assigned or refused, or an engine has it already."""

    now: float
    id: str
    num_tokens: int
    num_prompt_tokens: int
    max_tokens: int
    arrived_at: float
    engine: int = NO_ENGINE
    """The engine that it was assigned to, if any."""
    late_s: float | None = None
    """Retry-After of the refusal; None: it was not refused."""
    is_sent: bool = False
    """Whether the engine had it already, by a decision that was made elsewhere."""
    is_resent: bool = False
    hashes: bytes = b""
    """Salted hashes of the full blocks."""
    terms: Terms = NO_TERMS
    """Without the cache salt, which is a text of the client; the hashes depend on it."""
    priority: int = 0
    n: int = 1
    has_prompt_logprobs: bool = False
    denied: list[int] = []


class ReassignedEntry(msgspec.Struct, frozen=True, array_like=True, tag=26):
    """The engine of a request was chosen anew."""

    now: float
    request: int
    engine: int
    denied: list[int] = []


class ForgottenEntry(msgspec.Struct, frozen=True, array_like=True, tag=27):
    """A request was forgotten with its engine."""

    request: int


class AdmittedEntry(msgspec.Struct, frozen=True, array_like=True, tag=28):
    """An engine admitted a request."""

    request: int
    num_cached_tokens: int


class FirstTokenEntry(msgspec.Struct, frozen=True, array_like=True, tag=29):
    """A request has its first token."""

    request: int


class EndedEntry(msgspec.Struct, frozen=True, array_like=True, tag=30):
    """A request ended, or is not wanted any more."""

    now: float
    """Time of the last call that had one."""
    request: int
    num_output_tokens: int = 0
    """Of the first sample, since the request arrived."""
    hashes: bytes = b""
    """Salted hashes of the blocks that the output filled."""


class RecordedSending(NamedTuple):
    """A request that was sent to an engine."""

    request: int
    engine: int
    reason: str
    num_cached: int
    predicted_ttft_s: float


class TickEntry(msgspec.Struct, frozen=True, array_like=True, tag=31):
    """The router was asked what to send now."""

    now: float
    sendings: list[RecordedSending] = []
    denied: list[int] = []


RouterEntry = (
    JoinedEntry
    | LostEntry
    | DrainingEntry
    | SteppedEntry
    | IdleEntry
    | ArrivedEntry
    | ReassignedEntry
    | ForgottenEntry
    | AdmittedEntry
    | FirstTokenEntry
    | EndedEntry
    | TickEntry
)

decode_entries = msgspec.msgpack.Decoder(list[RouterEntry | ClosedEntry]).decode
decode_header = msgspec.msgpack.Decoder(RouterHeader).decode
