"""KV offload: blocks and slots of preempted requests.

A preempted request keeps its blocks until another request needs them. Blocks are then freed from
the end of its table, by the cheapest method: dropped, or copied to slots of the offload store. So
the request keeps a prefix of its tokens, first in blocks, then in slots. Once admitted, the request
continues behind that prefix.

Owns the slots, the lists of kept blocks (stored in the KV cache, which counts references) and the
saves and loads of the next plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headway.core.causes import PreemptionMethod
from headway.core.executor import Capacity
from headway.core.kv.cache import BlockTable, KVCache, PrefixMatch
from headway.core.kv.offload_methods import (
    AUTO,
    CopyTime,
    PreemptionCosts,
    PrefillCost,
    Tail,
    TokenCost,
    check_method,
    choose_method,
)
from headway.core.kv.offload_slots import SlotPool
from headway.core.plan import BlockLoad, BlockSave, StepPlan, StepResult
from headway.core.request import Request

CHECKPOINT, TRIM, RECOMPUTE = (
    PreemptionMethod.CHECKPOINT,
    PreemptionMethod.TRIM,
    PreemptionMethod.RECOMPUTE,
)


@dataclass(slots=True, eq=False)
class KeptKV:
    """Blocks, then slots, with a prefix of the tokens of a preempted request."""

    request: Request
    num_computed: int
    """Tokens computed before the preemption."""
    block_ids: list[int]
    """The list in `KVCache.kept_blocks`, not a copy."""
    slot_ids: list[int] = field(default_factory=list[int])
    num_tokens: int = 0
    """Computed tokens that are still in blocks or slots."""


class Offload:
    """Stores KV blocks of preempted requests and restores them on admission."""

    def __init__(
        self,
        kv: KVCache,
        capacity: Capacity,
        method: str = AUTO,
        cost: Callable[[], PrefillCost] = TokenCost,
    ) -> None:
        self.slots = SlotPool(capacity.num_slots)
        self.copy_time = CopyTime(capacity.block_copy_s)
        self._kv = kv
        self._method = check_method(method)
        self._cost = cost
        self._entries: dict[str, KeptKV] = {}
        self._saves: list[BlockSave] = []
        self._loads: dict[int, int] = {}
        """Block id -> id of the slot to load into it."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def num_computed(self, request: Request) -> int:
        """Return the tokens computed before the preemption; 0 if never preempted."""
        entry = self._entries.get(request.id)
        return entry.num_computed if entry else 0

    @property
    def preempted_with_blocks(self) -> list[Request]:
        """Preempted requests that have kept blocks."""
        return [entry.request for entry in self._entries.values() if entry.block_ids]

    # ------------------------------------------------------------------- freeing

    def keep(self, request: Request) -> None:
        """Keep the blocks of a newly preempted request.

        With the methods checkpoint and recompute, the blocks are freed at once.
        """
        block_ids = self._kv.kept_blocks[request.id]
        num_tokens = request.num_computed
        entry = KeptKV(request, num_tokens, block_ids, num_tokens=num_tokens)
        self._entries[request.id] = entry
        # Blocks without computed tokens have no content to keep.
        num_used = self._kv.num_blocks_for(num_tokens)
        self._kv.pool.free(block_ids[num_used:])
        del block_ids[num_used:]
        if self._method in (CHECKPOINT, RECOMPUTE):
            self._free_tail(entry, len(entry.block_ids))

    def method_of(self, request: Request) -> PreemptionMethod:
        """Return the method by which the request has lost blocks so far."""
        entry = self._entries[request.id]
        if entry.slot_ids:
            return CHECKPOINT
        return TRIM if entry.block_ids else RECOMPUTE

    def num_lost(self, request: Request) -> int:
        """Return how many computed tokens were dropped since the preemption."""
        entry = self._entries[request.id]
        return entry.num_computed - entry.num_tokens

    def free_blocks(
        self, num_blocks: int, requests: Sequence[Request], pinned: frozenset[int] = frozenset()
    ) -> bool:
        """Free `num_blocks` kept blocks from the tails of these requests, in this order.

        `pinned` blocks are reused by the requester and do not count as freed. Return False, and
        free no block, if all kept blocks of the requests are too few.
        """
        entries = [self._entries[request.id] for request in requests]
        if self._kv.num_freeable(requests, pinned) < num_blocks:
            return False
        # Removing one owner of a shared block frees no block: shared blocks in the second round.
        for includes_shared in (False, True):
            for entry in entries:
                if num_blocks <= 0:
                    return True
                count, num_freed = self._measure_tail(entry, num_blocks, pinned, includes_shared)
                self._free_tail(entry, count)
                num_blocks -= num_freed
        return num_blocks <= 0

    def _measure_tail(
        self, entry: KeptKV, num_needed: int, pinned: frozenset[int], includes_shared: bool
    ) -> tuple[int, int]:
        """Return the length of the tail to free, and how many blocks that frees."""
        count = num_freed = 0
        for block_id in reversed(entry.block_ids):
            is_freed = self._kv.pool.num_freeable((block_id,)) > 0
            if num_freed == num_needed or not (is_freed or includes_shared):
                break
            count += 1
            num_freed += is_freed and block_id not in pinned
        return count, num_freed

    def _free_tail(self, entry: KeptKV, count: int) -> None:
        """Free the last `count` blocks by the cheapest method."""
        if count == 0:
            return
        size = self._kv.block_size
        first = len(entry.block_ids) - count
        in_blocks = min(entry.num_tokens, len(entry.block_ids) * size)
        tail = Tail(
            start=first * size,
            num_tokens=in_blocks - first * size,
            num_blocks=count,
            num_slots=len(entry.slot_ids),
            num_slot_tokens=entry.num_tokens - in_blocks,
        )
        freed_ids = entry.block_ids[first:]
        num_slots = self.slots.num_free + sum([block_id in self._loads for block_id in freed_ids])
        costs = PreemptionCosts(self._cost(), self.copy_time.block_copy_s, num_slots, size)
        choice = choose_method(tail, costs, self._method)
        del entry.block_ids[first:]
        if choice.method is CHECKPOINT:
            self._save(entry, freed_ids)
        else:
            self.slots.free(entry.slot_ids)
            entry.slot_ids.clear()
            for block_id in freed_ids:
                self._loads.pop(block_id, None)
        entry.num_tokens -= choice.num_tokens_lost
        self._kv.pool.free(freed_ids)

    def _save(self, entry: KeptKV, block_ids: Sequence[int]) -> None:
        """Save blocks to slots.

        The last block comes first, so that slots of the request are reused from the end.
        """
        new_ids: list[int] = []
        for block_id in reversed(block_ids):
            # A block with a load in the next plan still has its contents in the slot.
            slot_id = self._loads.pop(block_id, None)
            if slot_id is not None:
                self.slots.reclaim(slot_id)
            else:
                slot_id = self.slots.allocate() if self.slots.num_free else entry.slot_ids.pop()
                self._saves.append(BlockSave(block_id, slot_id))
            new_ids.append(slot_id)
        entry.slot_ids[:0] = reversed(new_ids)

    # ----------------------------------------------------------------- restoring

    def match(self, request: Request) -> PrefixMatch:
        """Return the blocks a request can start with: kept blocks, then prefix hits.

        Slots are not included: they are loaded into newly allocated blocks.
        """
        match = self._kv.match(request)
        entry = self._entries.get(request.id)
        if entry is None:
            return match
        num_kept = len(entry.block_ids)
        in_blocks = min(entry.num_tokens, num_kept * self._kv.block_size)
        is_partly_filled = in_blocks < num_kept * self._kv.block_size
        if len(match.block_ids) <= num_kept or is_partly_filled:
            return PrefixMatch(tuple(entry.block_ids), in_blocks)
        return PrefixMatch((*entry.block_ids, *match.block_ids[num_kept:]), match.num_tokens)

    def restore(self, request: Request, table: BlockTable, match: PrefixMatch) -> int:
        """Plan the loads for a request admitted with `match`; return its computed tokens.

        Slots whose tokens `match` covers are not loaded. All slots of the request are freed.
        """
        entry = self._entries.pop(request.id, None)
        if entry is None:
            return match.num_tokens
        num_tokens = max(match.num_tokens, entry.num_tokens)
        first_slot = len(entry.block_ids)
        for index in range(len(match.block_ids), self._kv.num_blocks_for(num_tokens)):
            self._loads[table.block_ids[index]] = entry.slot_ids[index - first_slot]
        self.slots.free(entry.slot_ids)
        self._kv.release(request.id)
        return num_tokens

    def discard(self, request: Request) -> None:
        """Free the kept blocks and slots of a request that ended while preempted."""
        entry = self._entries.pop(request.id, None)
        if entry is not None:
            self.slots.free(entry.slot_ids)
            self._kv.release(request.id)

    # --------------------------------------------------------------------- plans

    def take_moves(self) -> tuple[tuple[BlockSave, ...], tuple[BlockLoad, ...]]:
        """Return and clear the saves and loads of the next plan."""
        if not (self._saves or self._loads):
            self.slots.release_pending()
            return (), ()
        saves = tuple(self._saves)
        loads = tuple(BlockLoad(slot_id, block_id) for block_id, slot_id in self._loads.items())
        self._saves.clear()
        self._loads.clear()
        self.slots.release_pending()
        return saves, loads

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Update the time of a block copy from a finished step."""
        self.copy_time.observe(len(plan.saves) + len(plan.loads), result.copy_s)

    def check(self, preempted_ids: Iterable[str]) -> None:
        """Check that only preempted requests keep blocks and that slots agree."""
        if other_ids := self._entries.keys() - set(preempted_ids):
            raise AssertionError(f"kept KV of requests that are not preempted: {other_ids}")
        self.slots.check(id for entry in self._entries.values() for id in entry.slot_ids)
        for request_id, entry in self._entries.items():
            num_stored = len(entry.block_ids) + len(entry.slot_ids)
            max_tokens = min(num_stored * self._kv.block_size, entry.num_computed)
            if not 0 <= entry.num_tokens <= max_tokens:
                raise AssertionError(
                    f"{request_id} keeps {entry.num_tokens} of {max_tokens} tokens"
                )
            needs_slots = entry.num_tokens > len(entry.block_ids) * self._kv.block_size
            if bool(entry.slot_ids) != needs_slots:
                raise AssertionError(f"{request_id}: slots without tokens, or tokens without slots")
