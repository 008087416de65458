"""The cached blocks that nobody owns, and which of them goes first.

The least recently used goes first, with one exception: a group (by default a tenant) that has
filled more than its share of the cache gives up its own blocks before anybody else loses any. So
one tenant's flood of prompts cannot throw out what the others have cached.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_GROUP_SHARE = 0.5
"""Of the cached blocks, while others want the room."""


class CachedBlocks:
    """Blocks in order of use, over all and within each group. Every operation is O(1)."""

    def __init__(self) -> None:
        self._group_of: OrderedDict[int, str] = OrderedDict()
        self._by_group: dict[str, OrderedDict[int, None]] = {}
        self._large_groups: dict[str, None] = {}
        """Groups that were above their share when they last grew; no other can be far above."""

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._group_of

    def add(self, block_id: int, group: str) -> None:
        """As the most recently used."""
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
        """The block whose content is worth least."""
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
        listed = {id: group for group, blocks in self._by_group.items() for id in blocks}
        if listed != dict(self._group_of):
            raise AssertionError("the cached blocks are not those of the groups")
