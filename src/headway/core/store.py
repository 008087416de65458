"""Who owns which slot of the executor's second store. A slot keeps one block's contents."""

from __future__ import annotations

from collections.abc import Iterable


class SlotPool:
    """Hands out slot ids and takes them back.

    A slot that was let go rests until the next plan is made: it may still be loaded from in that
    plan, and all saves of a plan come before its loads.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._resting: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """Slots that can be allocated now; those that rest are not among them."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free) - len(self._resting)

    def allocate(self) -> int:
        """Take a slot. The caller has checked `num_free`."""
        return self._free.pop()

    def free(self, slot_ids: Iterable[int]) -> None:
        """Let go of slots; they are free once a plan has been made."""
        for slot_id in slot_ids:
            if slot_id in self._resting:
                raise RuntimeError(f"slot {slot_id} is let go of twice")
            self._resting[slot_id] = None

    def take_back(self, slot_id: int) -> None:
        """Own a slot again that was let go of since the last plan: its contents are untouched."""
        del self._resting[slot_id]

    def settle(self) -> None:
        """A plan has been made: what rested is free."""
        self._free.extend(self._resting)
        self._resting.clear()

    def check(self, owned: Iterable[int]) -> None:
        """Every slot is free, resting, or owned once, by the count of the caller."""
        places = [*self._free, *self._resting, *owned]
        if sorted(places) != list(range(self.num_slots)):
            raise AssertionError(f"slots are lost or in two places: {sorted(places)}")
