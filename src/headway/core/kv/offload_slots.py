"""Free list of the slots of the offload store. A slot stores one block."""

from __future__ import annotations

from collections.abc import Iterable


class SlotPool:
    """Allocates and frees slot ids.

    A freed slot can be allocated only after the next plan is built: that plan may still load from
    the slot, and the saves of a plan come before its loads.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._pending_free: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        """Slots that can be allocated now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free) - len(self._pending_free)

    def allocate(self) -> int:
        """Allocate a slot; the caller has checked `num_free`."""
        return self._free.pop()

    def free(self, slot_ids: Iterable[int]) -> None:
        """Free slots; they can be allocated once the next plan is built."""
        for slot_id in slot_ids:
            if slot_id in self._pending_free:
                raise RuntimeError(f"slot {slot_id} is freed twice")
            self._pending_free[slot_id] = None

    def reclaim(self, slot_id: int) -> None:
        """Take back a slot freed since the last plan; its contents are unchanged."""
        del self._pending_free[slot_id]

    def release_pending(self) -> None:
        """Make slots freed since the last plan available; called when a plan is built."""
        self._free.extend(self._pending_free)
        self._pending_free.clear()

    def check(self, owned: Iterable[int]) -> None:
        """Check that every slot is exactly once free, pending or owned."""
        slot_ids = sorted([*self._free, *self._pending_free, *owned])
        if slot_ids != list(range(self.num_slots)):
            raise AssertionError(f"slots are missing or duplicated: {slot_ids}")
