"""The method chosen for a tail, with costs worked out by hand."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import pytest

from headway.core.causes import PreemptionMethod
from headway.core.kv.offload_methods import (
    CopyTime,
    PreemptionCosts,
    Tail,
    TokenCost,
    check_method,
    choose_method,
)
from headway.errors import ConfigError

TRIM, CHECKPOINT, RECOMPUTE = PreemptionMethod


@dataclass(frozen=True)
class Quadratic:
    """Later tokens cost more, as attention does."""

    def prefill_s(self, num_tokens: int, start: int = 0) -> float:
        return sum(range(start, start + num_tokens)) * 1e-3


def costs(copy_s: float = 0.001, num_free_slots: int = 10, **fields) -> PreemptionCosts:
    cost = fields.pop("cost", TokenCost(0.001))
    return PreemptionCosts(cost, copy_s, num_free_slots, block_size=16)


def test_a_tail_is_saved_if_two_copies_are_faster_than_recomputing():
    # Two blocks with 20 tokens: 20 ms to compute, 4 copies.
    tail = Tail(start=32, num_tokens=20, num_blocks=2)
    assert astuple(choose_method(tail, costs(0.004))) == (CHECKPOINT, pytest.approx(0.016), 0)
    assert astuple(choose_method(tail, costs(0.006))) == (TRIM, pytest.approx(0.020), 20)


def test_the_start_of_the_tail_changes_its_cost():
    early, late = Tail(0, 16, 1), Tail(160, 16, 1)
    by_cost = costs(0.5, cost=Quadratic())
    assert choose_method(early, by_cost).method is RECOMPUTE
    assert choose_method(late, by_cost).method is CHECKPOINT


def test_a_tail_of_the_whole_request_is_recomputed():
    assert astuple(choose_method(Tail(0, 20, 2), costs(1.0))) == (
        RECOMPUTE,
        pytest.approx(0.020),
        20,
    )


def test_without_slots_the_tail_is_dropped():
    assert choose_method(Tail(16, 20, 2), costs(num_free_slots=1)).method is TRIM
    assert choose_method(Tail(16, 20, 2), costs(num_free_slots=2)).method is CHECKPOINT


def test_slots_behind_a_dropped_tail_are_dropped():
    tail = Tail(start=16, num_tokens=16, num_blocks=1, num_slots=2, num_slot_tokens=20)
    assert astuple(choose_method(tail, costs(1.0))) == (TRIM, pytest.approx(0.036), 36)


def test_own_last_slots_are_reused_without_free_slots():
    """One slot is free, one is reused: 4 tokens are lost, and its contents are not loaded."""
    tail = Tail(start=16, num_tokens=32, num_blocks=2, num_slots=2, num_slot_tokens=20)
    choice = choose_method(tail, costs(0.001, num_free_slots=1))
    assert astuple(choice) == (CHECKPOINT, pytest.approx(0.003 + 0.004), 4)
    choice = choose_method(tail, costs(0.001, num_free_slots=0))
    assert astuple(choice) == (CHECKPOINT, pytest.approx(0.002 + 0.020), 20)


@pytest.mark.parametrize("method", ["trim", "recompute"])
def test_the_methods_trim_and_recompute_save_nothing(method: str):
    assert choose_method(Tail(16, 16, 1), costs(0.0), method).num_tokens_lost == 16


def test_the_method_checkpoint_saves_at_any_cost_while_slots_last():
    assert choose_method(Tail(16, 16, 1), costs(9.0), "checkpoint").method is CHECKPOINT
    tail = Tail(16, 16, 1)
    assert choose_method(tail, costs(9.0, num_free_slots=0), "checkpoint").method is TRIM


def test_the_copy_time_follows_measurements():
    copy_time = CopyTime(0.0)
    copy_time.observe(0, 5.0)
    assert copy_time.block_copy_s == 0.0
    copy_time.observe(10, 0.1)
    assert copy_time.block_copy_s == pytest.approx(0.01)
    for _ in range(30):
        copy_time.observe(2, 0.04)
    assert copy_time.block_copy_s == pytest.approx(0.02, rel=0.01)


def test_an_unknown_method_is_refused():
    assert check_method("auto") == "auto"
    with pytest.raises(ConfigError, match="auto, trim, checkpoint, recompute"):
        check_method("swap")
