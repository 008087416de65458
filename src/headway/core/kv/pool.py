"""The pool of KV blocks: allocation and reference counts.

Every block is in exactly one of three states:

    empty    no owner and no indexed content; allocated first
    cached   no owner, but its content is in the prefix index; evicted when no empty block is left,
             in the order of headway.core.kv.eviction
    owned    reference count >= 1

A block with more than one owner is never written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from headway.core.executor import HashedBlock
from headway.core.kv.eviction import CachedBlocks
from headway.core.kv.prefix import BlockHash, PrefixIndex


class BlockPool:
    """Allocates and frees block ids; indexes full blocks by prefix."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._empty: list[int] = []
        """Empty blocks that were used before, the next to allocate last."""
        self._num_fresh = num_blocks
        """Empty blocks that were never used, the last ids of all; allocated after the others."""
        self._groups = [""] * num_blocks
        """Cache group of each indexed block."""
        self._cached = CachedBlocks()
        self._index = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: empty or cached."""
        return len(self._empty) + self._num_fresh + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def is_cached(self, block_id: int) -> bool:
        return block_id in self._cached

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks, evicting cached blocks if needed.

        The caller has checked `num_free`.
        """
        if count > self.num_free:
            raise RuntimeError(f"cannot allocate {count} blocks, {self.num_free} are free")
        block_ids: list[int] = []
        for _ in range(count):
            if self._empty:
                block_id = self._empty.pop()
            elif self._num_fresh:
                block_id = self.num_blocks - self._num_fresh
                self._num_fresh -= 1
            else:
                block_id = self._cached.pop()
                self._index.remove(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def add_references(self, block_ids: Sequence[int]) -> None:
        """Add an owner to each block; a cached block becomes owned again."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._cached.remove(block_id)
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Remove one owner of each block of a table.

        The loop starts at the end of the table: fewer requests can reuse the tail of a prefix than
        its head, so the tail becomes the older entry and is evicted first.
        """
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id] - 1
            if count < 0:
                raise RuntimeError(f"block {block_id} is freed but has no owner")
            self._ref_counts[block_id] = count
            if count == 0:
                if block_id in self._index:
                    self._cached.add(block_id, self._groups[block_id])
                else:
                    self._empty.append(block_id)

    def find(self, block_hash: BlockHash) -> int | None:
        """Return the block with this prefix, owned or cached."""
        return self._index.find(block_hash)

    def publish(self, block_id: int, block_hash: BlockHash, group: str = "") -> bool:
        """Add a full, owned block to the prefix index; return False if its content is there."""
        is_new = self._index.insert(block_hash, block_id)
        if is_new:
            self._groups[block_id] = group
        return is_new

    def withdraw(self, block_id: int) -> None:
        """Remove an owned block from the prefix index, because its owner will write it."""
        self._index.remove(block_id)

    def restore(self, blocks: Iterable[HashedBlock]) -> None:
        """Index blocks of an earlier engine process as cached blocks; all blocks are empty yet."""
        for block_id, block_hash, group, _ in blocks:
            if self._index.insert(BlockHash(block_hash), block_id):
                self._groups[block_id] = group
                self._cached.add(block_id, group)
        last_first = range(self.num_blocks - 1, -1, -1)
        self._empty = [block_id for block_id in last_first if block_id not in self._cached]
        self._num_fresh = 0

    def discard(self, block_id: int) -> None:
        """Empty a cached block, because its content cannot be used."""
        self._cached.remove(block_id)
        self._index.remove(block_id)
        self._empty.append(block_id)

    def num_unowned(self, block_ids: Sequence[int]) -> int:
        """Return how many of these blocks have no owner."""
        return sum(1 for block_id in block_ids if self._ref_counts[block_id] == 0)

    def num_freeable(self, block_ids: Iterable[int]) -> int:
        """Return how many blocks become free if each listing removes one owner."""
        release_counts = Counter(block_ids)
        return sum(
            [self._ref_counts[block_id] == times for block_id, times in release_counts.items()]
        )

    def check(self, owners: dict[int, int]) -> None:
        """Check the reference counts against `owners`: block id -> number of tables."""
        self._index.check()
        self._cached.check()
        fresh = range(self.num_blocks - self._num_fresh, self.num_blocks)
        empty, cached = {*self._empty, *fresh}, self._cached
        is_double = len(empty) != len(self._empty) + len(fresh)
        if is_double or any(id in cached for id in empty):
            raise AssertionError("a block is in the free lists twice")
        for block_id, count in enumerate(self._ref_counts):
            if count != owners.get(block_id, 0):
                raise AssertionError(
                    f"block {block_id}: {count} references, {owners.get(block_id, 0)} owners"
                )
            if (count == 0) != (block_id in empty or block_id in cached):
                raise AssertionError(f"block {block_id}: {count} references, but in the wrong list")
            if block_id in empty and block_id in self._index:
                raise AssertionError(f"block {block_id} is empty but indexed")
            if block_id in cached and block_id not in self._index:
                raise AssertionError(f"block {block_id} is cached but not indexed")
