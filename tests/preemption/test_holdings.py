"""What a preempted request keeps, what is taken from it later, and what it comes back to."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.causes import PreemptionMethod
from headway.core.events import Admitted, Preempted
from headway.core.executor import Capacity
from headway.core.kv.cache import KVCache
from headway.core.kv.offload import Offload
from headway.core.plan import StepPlan
from headway.core.request import Request
from tests.support.harness import Harness, expected_output, make_request, own_tokens

METHODS = ["auto", "trim", "checkpoint", "recompute"]


def short_of_blocks(**settings: Any) -> Harness:
    """Two requests of 3 blocks each in a pool of 6: the first to need a 4th preempts the other."""
    sizes = {"num_blocks": 6, "block_size": 4, "enable_prefix_caching": False, **settings}
    engine = Harness(**sizes)
    engine.add("a", 8, max_tokens=12)
    engine.add("b", 8, max_tokens=12)
    engine.until(lambda: bool(engine.seen(Preempted, "b")))
    return engine


def assert_exact(engine: Harness, **max_tokens: int) -> None:
    for request_id, count in max_tokens.items():
        expected = expected_output(own_tokens(request_id, 8), count)
        assert engine.output(request_id) == expected, request_id


def resumed(engine: Harness, request_id: str) -> Admitted:
    (event,) = [one for one in engine.seen(Admitted, request_id) if one.is_resumed]
    return event


@pytest.mark.parametrize(
    ("settings", "method", "num_lost"),
    [
        ({"preemption_method": "recompute"}, PreemptionMethod.RECOMPUTE, 12),
        ({"preemption_method": "trim"}, PreemptionMethod.TRIM, 4),
        ({"num_slots": 0}, PreemptionMethod.TRIM, 4),
        ({"preemption_method": "checkpoint", "num_slots": 3}, PreemptionMethod.CHECKPOINT, 0),
        ({"preemption_method": "checkpoint", "num_slots": 2}, PreemptionMethod.RECOMPUTE, 12),
        ({"num_slots": 1}, PreemptionMethod.CHECKPOINT, 0),
    ],
)
def test_a_preemption_says_how_it_was_done_and_what_was_lost(settings, method, num_lost):
    engine = short_of_blocks(**settings)
    (event,) = engine.seen(Preempted)
    assert (event.request_id, event.by) == ("b", "a")
    assert (event.method, event.num_tokens_lost) == (method, num_lost)
    engine.run()
    assert_exact(engine, a=12, b=12)


def test_no_more_is_taken_than_is_needed_and_more_when_more_is():
    engine = short_of_blocks(preemption_method="trim")
    assert len(engine.scheduler.kv.kept_blocks["b"]) == 2
    engine.until(lambda: len(engine.scheduler.kv.kept_blocks["b"]) == 1)
    assert len(engine.seen(Preempted)) == 1, "taking from one that waits is no preemption"
    engine.run()
    assert resumed(engine, "b").num_recomputed == 8
    assert resumed(engine, "b").num_cached_tokens == 4
    assert_exact(engine, a=12, b=12)


def test_what_was_saved_is_loaded_and_nothing_is_computed_again():
    engine = short_of_blocks(num_slots=2)
    plans: list[StepPlan] = []
    while engine.core.has_work:
        plan = engine.begin()
        assert plan is not None
        plans.append(plan)
        engine.end()
    assert resumed(engine, "b").num_recomputed == 0
    assert resumed(engine, "b").num_cached_tokens == 12
    assert sum(len(plan.loads) for plan in plans) == 2
    assert_exact(engine, a=12, b=12)


def test_the_last_slots_are_reused_when_the_store_is_full():
    """With one slot for two blocks, the later block of the two is lost."""
    engine = short_of_blocks(num_slots=1)
    engine.run()
    assert resumed(engine, "b").num_recomputed == 4
    assert_exact(engine, a=12, b=12)


@pytest.mark.parametrize("method", METHODS)
def test_an_abort_while_preempted_frees_blocks_and_slots(method: str):
    engine = short_of_blocks(num_slots=3, preemption_method=method)
    assert engine.abort("b")
    assert engine.scheduler.offload.slots.num_used == 0
    assert not engine.scheduler.kv.kept_blocks
    engine.run()
    assert_exact(engine, a=12)


def test_a_cached_prefix_need_not_be_loaded():
    """Its blocks went to the store, and one that still holds the same was not reused since."""
    engine = Harness(num_blocks=8, block_size=4, num_slots=8, preemption_method="checkpoint")
    engine.add("a", 8, max_tokens=16)
    engine.add("b", 8, max_tokens=12)
    engine.until(lambda: bool(engine.seen(Preempted, "b")))
    plans: list[StepPlan] = []
    while engine.core.has_work:
        plan = engine.begin()
        assert plan is not None
        plans.append(plan)
        engine.end()
    num_saved = len([s for plan in plans for s in plan.saves]) + 4
    num_loaded = len([load for plan in plans for load in plan.loads])
    assert 0 < num_loaded < num_saved
    assert resumed(engine, "b").num_recomputed == 0
    assert_exact(engine, a=16, b=12)


@pytest.mark.parametrize("method", METHODS)
def test_forked_samples_that_share_blocks_resume_exactly(method: str):
    engine = Harness(num_blocks=12, block_size=4, num_slots=4, preemption_method=method)
    engine.add("a", 14, max_tokens=12, n=3)
    engine.add("b", 6, max_tokens=20)
    engine.run()
    assert engine.seen(Preempted)
    for index in range(3):
        request_id = "a" if index == 0 else f"a#{index}"
        assert engine.output(request_id) == expected_output(own_tokens("a", 14), 12, index=index)
    assert engine.output("b") == expected_output(own_tokens("b", 6), 20)


@pytest.mark.parametrize("method", METHODS)
def test_a_higher_priority_takes_the_slot_and_leaves_the_blocks_alone(method: str):
    """There are blocks enough: by the methods that leave blocks in place, nothing moves."""
    engine = Harness(
        num_blocks=64,
        num_slots=64,
        max_num_seqs=1,
        scheduling_policy="priority",
        preemption_method=method,
        enable_prefix_caching=False,
    )
    engine.add("weak", 8, max_tokens=8)
    engine.steps(3)
    engine.add("strong", 8, max_tokens=4, priority=-1)
    engine.run()
    (event,) = engine.seen(Preempted)
    assert event.num_tokens_lost == (10 if method == "recompute" else 0)
    assert resumed(engine, "weak").num_recomputed == event.num_tokens_lost
    assert engine.output("weak") == expected_output(own_tokens("weak", 8), 8)


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_preempted_half_way_goes_on_where_it_was(method: str):
    engine = Harness(
        num_blocks=16,
        num_slots=16,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        scheduling_policy="priority",
        preemption_method=method,
        enable_prefix_caching=False,
    )
    engine.add("weak", 24, max_tokens=4)
    engine.step()
    engine.add("strong", 20, max_tokens=4, priority=-1)
    engine.run()
    assert resumed(engine, "weak").num_cached_tokens == (0 if method == "recompute" else 8)
    assert engine.output("weak") == expected_output(own_tokens("weak", 24), 4)
    assert engine.output("strong") == expected_output(own_tokens("strong", 20), 4)


def come_back(kv: KVCache, offload: Offload, request: Request) -> None:
    match = offload.match(request)
    kv.allocate(request, match, request.num_tokens)
    request.num_computed = offload.restore(request, kv.tables[request.id], match)


def test_one_preempted_again_before_its_slots_were_loaded_still_has_them():
    """In one pass: nothing is saved from blocks that hold nothing yet."""
    kv = KVCache(4, 4, enable_prefix_caching=False)
    offload = Offload(kv, Capacity(4, 4, 100, num_slots=3), "checkpoint")
    request = make_request("a", 12)
    kv.allocate(request, offload.match(request), 12)
    request.num_computed = 11
    kv.detach(request)
    offload.keep(request)
    saves, _ = offload.take_moves()
    assert len(saves) == 3

    come_back(kv, offload, request)
    kv.detach(request)
    offload.keep(request)
    offload.check([request.id])
    assert offload.take_moves() == ((), ())
    assert offload.num_lost(request) == 0

    come_back(kv, offload, request)
    _, loads = offload.take_moves()
    assert [load.slot_id for load in loads] == [save.slot_id for save in reversed(saves)]
    assert [load.block_id for load in loads] == kv.tables["a"].block_ids
    assert request.num_computed == 11
    assert offload.slots.num_free == 3
