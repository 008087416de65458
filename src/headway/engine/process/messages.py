"""Messages between the API process and the engine process.

msgspec encodes the structs as msgpack; pickle is never used. Core values (params, events) are sent
unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from headway.core.events import (
    Admitted,
    Adopted,
    Arrived,
    Embedded,
    EngineLost,
    Event,
    Finished,
    Forked,
    Idled,
    Preempted,
    PromptScored,
    Refused,
    Resent,
    Routed,
    Stepped,
    TokensEmitted,
)
from headway.core.executor import Capacity
from headway.core.params import SamplingParams
from headway.core.plan import TokenLogprobs
from headway.core.request import FinishReason
from headway.core.terms import NO_TERMS, Terms

CHARS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts about a loaded engine that its clients need."""

    capacity: Capacity
    max_num_seqs: int
    vocab_size: int
    notes: tuple[str, ...] = ()
    """How "auto" settings were resolved, for the log."""
    scheduling_policy: str = "fcfs"
    """Clients refuse a `priority` under a policy that ignores it."""
    dtype: str = "auto"
    kv_cache_bytes: int | None = None
    """The resolved size; an engine that takes over gets the same."""
    has_prefix_cache: bool = True
    kv_dtype: str = "auto"
    activation_dtype: str = "auto"
    kernels: str | None = None
    """Instruction set of the compiled kernels; None without them."""
    hidden_size: int = 0
    """Numbers of an embedding."""
    numerics: str = ""
    """Numerics class: engines of the same class compute the same tokens. Empty if unknown."""


class SampleRecord(msgspec.Struct, omit_defaults=True):
    """Output of one sample so far: all that is needed to deliver it again."""

    index: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    """One per token; None if the request asked for none."""
    reason: FinishReason | None = None
    """Why the sample ended; None while it has not."""


class Past(msgspec.Struct, frozen=True):
    """Output that a resumable request had before it was sent again."""

    num_samples: int
    """Samples of the whole request; each is sent alone."""
    samples: list[SampleRecord]
    num_cached_tokens: int | None = None
    """Prefix hit of the first admission, which is billed; None before it."""


class Note(NamedTuple):
    """What makes a request one that another frontend can continue."""

    content: bytes = b""
    """What a frontend needs to answer the request; empty if none may continue it."""
    alias: str = ""
    """Another name by which a frontend can ask for the request; empty for none."""


NO_NOTE = Note()


class AddRequest(msgspec.Struct, tag="add", frozen=True, omit_defaults=True):
    """Add a request that passed validation; its params are resolved.

    A request that continues after a crash has its output so far after its prompt, and is sent once
    per sample.
    """

    id: str
    token_ids: list[int]
    params: SamplingParams
    seed: int
    arrived_at: float
    priority: int = 0
    terms: Terms = NO_TERMS
    index: int = 0
    num_prompt_tokens: int = 0
    """Length of the prompt in `token_ids`; 0 if all of `token_ids` is prompt."""
    num_scored: int = 1
    """Prompt tokens whose log-probabilities earlier engines have returned, if wanted."""
    is_resent: bool = False
    """Whether an earlier engine had this request."""
    waited_s: float | None = None
    """Seconds this request has waited in engines for admission; None: since it arrived.

    Set for a request that is resent or had to wait for an engine: time in which it ran, or in which
    there was no engine, does not age it.
    """
    attempt: int = 0
    """How often this request was sent before."""
    num_crashes: int = 0
    """Engines that failed with this request, if it is tried alone now; else 0."""
    note: bytes = b""
    """What a frontend needs to answer this request in place of another; empty if it must not."""
    alias: str = ""
    """Another name by which the request can be adopted; empty for none."""
    past: Past | None = None
    """Output before this attempt, if the request has a note and is sent again."""

    @property
    def size(self) -> int:
        """What it takes up in a queue, in tokens; a grammar counts as its text would."""
        return len(self.token_ids) + len(self.params.grammar or "") // CHARS_PER_TOKEN


class AbortRequests(msgspec.Struct, tag="abort", frozen=True):
    """End these samples, in any state."""

    ids: list[str]
    reason: FinishReason = FinishReason.ABORT


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Leave the loop now."""


class LoadProgress(msgspec.Struct, tag="progress", frozen=True):
    """Number of weights loaded so far."""

    num_done: int
    num_total: int


class EngineReady(msgspec.Struct, tag="ready", frozen=True):
    """Loading is complete; the engine takes requests."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, tag="failed", frozen=True):
    """The engine is about to exit; `message` says why."""

    message: str


class Handover(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of an engine to a frontend that asks for a request of another frontend."""

    request_id: str
    command: AddRequest | None = None
    """The request: its prompt, the params of all its samples, the new attempt. None: not found."""
    samples: list[SampleRecord] = []
    num_cached_tokens: int | None = None
    """Prefix hit of the first admission; None before it."""
    is_running: bool = True
    """Whether the engine goes on with this request; if not, it must be sent again."""


class QuarantinedDigest(msgspec.Struct, frozen=True):
    """A request that took engines down, by the digest of its prompt and parameters."""

    digest: bytes
    left_s: float
    """Seconds for which it is still refused."""


class EventBatch(msgspec.Struct, tag="events", frozen=True, omit_defaults=True):
    """Events since the last batch, by kind; at most those of one step.

    Order is preserved within a kind. Across kinds, the order of the fields is the usual order for
    one request; the times of the events give the exact order.
    """

    arrived: list[Arrived] = []
    refused: list[Refused] = []
    admitted: list[Admitted] = []
    preempted: list[Preempted] = []
    forked: list[Forked] = []
    scored: list[PromptScored] = []
    embedded: list[Embedded] = []
    tokens: list[TokensEmitted] = []
    finished: list[Finished] = []
    idled: list[Idled] = []
    stepped: list[Stepped] = []
    lost: list[EngineLost] = []
    resent: list[Resent] = []
    routed: list[Routed] = []
    adopted: list[Adopted] = []
    handovers: list[Handover] = []
    """Answers to this process alone; no events."""
    quarantined: list[QuarantinedDigest] = []
    """Requests that other frontends have quarantined; no events."""


Command = AddRequest | AbortRequests | Shutdown
Report = LoadProgress | EngineReady | EngineFailed | EventBatch

_FIELD_OF = {
    Arrived: "arrived",
    Refused: "refused",
    Preempted: "preempted",
    Admitted: "admitted",
    Forked: "forked",
    PromptScored: "scored",
    Embedded: "embedded",
    TokensEmitted: "tokens",
    Finished: "finished",
    Stepped: "stepped",
    Idled: "idled",
    EngineLost: "lost",
    Resent: "resent",
    Routed: "routed",
    Adopted: "adopted",
}


def batch_events(events: Sequence[Event]) -> EventBatch:
    """Sort events by kind, in order within a kind."""
    by_kind: dict[str, list[Event]] = {}
    for event in events:
        by_kind.setdefault(_FIELD_OF[type(event)], []).append(event)
    return EventBatch(**by_kind)  # pyright: ignore[reportArgumentType]


def all_events(batch: EventBatch) -> list[Event]:
    """Return the events of a batch in the order possible for one request."""
    return [
        *batch.arrived,
        *batch.adopted,
        *batch.lost,
        *batch.resent,
        *batch.routed,
        *batch.refused,
        *batch.preempted,
        *batch.admitted,
        *batch.forked,
        *batch.scored,
        *batch.embedded,
        *batch.tokens,
        *batch.finished,
        *batch.idled,
        *batch.stepped,
    ]


encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
