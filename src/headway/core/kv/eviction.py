"""Cached blocks without an owner, in eviction order.

The order is least recently used, with one exception: blocks of a cache group above
MAX_GROUP_SHARE are evicted first. So the prompts of one tenant cannot evict the blocks of all
other tenants.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_GROUP_SHARE = 0.5
"""Share of the cached blocks above which a group loses its own blocks first."""


class CachedBlocks:
    """Blocks in order of use, overall and per cache group; each operation is O(1)."""

    def __init__(self) -> None:
        self._group_of: OrderedDict[int, str] = OrderedDict()
        self._by_group: dict[str, OrderedDict[int, None]] = {}
        self._large_groups: dict[str, None] = {}
        """Groups above their share when they last grew; includes every group above it by much."""

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._group_of

    def add(self, block_id: int, group: str) -> None:
        """Add a block as the most recently used."""
        self._group_of[block_id] = group
        blocks = self._by_group.get(group)
        if blocks is None:
            blocks = self._by_group[group] = OrderedDict()
        blocks[block_id] = None
        if self._is_above_share(group):
            self._large_groups[group] = None

    def remove(self, block_id: int) -> None:
        group = self._group_of.pop(block_id)
        blocks = self._by_group[group]
        del blocks[block_id]
        if not blocks:
            del self._by_group[group]

    def pop(self) -> int:
        """Remove and return the block to evict next."""
        while self._large_groups:
            group = next(iter(self._large_groups))
            if self._is_above_share(group):
                block_id = next(iter(self._by_group[group]))
                break
            del self._large_groups[group]
        else:
            block_id = next(iter(self._group_of))
        self.remove(block_id)
        return block_id

    def _is_above_share(self, group: str) -> bool:
        return len(self._by_group.get(group, ())) > MAX_GROUP_SHARE * len(self._group_of)

    def check(self) -> None:
        group_of = {id: group for group, blocks in self._by_group.items() for id in blocks}
        if group_of != dict(self._group_of):
            raise AssertionError("the cached blocks differ from the blocks by group")
