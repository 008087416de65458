"""SlotPool: each slot is free, pending or owned."""

from __future__ import annotations

import pytest

from headway.core.kv.offload_slots import SlotPool


def test_slots_are_allocated_until_none_is_free():
    slots = SlotPool(3)
    assert sorted(slots.allocate() for _ in range(3)) == [0, 1, 2]
    assert (slots.num_free, slots.num_used) == (0, 3)
    slots.check([0, 1, 2])


def test_a_freed_slot_is_pending_until_a_plan_is_built():
    slots = SlotPool(1)
    slot_id = slots.allocate()
    slots.free([slot_id])
    assert (slots.num_free, slots.num_used) == (0, 0)
    slots.check([])
    slots.release_pending()
    assert slots.num_free == 1


def test_a_pending_slot_can_be_reclaimed():
    slots = SlotPool(2)
    slot_id = slots.allocate()
    slots.free([slot_id])
    slots.reclaim(slot_id)
    slots.release_pending()
    assert (slots.num_free, slots.num_used) == (1, 1)
    slots.check([slot_id])


def test_freeing_twice_raises():
    slots = SlotPool(1)
    slots.free([slots.allocate()])
    with pytest.raises(RuntimeError, match="twice"):
        slots.free([0])


@pytest.mark.parametrize("owned", [[], [0, 0], [0, 1]])
def test_a_slot_lost_or_owned_twice_is_found(owned: list[int]):
    slots = SlotPool(2)
    assert slots.allocate() == 0
    with pytest.raises(AssertionError):
        slots.check(owned)
