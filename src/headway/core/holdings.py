"""What preempted requests still hold of what they computed: first blocks, then slots behind them.

A preempted request gives up no more than is asked of it. Its table stays as it is; blocks are taken
from the table's end when somebody with a better right to them needs some, and go by the method that
costs least. When it comes back, it continues behind what it has left.

Owns the slots, the blocks held (listed in the KV cache, which counts their owners) and the moves
between the two stores that the next plan has to make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headway.core.causes import PreemptionMethod
from headway.core.executor import Capacity
from headway.core.kv import BlockTable, KVCache, PrefixMatch
from headway.core.methods import (
    AUTO,
    CopyTime,
    Means,
    PrefillCost,
    Tail,
    TokenCost,
    check_method,
    choose_method,
)
from headway.core.plan import BlockLoad, BlockSave, StepPlan, StepResult
from headway.core.request import Request
from headway.core.store import SlotPool

CHECKPOINT, TRIM, RECOMPUTE = (
    PreemptionMethod.CHECKPOINT,
    PreemptionMethod.TRIM,
    PreemptionMethod.RECOMPUTE,
)


@dataclass(slots=True, eq=False)
class Holding:
    """One preempted request's. Blocks hold its first tokens, slots those behind them."""

    request: Request
    num_computed: int
    """Tokens it had computed when it was preempted."""
    block_ids: list[int]
    """The KV cache's own list of what is held."""
    slot_ids: list[int] = field(default_factory=list[int])
    num_tokens: int = 0
    """How many of them it still has."""


class Holdings:
    """Takes over the tables of preempted requests, and gives them back."""

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
        self._held: dict[str, Holding] = {}
        self._saves: list[BlockSave] = []
        self._loads: dict[int, int] = {}
        """Block id -> slot id."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def num_computed(self, request: Request) -> int:
        """Tokens the request had computed when it was preempted; 0 if it was not."""
        holding = self._held.get(request.id)
        return holding.num_computed if holding else 0

    @property
    def keepers(self) -> list[Request]:
        """Those who still have blocks."""
        return [holding.request for holding in self._held.values() if holding.block_ids]

    # ------------------------------------------------------------------ giving up

    def take_over(self, request: Request) -> None:
        """From a request that has left its seat, what it keeps. By the methods that leave nothing
        in the pool, the blocks go at once."""
        block_ids = self._kv.kept[request.id]
        num_tokens = request.num_computed
        holding = Holding(request, num_tokens, block_ids, num_tokens=num_tokens)
        self._held[request.id] = holding
        # Room for tokens that were not computed yet is of no use to one that does not run.
        num_used = self._kv.num_blocks_for(num_tokens)
        self._kv.pool.free(block_ids[num_used:])
        del block_ids[num_used:]
        if self._method in (CHECKPOINT, RECOMPUTE):
            self._let_go(holding, len(holding.block_ids))

    def method_of(self, request: Request) -> PreemptionMethod:
        """How what the request has given up so far went."""
        holding = self._held[request.id]
        if holding.slot_ids:
            return CHECKPOINT
        return TRIM if holding.block_ids else RECOMPUTE

    def num_lost(self, request: Request) -> int:
        holding = self._held[request.id]
        return holding.num_computed - holding.num_tokens

    def squeeze(
        self, num_blocks: int, keepers: Sequence[Request], spared: frozenset[int] = frozenset()
    ) -> bool:
        """Make so many more blocks free, from the tails of these, the first one's first.

        `spared` blocks are about to be shared by whoever asks, and do not count as free. Nothing
        is taken if all of it would not be enough.
        """
        held = [self._held[request.id] for request in keepers]
        if self._kv.num_freeable(keepers, spared) < num_blocks:
            return False
        # Blocks that others share too are of no use to anyone yet: the first round leaves them.
        for takes_shared in (False, True):
            for holding in held:
                if num_blocks <= 0:
                    return True
                count, num_freed = self._tail(holding, num_blocks, spared, takes_shared)
                self._let_go(holding, count)
                num_blocks -= num_freed
        return num_blocks <= 0

    def _tail(
        self, holding: Holding, num_wanted: int, spared: frozenset[int], takes_shared: bool
    ) -> tuple[int, int]:
        """How long a tail gives so many free blocks, or as many as it can; and how many."""
        count = num_freed = 0
        for block_id in reversed(holding.block_ids):
            is_freed = self._kv.pool.num_freeable((block_id,)) > 0
            if num_freed == num_wanted or not (is_freed or takes_shared):
                break
            count += 1
            num_freed += is_freed and block_id not in spared
        return count, num_freed

    def _let_go(self, holding: Holding, count: int) -> None:
        """The last `count` blocks, by the cheapest method."""
        if count == 0:
            return
        size = self._kv.block_size
        first = len(holding.block_ids) - count
        in_blocks = min(holding.num_tokens, len(holding.block_ids) * size)
        tail = Tail(
            start=first * size,
            num_tokens=in_blocks - first * size,
            num_blocks=count,
            num_slots=len(holding.slot_ids),
            num_slot_tokens=holding.num_tokens - in_blocks,
        )
        gone = holding.block_ids[first:]
        num_slots = self.slots.num_free + sum([block_id in self._loads for block_id in gone])
        means = Means(self._cost(), self.copy_time.block_copy_s, num_slots, size)
        choice = choose_method(tail, means, self._method)
        del holding.block_ids[first:]
        if choice.method is CHECKPOINT:
            self._save(holding, gone)
        else:
            self.slots.free(holding.slot_ids)
            holding.slot_ids.clear()
            for block_id in gone:
                self._loads.pop(block_id, None)
        holding.num_tokens -= choice.num_tokens_lost
        self._kv.pool.free(gone)

    def _save(self, holding: Holding, block_ids: Sequence[int]) -> None:
        """From the last block to the first, so that own slots are reused from the end."""
        new_ids: list[int] = []
        for block_id in reversed(block_ids):
            # What was to be loaded into the block is still in its slot.
            slot_id = self._loads.pop(block_id, None)
            if slot_id is not None:
                self.slots.take_back(slot_id)
            else:
                slot_id = self.slots.allocate() if self.slots.num_free else holding.slot_ids.pop()
                self._saves.append(BlockSave(block_id, slot_id))
            new_ids.append(slot_id)
        holding.slot_ids[:0] = reversed(new_ids)

    # ---------------------------------------------------------------- coming back

    def match(self, request: Request) -> PrefixMatch:
        """The blocks a request can begin with: those it holds, then cached ones.

        Slots are not among them: what they keep goes into fresh blocks.
        """
        match = self._kv.match(request)
        holding = self._held.get(request.id)
        if holding is None:
            return match
        num_held = len(holding.block_ids)
        in_blocks = min(holding.num_tokens, num_held * self._kv.block_size)
        is_partly_filled = in_blocks < num_held * self._kv.block_size
        if len(match.block_ids) <= num_held or is_partly_filled:
            return PrefixMatch(tuple(holding.block_ids), in_blocks)
        return PrefixMatch((*holding.block_ids, *match.block_ids[num_held:]), match.num_tokens)

    def restore(self, request: Request, table: BlockTable, match: PrefixMatch) -> int:
        """The request has a table again, beginning with `match`: fill what it has in slots into
        the blocks behind, and let the rest go. The tokens it need not compute."""
        holding = self._held.pop(request.id, None)
        if holding is None:
            return match.num_tokens
        num_tokens = max(match.num_tokens, holding.num_tokens)
        first_slot = len(holding.block_ids)
        for place in range(len(match.block_ids), self._kv.num_blocks_for(num_tokens)):
            self._loads[table.block_ids[place]] = holding.slot_ids[place - first_slot]
        self.slots.free(holding.slot_ids)
        self._kv.release(request.id)
        return num_tokens

    def drop(self, request: Request) -> None:
        """The request will not come back."""
        holding = self._held.pop(request.id, None)
        if holding is not None:
            self.slots.free(holding.slot_ids)
            self._kv.release(request.id)

    # ------------------------------------------------------------------ with plans

    def take_moves(self) -> tuple[tuple[BlockSave, ...], tuple[BlockLoad, ...]]:
        """What the plan being made has to move between the stores."""
        saves = tuple(self._saves)
        loads = tuple(BlockLoad(slot_id, block_id) for block_id, slot_id in self._loads.items())
        self._saves.clear()
        self._loads.clear()
        self.slots.settle()
        return saves, loads

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a step how long moving a block takes."""
        self.copy_time.observe(len(plan.saves) + len(plan.loads), result.copy_s)

    def check(self, preempted_ids: Iterable[str]) -> None:
        """Only preempted requests hold anything, and every slot is accounted for."""
        if stray := self._held.keys() - set(preempted_ids):
            raise AssertionError(f"not preempted, but holding: {stray}")
        self.slots.check(id for holding in self._held.values() for id in holding.slot_ids)
        for request_id, holding in self._held.items():
            num_places = len(holding.block_ids) + len(holding.slot_ids)
            room = num_places * self._kv.block_size
            if not 0 <= holding.num_tokens <= min(room, holding.num_computed):
                raise AssertionError(f"{request_id} holds {holding.num_tokens} tokens in {room}")
            is_behind = holding.num_tokens > len(holding.block_ids) * self._kv.block_size
            if bool(holding.slot_ids) != is_behind:
                raise AssertionError(f"{request_id} has slots that are of no use")
