"""Which engines have which prefixes, as far as the router knows.

Knowledge is what the router assigned: the full blocks of a prompt count as cached in an engine from
the moment of assignment, so that a burst of one new prefix stays together. Each engine has an LRU
of block hashes as large as its KV cache. A chain is touched from its last block to its first, so a
block is never dropped before the blocks that follow it, and a match counts from the root.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headway.core.kv.prefix import BlockHash

ALL = -1
"""Bit mask of every engine."""


class Level(NamedTuple):
    """Engines that have this many leading blocks of a chain and no more."""

    num_blocks: int
    mask: int
    """One bit per engine."""


class PrefixHolders(NamedTuple):
    """Engines that have the start of a chain, those with the most blocks first."""

    levels: tuple[Level, ...]

    def num_blocks(self, number: int) -> int:
        """Return how many leading blocks an engine has."""
        for level in self.levels:
            if level.mask >> number & 1:
                return level.num_blocks
        return 0


class AssignedPrefixes:
    """Block hashes by engine, and engines by block hash."""

    def __init__(self) -> None:
        self._holders: dict[BlockHash, int] = {}
        """Bit mask of the engines that have a block."""
        self._blocks: dict[int, OrderedDict[BlockHash, int]] = {}
        """Engine -> block -> order of its last use, the least recent first."""
        self._max_blocks: dict[int, int] = {}
        self._masks: dict[int, int] = {}
        """Mask of each engine alone, one object for all its blocks: it has a bit per engine."""

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def num_blocks(self, number: int) -> int:
        """Return how many blocks an engine is believed to have."""
        return len(self._blocks[number])

    def add_engine(self, number: int, max_blocks: int) -> None:
        self._blocks[number] = OrderedDict()
        self._max_blocks[number] = max_blocks
        self._masks[number] = 1 << number

    def remove_engine(self, number: int) -> None:
        for block_hash in self._blocks.pop(number):
            self._clear(number, block_hash)
        del self._max_blocks[number], self._masks[number]

    def match(self, hashes: Sequence[BlockHash]) -> PrefixHolders:
        """Return the engines that have the start of a chain."""
        levels: list[Level] = []
        mask = ALL
        for num_blocks, block_hash in enumerate(hashes):
            holders = self._holders.get(block_hash, 0) & mask
            if holders != mask and num_blocks:
                levels.append(Level(num_blocks, mask & ~holders))
            mask = holders
            if not mask:
                break
        else:
            if hashes:
                levels.append(Level(len(hashes), mask))
        return PrefixHolders(tuple(reversed(levels)))

    def note(self, number: int, hashes: Sequence[BlockHash], order: int) -> list[int]:
        """Record that an engine has a chain; return the orders of the blocks that it had.

        `order` must grow from call to call.
        """
        blocks, holders, own = self._blocks[number], self._holders, self._masks[number]
        max_blocks = self._max_blocks[number]
        hashes = hashes[:max_blocks]
        known: list[int] = []
        for block_hash in hashes:
            if block_hash not in blocks:
                break
            known.append(blocks[block_hash])
        for block_hash in reversed(hashes):
            blocks[block_hash] = order
            blocks.move_to_end(block_hash)
            others = holders.get(block_hash)
            holders[block_hash] = own if others is None else others | own
        while len(blocks) > max_blocks:
            self._clear(number, blocks.popitem(last=False)[0])
        return known

    def retract(self, number: int, hashes: Sequence[BlockHash], order: int) -> None:
        """Remove the blocks that only the note of this order gave to an engine."""
        blocks = self._blocks[number]
        for block_hash in hashes:
            if blocks.get(block_hash) == order:
                del blocks[block_hash]
                self._clear(number, block_hash)

    def drop_older(self, number: int, order: int) -> None:
        """Remove the blocks last used at this order or before: the engine evicts them first."""
        blocks = self._blocks[number]
        while blocks and next(iter(blocks.values())) <= order:
            self._clear(number, blocks.popitem(last=False)[0])

    def _clear(self, number: int, block_hash: BlockHash) -> None:
        left = self._holders[block_hash] & ~(1 << number)
        if left:
            self._holders[block_hash] = left
        else:
            del self._holders[block_hash]

    def check(self) -> None:
        holders: dict[BlockHash, int] = {}
        for number, blocks in self._blocks.items():
            if len(blocks) > self._max_blocks[number]:
                raise AssertionError(f"engine {number} has {len(blocks)} blocks")
            orders = list(blocks.values())
            if orders != sorted(orders):
                raise AssertionError(f"the blocks of engine {number} are not in order of use")
            for block_hash in blocks:
                holders[block_hash] = holders.get(block_hash, 0) | 1 << number
        if holders != self._holders:
            raise AssertionError("the two maps of the assigned prefixes differ")


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
