"""Admission: refusals, limits, headroom and bypass."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.events import Admitted, Arrived, Refused
from headway.core.executor import Capacity
from headway.core.running.admission import PeakDemand, max_tokens_for, refuse_if_never_fits
from headway.core.running.headroom import Headroom
from headway.core.scheduler import MAX_SKIPS
from headway.errors import NeverFitsError
from tests.support.harness import Harness

CAPACITY = Capacity(num_blocks=4, block_size=4, max_model_len=100)


# ---------------------------------------------------------------------- never fits


def test_a_request_above_the_context_is_refused_with_the_numbers():
    refusal = refuse_if_never_fits(PeakDemand(90, 11, 1), CAPACITY, 8)
    assert refusal is not None
    assert "90 prompt tokens and 11 output tokens" in refusal.message
    assert "100 tokens" in refusal.message
    assert refusal.param == "max_tokens"


def test_a_request_above_the_cache_is_refused_with_the_numbers():
    refusal = refuse_if_never_fits(PeakDemand(10, 8, 1), CAPACITY, 8)
    assert refusal is not None
    assert "need 5 KV blocks of 4 tokens; the whole cache has 4" in refusal.message


def test_more_samples_than_max_num_seqs_are_refused():
    refusal = refuse_if_never_fits(PeakDemand(1, 1, 9), CAPACITY, 8)
    assert refusal is not None
    assert (refusal.param, "n=9" in refusal.message) == ("n", True)


def test_the_last_output_token_needs_no_room():
    assert refuse_if_never_fits(PeakDemand(10, 7, 1), CAPACITY, 8) is None
    assert refuse_if_never_fits(PeakDemand(10, 8, 1), CAPACITY, 8) is not None


@pytest.mark.parametrize("num_prompt_tokens", range(1, 17))
def test_max_tokens_for_is_exactly_what_is_not_refused(num_prompt_tokens: int):
    room = max_tokens_for(num_prompt_tokens, CAPACITY)
    assert refuse_if_never_fits(PeakDemand(num_prompt_tokens, room, 1), CAPACITY, 8) is None
    assert refuse_if_never_fits(PeakDemand(num_prompt_tokens, room + 1, 1), CAPACITY, 8) is not None


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers():
    with pytest.raises(NeverFitsError, match=r"17 tokens.*17 tokens") as refusal:
        max_tokens_for(17, CAPACITY)
    assert refusal.value.param == "prompt"


def test_a_refused_request_has_no_blocks_and_blocks_no_other():
    engine = Harness(num_blocks=4, block_size=4)
    engine.add("giant", 20)
    engine.add("a", 4, max_tokens=1)
    (refused,) = engine.seen(Refused)
    assert (refused.request_id, refused.reason) == ("giant", "never_fits")
    assert "giant" not in engine.scheduler.requests
    assert [event.request_id for event in engine.seen(Arrived)] == ["a"]
    engine.run()


def test_an_empty_engine_admits_into_the_watermark():
    engine = Harness(num_blocks=4, block_size=4, kv_watermark=0.9)
    engine.add("a", 10, max_tokens=7)
    engine.run()
    assert engine.finish("a").num_output_tokens == 7


# ---------------------------------------------------------------------------- now


def test_room_is_made_for_the_whole_prompt_at_once():
    engine = Harness(num_blocks=8, block_size=4, max_num_batched_tokens=4)
    engine.add("a", 24, max_tokens=1)
    engine.step()
    assert engine.num_free == 2


def test_admission_leaves_the_watermark_free_while_others_run():
    engine = Harness(num_blocks=10, block_size=4, kv_watermark=0.2)
    engine.add("a", 14, max_tokens=4)
    engine.step()
    engine.add("b", 20, max_tokens=4)
    engine.add("c", 16, max_tokens=4)
    engine.step()
    assert engine.running == ["a", "c"]
    assert engine.num_free == 2


def test_admission_leaves_more_free_after_growth_had_to_preempt():
    engine = Harness(num_blocks=8, block_size=4)
    engine.add("a", 8, max_tokens=5)
    engine.add("b", 7, max_tokens=20)
    engine.add("c", 7, max_tokens=20)
    engine.add("d", 3, max_tokens=3)
    engine.steps(3)
    assert (engine.running, engine.waiting) == (["a", "b"], {"c", "d"})
    engine.until(lambda: engine.running == ["b", "c"])
    engine.step()
    # It would fit into the block that is left for these two to grow into.
    assert (engine.running, engine.waiting, engine.num_free) == (["b", "c"], {"d"}, 1)
    engine.run()


def test_an_empty_engine_leaves_nothing_free():
    headroom = Headroom(min_blocks=3)
    for _ in range(10):
        headroom.widen()
    assert [headroom.num_blocks(count, None) for count in (0, 1, 5)] == [0, 4, 20]
    assert headroom.num_blocks(5, []) == 3
    for _ in range(2000):
        headroom.decay()
    assert headroom.num_blocks(5, None) == 3


def test_running_requests_may_grow_into_the_watermark():
    engine = Harness(num_blocks=4, block_size=4, kv_watermark=0.5)
    engine.add("a", 4, max_tokens=13)
    engine.run()
    assert engine.finish("a").num_output_tokens == 13


def test_every_sample_counts_as_a_sequence():
    engine = Harness(max_num_seqs=3)
    engine.add("a", 4, max_tokens=3)
    engine.add("b", 4, n=3, max_tokens=3)
    engine.step()
    assert (engine.running, engine.waiting) == (["a"], {"b"})
    engine.run()


def test_the_running_limit_holds():
    engine = Harness(max_num_seqs=2)
    for request_id in "abc":
        engine.add(request_id, 2)
    engine.step()
    assert engine.running == ["a", "b"]


# ------------------------------------------------------------------------- bypass


def blocked_engine(**settings: Any) -> Harness:
    """`holder` leaves six of sixteen blocks; `big` needs ten; small ones would fit."""
    engine = Harness(num_blocks=16, block_size=4, **settings)
    engine.add("holder", 40, max_tokens=24)
    engine.step()
    engine.add("big", 40, max_tokens=1)
    return engine


def test_smaller_requests_bypass_a_request_that_does_not_fit():
    engine = blocked_engine()
    engine.add("small", 4, max_tokens=1)
    assert list(engine.step()) == ["holder", "small"]


def count_passing(engine: Harness, num_small: int, step_s: float = 0.0) -> int:
    """How many of `num_small` one-step requests get past `big` while it cannot run."""
    passed = 0
    for at in range(num_small):
        engine.add(f"s{at}", 4, max_tokens=1)
        passed += f"s{at}" in engine.step()
        engine.advance(step_s)
    return passed


def test_a_request_is_bypassed_for_a_bounded_time():
    engine = blocked_engine(max_wait_s=2.5)
    assert count_passing(engine, 8, step_s=1.0) == 3


def test_an_aging_bound_of_zero_means_strict_order():
    assert count_passing(blocked_engine(max_wait_s=0.0), 3) == 0


def test_an_aged_request_gets_the_next_free_blocks():
    engine = Harness(num_blocks=16, block_size=4, max_wait_s=0.0)
    engine.add("holder", 40, max_tokens=4)
    engine.step()
    engine.add("big", 40, max_tokens=1)
    for at in range(6):
        engine.add(f"s{at}", 4, max_tokens=1)
    engine.run()
    order = [event.request_id for event in engine.seen(Admitted)]
    assert order == ["holder", "big", "s0", "s1", "s2", "s3", "s4", "s5"]


def test_a_pass_tries_a_bounded_number_of_requests():
    engine = Harness(num_blocks=16, block_size=4)
    engine.add("holder", 40, max_tokens=20)
    engine.step()
    for at in range(MAX_SKIPS):
        engine.add(f"big{at}", 40, max_tokens=1)
    engine.add("small", 4, max_tokens=1)
    engine.step()
    assert "small" in engine.waiting
    engine.abort("big1")
    assert "small" in engine.step()


def test_a_request_that_lacks_sequences_is_bypassed_for_a_bounded_time():
    engine = Harness(max_num_seqs=4, max_wait_s=2.5)
    engine.add("holder", 4, max_tokens=30)
    engine.step()
    engine.add("wide", 4, n=4, max_tokens=1)
    assert count_passing(engine, 5, step_s=1.0) == 3


def test_a_wait_is_measured_from_arrival_and_again_from_preemption():
    engine = Harness(num_blocks=6, block_size=4)
    engine.add("a", 8, max_tokens=12)
    engine.add("b", 8, max_tokens=8)
    engine.advance(2.0)
    while engine.core.has_work:
        engine.step()
        engine.advance(1.0)
    first, second = engine.seen(Admitted, "b")
    assert (first.waited_s, first.is_resumed) == (2.0, False)
    assert second.is_resumed
    assert 0 < second.waited_s < second.at
