"""The pool of KV blocks: who may write where, and what is thrown away first.

Every block is in exactly one of three places:

    empty    nothing of value in it; taken first
    cached   no owner, but its content is indexed by prefix; taken when no empty block is left,
             in the order of headway.core.kv.eviction
    owned    reference count >= 1

A block with more than one owner is never written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from headway.core.kv.eviction import CachedBlocks
from headway.core.kv.prefix import BlockHash, PrefixIndex


class BlockPool:
    """Hands out block ids and takes them back; indexes full blocks by their prefix."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._groups = [""] * num_blocks
        """Of each indexed block: whose content it holds."""
        self._cached = CachedBlocks()
        self._index = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: empty ones and cached ones without an owner."""
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting cached content if needed. The caller has checked
        `num_free`; asking for more is a bug."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked for, {self.num_free} free")
        taken: list[int] = []
        for _ in range(count):
            if self._empty:
                block_id = self._empty.pop()
            else:
                block_id = self._cached.pop()
                self._index.remove(block_id)
            self._ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

    def add_references(self, block_ids: Sequence[int]) -> None:
        """Add an owner to each block; a cached block becomes owned again."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._cached.remove(block_id)
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one owner of each block of a table.

        The table is walked from its end: the tail of a prefix is of less use to others than
        its head, so it becomes the older entry and is evicted first.
        """
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id] - 1
            if count < 0:
                raise RuntimeError(f"block {block_id} freed by nobody's owner")
            self._ref_counts[block_id] = count
            if count == 0:
                if block_id in self._index:
                    self._cached.add(block_id, self._groups[block_id])
                else:
                    self._empty.append(block_id)

    def find(self, block_hash: BlockHash) -> int | None:
        """The block holding this prefix, owned or cached."""
        return self._index.find(block_hash)

    def publish(self, block_id: int, block_hash: BlockHash, group: str = "") -> None:
        """Make a full, owned block findable by its prefix, as part of a group's cache."""
        if self._index.insert(block_hash, block_id):
            self._groups[block_id] = group

    def num_unowned(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks have no owner, and so count as free until they are shared."""
        return sum(1 for block_id in block_ids if self._ref_counts[block_id] == 0)

    def num_freeable(self, block_ids: Iterable[int]) -> int:
        """How many blocks would become free if one owner let go for each time one is listed."""
        release_counts = Counter(block_ids)
        return sum(
            [self._ref_counts[block_id] == times for block_id, times in release_counts.items()]
        )

    def check(self, owners: dict[int, int]) -> None:
        """Compare with the owners counted by the caller: block id -> number of tables."""
        self._index.check()
        self._cached.check()
        empty, cached = set(self._empty), self._cached
        if len(empty) != len(self._empty) or any(id in cached for id in empty):
            raise AssertionError("a block is free twice")
        for block_id, count in enumerate(self._ref_counts):
            if count != owners.get(block_id, 0):
                raise AssertionError(
                    f"block {block_id}: {count} references, {owners.get(block_id, 0)} owners"
                )
            if (count == 0) != (block_id in empty or block_id in cached):
                raise AssertionError(f"block {block_id}: {count} references and wrongly placed")
            if block_id in empty and block_id in self._index:
                raise AssertionError(f"block {block_id} is empty but indexed")
            if block_id in cached and block_id not in self._index:
                raise AssertionError(f"block {block_id} is cached but not indexed")
