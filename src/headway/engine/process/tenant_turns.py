"""Work that waits, taken from its tenants in turn.

A round has one item of each tenant. However many items a tenant adds, the next item of another
waits for one of them at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from typing import Generic, NamedTuple, TypeVar

ItemT = TypeVar("ItemT")


class _Rank(NamedTuple):
    """Where an item stands; the least goes first."""

    round: int
    number: int
    """Items that were added before it."""


class TenantTurns(Generic[ItemT]):
    """Waiting items by tenant, those of each tenant in the order of arrival."""

    def __init__(self) -> None:
        self._items: dict[str, deque[tuple[_Rank, ItemT]]] = {}
        self._num_added = 0
        self._round = 0
        """The latest round that an item was taken from."""
        self._next_rounds: dict[str, int] = {}
        """Round of the next item of each tenant, if it is a later one."""

    def add(self, tenant: str, item: ItemT) -> None:
        place = _Rank(self._next_rounds.get(tenant, self._round), self._num_added)
        self._num_added += 1
        self._next_rounds[tenant] = place.round + 1
        self._items.setdefault(tenant, deque()).append((place, item))

    def take(self, busy: Container[str] = ()) -> tuple[str, ItemT] | None:
        """Return the next item and its tenant; None if only busy tenants have any."""
        first = {name: items[0][0] for name, items in self._items.items() if name not in busy}
        if not first:
            return None
        tenant = min(first, key=first.__getitem__)
        items = self._items[tenant]
        place, item = items.popleft()
        if not items:
            del self._items[tenant]
        self._round = max(self._round, place.round)
        later = {name: turn for name, turn in self._next_rounds.items() if turn > self._round}
        self._next_rounds = later
        return tenant, item
