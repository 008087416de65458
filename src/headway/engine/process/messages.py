"""Everything that crosses the border between the API process and the engine process.

msgspec encodes the structs as msgpack; nothing is ever unpickled. Core values (params, events)
travel as themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from headway.core.events import (
    Admitted,
    Arrived,
    EngineLost,
    Event,
    Finished,
    Forked,
    Idled,
    Preempted,
    Refused,
    Resent,
    Stepped,
    TokensEmitted,
)
from headway.core.executor import Capacity
from headway.core.params import SamplingParams
from headway.core.request import FinishReason
from headway.core.terms import NO_TERMS, Terms


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a front end needs to know of a running engine."""

    capacity: Capacity
    max_num_seqs: int
    vocab_size: int
    notes: tuple[str, ...] = ()
    """How "auto" settings were resolved, for the log."""
    scheduling_policy: str = "fcfs"
    """A priority is refused where the waiting line does not heed it."""
    dtype: str = "auto"
    kv_cache_bytes: int | None = None
    """As resolved; an engine that takes over gets the same."""
    has_prefix_cache: bool = True


class AddRequest(msgspec.Struct, tag="add", frozen=True, omit_defaults=True):
    """A request that passed validation; params are resolved.

    One that continues after a crash brings its output so far behind its prompt, and is sent once
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
    """0 if all of `token_ids` is prompt."""
    is_resent: bool = False
    """Another engine had it before."""
    waited_s: float | None = None
    """How long it has waited in engines for a place; None: since it arrived. Set for a request that
    is resent or had no engine: time in which it ran, or nobody could run, does not age it."""


class AbortRequests(msgspec.Struct, tag="abort", frozen=True):
    """End these samples, in whatever state they are."""

    ids: list[str]
    reason: FinishReason = FinishReason.ABORT


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Leave the loop now."""


class LoadProgress(msgspec.Struct, tag="progress", frozen=True):
    """Weights loaded so far."""

    num_done: int
    num_total: int


class EngineReady(msgspec.Struct, tag="ready", frozen=True):
    """Loading is over; requests are welcome."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, tag="failed", frozen=True):
    """The engine is about to exit, and why."""

    message: str


class EventBatch(msgspec.Struct, tag="events", frozen=True, omit_defaults=True):
    """Events since the last batch, by kind; at most one step's worth.

    Order is kept within a kind. Between kinds, the order here is that in which they usually
    happen to one request; their times tell exactly.
    """

    arrived: list[Arrived] = []
    refused: list[Refused] = []
    admitted: list[Admitted] = []
    preempted: list[Preempted] = []
    forked: list[Forked] = []
    tokens: list[TokensEmitted] = []
    finished: list[Finished] = []
    stepped: list[Stepped] = []
    idled: list[Idled] = []
    lost: list[EngineLost] = []
    resent: list[Resent] = []


Command = AddRequest | AbortRequests | Shutdown
Report = LoadProgress | EngineReady | EngineFailed | EventBatch

_FIELD_OF = {
    Arrived: "arrived",
    Refused: "refused",
    Preempted: "preempted",
    Admitted: "admitted",
    Forked: "forked",
    TokensEmitted: "tokens",
    Finished: "finished",
    Stepped: "stepped",
    Idled: "idled",
    EngineLost: "lost",
    Resent: "resent",
}


def batch_events(events: Sequence[Event]) -> EventBatch:
    """Sort events by kind, keeping the order within a kind."""
    by_kind: dict[str, list[Event]] = {}
    for event in events:
        by_kind.setdefault(_FIELD_OF[type(event)], []).append(event)
    return EventBatch(**by_kind)  # pyright: ignore[reportArgumentType]


def all_events(batch: EventBatch) -> list[Event]:
    """The events of a batch in the order in which they can happen to one request."""
    return [
        *batch.arrived,
        *batch.lost,
        *batch.resent,
        *batch.refused,
        *batch.preempted,
        *batch.admitted,
        *batch.forked,
        *batch.tokens,
        *batch.finished,
        *batch.stepped,
        *batch.idled,
    ]


encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
