"""Entries from router calls, with salted hashes in place of tokens.

The router finds prefixes by hashes of full blocks, as an engine's prefix cache does; see the
encoder of engine calls. Runs in the thread that writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from typing import NamedTuple

from headway.core.events import Stepped
from headway.core.kv.prefix import BlockHash, extend_chain
from headway.core.slo.steptime import StepCost
from headway.errors import RecordingError
from headway.record.entries import HASH_BYTES
from headway.record.router.entries import (
    NO_ENGINE,
    AdmittedEntry,
    ArrivedEntry,
    DrainingEntry,
    EndedEntry,
    FirstTokenEntry,
    ForgottenEntry,
    IdleEntry,
    JoinedEntry,
    KnownHashes,
    LostEntry,
    MovedRequest,
    ReassignedEntry,
    RecordedCost,
    RecordedSending,
    RouterEntry,
    SteppedEntry,
    TickEntry,
)
from headway.routing import EngineLimits, Sending


class JoinCall(NamedTuple):
    """An engine joined."""

    name: str
    limits: EngineLimits
    cost: StepCost | None


class NewEngine(NamedTuple):
    """A request that is not sent, and the engine that it waits for."""

    request_id: str
    engine: str | None


class LoseCall(NamedTuple):
    """An engine was lost."""

    now: float
    name: str
    forgotten: list[str]
    """Requests that it had."""
    moved: list[NewEngine]
    """Requests that waited for it."""
    denied: list[int]


class DrainCall(NamedTuple):
    """An engine gets no further requests."""

    now: float
    name: str
    moved: list[NewEngine]
    """Requests that waited for it."""
    denied: list[int]


class StepCall(NamedTuple):
    """An engine reported a step."""

    now: float
    name: str
    stepped: Stepped


class IdleCall(NamedTuple):
    """An engine reported that it has no requests."""

    name: str
    num_blocks_used: int


class ArriveCall(NamedTuple):
    """A request arrived; the entry lacks its engine and hashes yet."""

    entry: ArrivedEntry
    token_ids: list[int]
    """Of the request; nobody changes them."""
    prefix_salt: str
    hashes: Sequence[BlockHash]
    """Of its full blocks; none if they are not known yet."""
    engine: str | None


class ReassignCall(NamedTuple):
    """The engine of a request was chosen anew."""

    now: float
    placement: NewEngine
    denied: list[int]


class ForgetCall(NamedTuple):
    """A request was forgotten with its engine."""

    request_id: str


class AdmitCall(NamedTuple):
    """An engine admitted a request."""

    request_id: str
    num_cached_tokens: int


class FirstTokenCall(NamedTuple):
    """A request has its first token."""

    request_id: str


class FinishCall(NamedTuple):
    """A request ended."""

    now: float
    request_id: str
    output_ids: Sequence[int]


class TickCall(NamedTuple):
    """The router was asked what to send now."""

    now: float
    sendings: list[Sending]
    denied: list[int]


RouterCall = (
    JoinCall
    | LoseCall
    | DrainCall
    | StepCall
    | IdleCall
    | ArriveCall
    | ReassignCall
    | ForgetCall
    | AdmitCall
    | FirstTokenCall
    | FinishCall
    | TickCall
)


@dataclass(slots=True, eq=False)
class _RoutedPrompt:
    """A live request: its number, its tokens and their hashes."""

    number: int
    token_ids: list[int]
    prefix_salt: str
    hashes: list[BlockHash]


class RouterEncoder:
    """Turns router calls into entries; follows engines and live requests."""

    def __init__(self, key: bytes) -> None:
        """Use `key` for salted hashes."""
        self._key = key
        self._block_size = 0
        """Tokens of a hashed block: those of the first engine; 0 before one has joined."""
        self._engines: dict[str, int] = {}
        self._engine_numbers = count()
        self._costs: dict[str, StepCost] = {}
        """Coefficients that each engine reported last."""
        self._live: dict[str, _RoutedPrompt] = {}
        self._numbers = count()

    def encode(self, call: RouterCall) -> RouterEntry:
        """Return the entry of a call; calls come in the order in which they were made."""
        match call:
            case StepCall():
                return self._step(call)
            case TickCall():
                return self._tick(call)
            case ArriveCall():
                return self._arrive(call)
            case FinishCall():
                return self._end(call)
            case JoinCall():
                return self._join(call)
            case LoseCall():
                return self._lose(call)
            case _:
                return self._numbered(call)

    def _numbered(
        self, call: AdmitCall | FirstTokenCall | IdleCall | DrainCall | ReassignCall | ForgetCall
    ) -> RouterEntry:
        """Return the entry of a call that only needs a number in place of a name."""
        match call:
            case AdmitCall():
                return AdmittedEntry(self._live[call.request_id].number, call.num_cached_tokens)
            case FirstTokenCall():
                return FirstTokenEntry(self._live[call.request_id].number)
            case IdleCall():
                return IdleEntry(self._engines[call.name], call.num_blocks_used)
            case DrainCall():
                number = self._engines[call.name]
                return DrainingEntry(call.now, number, self._placed(call.moved), call.denied)
            case ReassignCall():
                (placed,) = self._placed([call.placement])
                return ReassignedEntry(call.now, placed.request, placed.engine, call.denied)
            case ForgetCall():
                return ForgottenEntry(self._live.pop(call.request_id).number)

    def _join(self, call: JoinCall) -> JoinedEntry:
        limits, known = call.limits, list[KnownHashes]()
        size = limits.block_size
        if not self._block_size:
            self._block_size = size
            for live in self._live.values():
                if hashes := self._new_hashes(live, live.token_ids):
                    known.append(KnownHashes(live.number, hashes))
        elif size % self._block_size:
            raise RecordingError(
                f"an engine has KV blocks of {size} tokens, the first one had {self._block_size}: "
                "a recording needs multiples"
            )
        self._engines[call.name] = next(self._engine_numbers)
        sizes = limits.num_blocks, size, limits.max_num_seqs, limits.token_budget
        cost = None if call.cost is None else RecordedCost.of(call.cost)
        return JoinedEntry(call.name, *sizes, limits.has_prefix_cache, cost, known)

    def _lose(self, call: LoseCall) -> LostEntry:
        for request_id in call.forgotten:
            del self._live[request_id]
        self._costs.pop(call.name, None)
        number = self._engines.pop(call.name)
        return LostEntry(call.now, number, self._placed(call.moved), call.denied)

    def _placed(self, moved: Sequence[NewEngine]) -> list[MovedRequest]:
        return [MovedRequest(self._live[one].number, self._number_of(name)) for one, name in moved]

    def _number_of(self, engine: str | None) -> int:
        return NO_ENGINE if engine is None else self._engines[engine]

    def _step(self, call: StepCall) -> SteppedEntry:
        stepped, cost = call.stepped, None
        if stepped.forecast is not None:
            reported = stepped.forecast.speed.cost
            if reported != self._costs.get(call.name):
                self._costs[call.name] = reported
                cost = RecordedCost.of(reported)
        return SteppedEntry(
            call.now,
            self._engines[call.name],
            stepped.elapsed_s,
            stepped.num_tokens,
            stepped.token_budget,
            stepped.num_scheduled,
            stepped.num_running + stepped.num_waiting,
            stepped.num_blocks_used,
            cost,
        )

    def _arrive(self, call: ArriveCall) -> ArrivedEntry:
        entry = call.entry
        live = _RoutedPrompt(
            next(self._numbers), call.token_ids, call.prefix_salt, list(call.hashes)
        )
        if self._block_size:
            extend_chain(live.hashes, call.token_ids, self._block_size, call.prefix_salt)
            entry.hashes = self._salted(live.hashes)
        if entry.terms.cache_salt:
            entry.terms = replace(entry.terms, cache_salt="")
        entry.engine = self._number_of(call.engine)
        if entry.late_s is None:
            self._live[entry.id] = live
        return entry

    def _end(self, call: FinishCall) -> EndedEntry:
        live, output_ids = self._live.pop(call.request_id), call.output_ids
        hashes = b""
        if self._block_size and output_ids:
            # The last token was sampled and never computed: no block ends in it.
            hashes = self._new_hashes(live, [*live.token_ids, *output_ids[:-1]])
        return EndedEntry(call.now, live.number, len(output_ids), hashes)

    def _tick(self, call: TickCall) -> TickEntry:
        sendings = [
            RecordedSending(
                self._live[one.request.id].number,
                self._engines[one.engine],
                str(one.reason),
                one.num_cached,
                one.predicted_ttft_s,
            )
            for one in call.sendings
        ]
        return TickEntry(call.now, sendings, call.denied)

    def _new_hashes(self, live: _RoutedPrompt, token_ids: Sequence[int]) -> bytes:
        """Return the salted hashes of the full blocks that were not hashed before."""
        num_before = len(live.hashes)
        extend_chain(live.hashes, token_ids, self._block_size, live.prefix_salt)
        return self._salted(live.hashes[num_before:])

    def _salted(self, hashes: Sequence[BlockHash]) -> bytes:
        key = self._key
        return b"".join([blake2b(one, key=key, digest_size=HASH_BYTES).digest() for one in hashes])
