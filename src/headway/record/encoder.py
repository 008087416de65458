"""Entries from engine calls, with salted hashes in place of tokens.

The prefix cache finds blocks by hashes of their tokens, so a recording needs to tell which blocks
are equal, not what they hold. The key of the salted hashes is in no file: a hash cannot be compared
with that of a guessed text. Runs in the thread that writes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from typing import NamedTuple

from headway.core.executor import HashedBlock
from headway.core.kv.prefix import BlockHash, chain_next, chain_start, hash_tokens
from headway.core.plan import Failure, StepPlan
from headway.record.entries import (
    FAILED_OUTCOME,
    HASH_BYTES,
    AbortEntry,
    AddEntry,
    BeginEntry,
    Chunk,
    DamagedEntry,
    EndEntry,
    Entry,
    NewHashes,
    OddOutcome,
    RestoredBlock,
    RestoredEntry,
    ScoredRange,
    digest_plan,
)

NO_HASH = BlockHash(b"")
MAX_BLOCK_SIZE = 2**62


class RestoreCall(NamedTuple):
    """The KV cache began with blocks of an earlier process."""

    blocks: Sequence[HashedBlock]


class AddCall(NamedTuple):
    """A request was added; the entry lacks the hashes yet."""

    entry: AddEntry
    token_ids: list[int]
    """Those of the live request: the list grows."""
    prefix_salt: str
    max_cached_tokens: int


class BeginCall(NamedTuple):
    """A step was planned; None: nothing was scheduled."""

    now: float
    plan: StepPlan | None


class Fork(NamedTuple):
    """A sample that was forked."""

    id: str
    parent_id: str
    token_ids: list[int]


class EndCall(NamedTuple):
    """A step has ended."""

    now: float
    plan: StepPlan
    outcomes: list[tuple[int, ...] | Failure | None]
    """The tokens of each sample."""
    elapsed_s: float
    copy_s: float
    scores: list[ScoredRange]
    embedded: list[str]
    forks: list[Fork]
    finished: dict[str, bool]
    """Requests that ended, and whether by a stop token."""


Call = RestoreCall | AddCall | BeginCall | EndCall | AbortEntry | DamagedEntry


@dataclass(slots=True, eq=False)
class _Live:
    """A live request: its tokens, and how far they are hashed."""

    number: int
    token_ids: list[int]
    num_hashed: int = 0
    """Full blocks whose hashes are recorded."""
    last_hash: BlockHash = NO_HASH
    num_prompt_blocks: int = 0
    prompt_hash: BlockHash = NO_HASH
    """Hash of the last full block of the prompt, where the chains of forked samples go on."""


class CallEncoder:
    """Turns engine calls into entries; follows live requests."""

    def __init__(self, key: bytes, block_size: int) -> None:
        """Use `key` for salted hashes; a `block_size` of 0 makes none."""
        self._key = key
        self._block_size = block_size
        self._live: dict[str, _Live] = {}
        self._numbers = count()
        self._decoding: dict[str, int] = {}
        """Requests that decode in the last plan, and their numbers."""
        self._has_tails = False

    def encode(self, call: Call) -> Entry:
        """Return the entry of a call; calls come in the order in which they were made."""
        if isinstance(call, BeginCall):
            return self._begin(call)
        if isinstance(call, EndCall):
            return self._end(call)
        if isinstance(call, AddCall):
            return self._add(call)
        if isinstance(call, RestoreCall):
            return self._restore(call)
        if isinstance(call, AbortEntry):
            self._live.pop(call.id, None)
        return call

    def _restore(self, call: RestoreCall) -> RestoredEntry:
        self._has_tails = any(one.num_tokens < self._block_size for one in call.blocks)
        return RestoredEntry(
            [
                RestoredBlock(one.block_id, self._salted(one.block_hash), one.group, one.num_tokens)
                for one in call.blocks
            ]
        )

    def _add(self, call: AddCall) -> AddEntry:
        entry, block_size = call.entry, self._block_size
        if entry.terms.cache_salt:
            entry.terms = replace(entry.terms, cache_salt="")
        live = _Live(next(self._numbers), call.token_ids)
        if block_size:
            live.last_hash = live.prompt_hash = chain_start(call.prefix_salt)
            live.num_prompt_blocks = entry.num_prompt_tokens // block_size
            end = call.max_cached_tokens // block_size * block_size
            hashes = self._hash_blocks(live, end)
            if self._has_tails and call.max_cached_tokens > end:
                tokens = call.token_ids[end : call.max_cached_tokens]
                entry.tail = self._salted(hash_tokens(live.last_hash, tokens).digest())
            entry.hashes = hashes + self._hash_blocks(live, entry.num_tokens)
        if not entry.is_refused:
            self._live[entry.id] = live
        return entry

    def _hash_blocks(self, live: _Live, num_tokens: int) -> bytes:
        """Return the salted hashes of the full blocks that were not hashed before."""
        block_size = self._block_size
        start, end = live.num_hashed * block_size, num_tokens // block_size * block_size
        if start >= end:
            return b""
        blocks, num_bytes = array("q", live.token_ids[start:end]).tobytes(), 8 * block_size
        salted = bytearray()
        for at in range(0, len(blocks), num_bytes):
            live.last_hash = chain_next(live.last_hash, blocks[at : at + num_bytes])
            live.num_hashed += 1
            if live.num_hashed == live.num_prompt_blocks:
                live.prompt_hash = live.last_hash
            salted += self._salted(live.last_hash)
        return bytes(salted)

    def _salted(self, block_hash: bytes) -> bytes:
        return blake2b(block_hash, key=self._key, digest_size=HASH_BYTES).digest()

    def _begin(self, call: BeginCall) -> BeginEntry:
        plan = call.plan
        if plan is None:
            return BeginEntry(call.now)
        live, before = self._live, self._decoding
        chunks: list[Chunk] = []
        decodes: set[str] = set()
        for request_id, start, token_ids, _, _, new in plan.scheduled:
            if new is None and len(token_ids) == 1:
                decodes.add(request_id)
            else:
                chunks.append(Chunk(live[request_id].number, start, len(token_ids)))
        left = [before.pop(one) for one in before.keys() - decodes]
        joined = {one: live[one].number for one in decodes - before.keys()}
        before.update(joined)
        return BeginEntry(
            call.now, digest_plan(plan), sorted(left), sorted(joined.values()), chunks
        )

    def _end(self, call: EndCall) -> EndEntry:
        for request_id, parent_id, token_ids in call.forks:
            parent = self._live[parent_id]
            self._live[request_id] = _Live(
                next(self._numbers),
                token_ids,
                parent.num_prompt_blocks,
                parent.prompt_hash,
                parent.num_prompt_blocks,
                parent.prompt_hash,
            )
        odd: list[OddOutcome] = []
        hashes: list[NewHashes] = []
        # Without a cache, no sample completes a block.
        block_size, finished = self._block_size or MAX_BLOCK_SIZE, call.finished
        items = zip(call.plan.scheduled, call.outcomes, strict=True)
        for position, (item, outcome) in enumerate(items):
            request_id, start, token_ids, _, has_sample, _ = item
            num_added = len(outcome) if isinstance(outcome, tuple) else 0
            is_stop = finished and finished.get(request_id)
            if num_added != has_sample or is_stop or isinstance(outcome, Failure):
                odd.append(self._odd_outcome(position, call, num_added))
            end = start + len(token_ids) + num_added
            if end % block_size < num_added and request_id not in finished:
                live = self._live.get(request_id)
                if live is not None:
                    hashes.append(NewHashes(position, self._hash_blocks(live, end)))
        for request_id in finished:
            self._live.pop(request_id, None)
        times = (call.now, call.elapsed_s, call.copy_s)
        return EndEntry(*times, odd, hashes, call.scores, call.embedded)

    def _odd_outcome(self, position: int, call: EndCall, num_added: int) -> OddOutcome:
        item, outcome = call.plan.scheduled[position], call.outcomes[position]
        if isinstance(outcome, Failure):
            return OddOutcome(position, FAILED_OUTCOME)
        live = self._live.get(item.request_id)
        if live is None or not call.finished.get(item.request_id):
            return OddOutcome(position, num_added)
        stop_at = len(live.token_ids) - item.start - len(item.token_ids)
        return OddOutcome(position, num_added, stop_at)
