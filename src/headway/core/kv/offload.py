"""KV offload: what preempted requests keep of the tokens they computed.

A preempted request keeps its blocks until another request needs them. Blocks are then freed from
the end of its table, by the cheapest method: dropped, or copied to slots of the offload store. So
it keeps a prefix of its tokens: the first in blocks, those behind them in slots. On admission it
continues behind that prefix.

Owns the slots, the lists of kept blocks (in the KV cache, which counts references) and the saves
and loads of the next plan.
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
    """What one preempted request keeps: first tokens in blocks, later ones in slots."""

    request: Request
    num_computed: int
    """Tokens computed when it was preempted."""
    block_ids: list[int]
    """The list in `KVCache.kept_blocks`, not a copy."""
    slot_ids: list[int] = field(default_factory=list[int])
    num_tokens: int = 0
    """Computed tokens that are still in blocks or slots."""


class Offload:
    """Keeps the KV blocks of preempted requests and restores them on admission."""

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
        self._kept: dict[str, KeptKV] = {}
        self._saves: list[BlockSave] = []
        self._loads: dict[int, int] = {}
        """Block id -> id of the slot to load into it."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    def num_computed(self, request: Request) -> int:
        """Return the tokens computed before the preemption; 0 without one."""
        kept = self._kept.get(request.id)
        return kept.num_computed if kept else 0

    @property
    def preempted_with_blocks(self) -> list[Request]:
        """Preempted requests that still keep blocks."""
        return [kept.request for kept in self._kept.values() if kept.block_ids]

    # ------------------------------------------------------------------- freeing

    def keep(self, request: Request) -> None:
        """Keep the blocks of a request that was just preempted.

        The methods checkpoint and recompute keep no blocks: these are freed at once.
        """
        block_ids = self._kv.kept_blocks[request.id]
        num_tokens = request.num_computed
        kept = KeptKV(request, num_tokens, block_ids, num_tokens=num_tokens)
        self._kept[request.id] = kept
        # Blocks without computed tokens hold nothing to keep.
        num_used = self._kv.num_blocks_for(num_tokens)
        self._kv.pool.free(block_ids[num_used:])
        del block_ids[num_used:]
        if self._method in (CHECKPOINT, RECOMPUTE):
            self._free_tail(kept, len(kept.block_ids))

    def method_of(self, request: Request) -> PreemptionMethod:
        """Return the method by which the request has lost blocks so far."""
        kept = self._kept[request.id]
        if kept.slot_ids:
            return CHECKPOINT
        return TRIM if kept.block_ids else RECOMPUTE

    def num_lost(self, request: Request) -> int:
        """Return how many computed tokens were dropped since the preemption."""
        kept = self._kept[request.id]
        return kept.num_computed - kept.num_tokens

    def free_blocks(
        self, num_blocks: int, requests: Sequence[Request], pinned: frozenset[int] = frozenset()
    ) -> bool:
        """Free so many blocks from the tails of these requests, in this order.

        `pinned` blocks will be reused by the claimant and do not count as freed. Frees nothing
        and returns False if all the kept blocks together are too few.
        """
        entries = [self._kept[request.id] for request in requests]
        if self._kv.num_freeable(requests, pinned) < num_blocks:
            return False
        # Dropping a reference to a shared block frees nothing by itself: the second round only.
        for takes_shared in (False, True):
            for kept in entries:
                if num_blocks <= 0:
                    return True
                count, num_freed = self._measure_tail(kept, num_blocks, pinned, takes_shared)
                self._free_tail(kept, count)
                num_blocks -= num_freed
        return num_blocks <= 0

    def _measure_tail(
        self, kept: KeptKV, num_wanted: int, pinned: frozenset[int], takes_shared: bool
    ) -> tuple[int, int]:
        """Return the length of the tail that frees `num_wanted` blocks, and how many it frees."""
        count = num_freed = 0
        for block_id in reversed(kept.block_ids):
            is_freed = self._kv.pool.num_freeable((block_id,)) > 0
            if num_freed == num_wanted or not (is_freed or takes_shared):
                break
            count += 1
            num_freed += is_freed and block_id not in pinned
        return count, num_freed

    def _free_tail(self, kept: KeptKV, count: int) -> None:
        """Free the last `count` blocks by the cheapest method."""
        if count == 0:
            return
        size = self._kv.block_size
        first = len(kept.block_ids) - count
        in_blocks = min(kept.num_tokens, len(kept.block_ids) * size)
        tail = Tail(
            start=first * size,
            num_tokens=in_blocks - first * size,
            num_blocks=count,
            num_slots=len(kept.slot_ids),
            num_slot_tokens=kept.num_tokens - in_blocks,
        )
        gone = kept.block_ids[first:]
        num_slots = self.slots.num_free + sum([block_id in self._loads for block_id in gone])
        costs = PreemptionCosts(self._cost(), self.copy_time.block_copy_s, num_slots, size)
        choice = choose_method(tail, costs, self._method)
        del kept.block_ids[first:]
        if choice.method is CHECKPOINT:
            self._save(kept, gone)
        else:
            self.slots.free(kept.slot_ids)
            kept.slot_ids.clear()
            for block_id in gone:
                self._loads.pop(block_id, None)
        kept.num_tokens -= choice.num_tokens_lost
        self._kv.pool.free(gone)

    def _save(self, kept: KeptKV, block_ids: Sequence[int]) -> None:
        """Save blocks to slots, last block first, so that own slots are reused from the end."""
        new_ids: list[int] = []
        for block_id in reversed(block_ids):
            # The block was to be loaded in this pass: its contents are still in the slot.
            slot_id = self._loads.pop(block_id, None)
            if slot_id is not None:
                self.slots.reclaim(slot_id)
            else:
                slot_id = self.slots.allocate() if self.slots.num_free else kept.slot_ids.pop()
                self._saves.append(BlockSave(block_id, slot_id))
            new_ids.append(slot_id)
        kept.slot_ids[:0] = reversed(new_ids)

    # ----------------------------------------------------------------- restoring

    def match(self, request: Request) -> PrefixMatch:
        """Return the blocks a request can start with: kept ones, then prefix hits.

        Offloaded blocks are not among them: they are loaded into newly allocated blocks.
        """
        match = self._kv.match(request)
        kept = self._kept.get(request.id)
        if kept is None:
            return match
        num_held = len(kept.block_ids)
        in_blocks = min(kept.num_tokens, num_held * self._kv.block_size)
        is_partly_filled = in_blocks < num_held * self._kv.block_size
        if len(match.block_ids) <= num_held or is_partly_filled:
            return PrefixMatch(tuple(kept.block_ids), in_blocks)
        return PrefixMatch((*kept.block_ids, *match.block_ids[num_held:]), match.num_tokens)

    def restore(self, request: Request, table: BlockTable, match: PrefixMatch) -> int:
        """Plan the loads for a request admitted with `match`; return its computed tokens.

        Slots whose tokens `match` covers are not loaded. All its slots are freed.
        """
        kept = self._kept.pop(request.id, None)
        if kept is None:
            return match.num_tokens
        num_tokens = max(match.num_tokens, kept.num_tokens)
        first_slot = len(kept.block_ids)
        for place in range(len(match.block_ids), self._kv.num_blocks_for(num_tokens)):
            self._loads[table.block_ids[place]] = kept.slot_ids[place - first_slot]
        self.slots.free(kept.slot_ids)
        self._kv.release(request.id)
        return num_tokens

    def discard(self, request: Request) -> None:
        """Free what a request keeps that has finished while preempted."""
        kept = self._kept.pop(request.id, None)
        if kept is not None:
            self.slots.free(kept.slot_ids)
            self._kv.release(request.id)

    # --------------------------------------------------------------------- plans

    def take_moves(self) -> tuple[tuple[BlockSave, ...], tuple[BlockLoad, ...]]:
        """Return and clear the saves and loads of the next plan."""
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
        """Only preempted requests keep KV, and every slot has one owner or is free."""
        if stray := self._kept.keys() - set(preempted_ids):
            raise AssertionError(f"not preempted, but kept: {stray}")
        self.slots.check(id for kept in self._kept.values() for id in kept.slot_ids)
        for request_id, kept in self._kept.items():
            num_places = len(kept.block_ids) + len(kept.slot_ids)
            room = num_places * self._kv.block_size
            if not 0 <= kept.num_tokens <= min(room, kept.num_computed):
                raise AssertionError(f"{request_id} holds {kept.num_tokens} tokens in {room}")
            is_behind = kept.num_tokens > len(kept.block_ids) * self._kv.block_size
            if bool(kept.slot_ids) != is_behind:
                raise AssertionError(f"{request_id} has slots that are of no use")
