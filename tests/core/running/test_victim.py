"""Victim choice: for a growing table, for a waiting request, and immunity."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.events import Admitted, Finished, Preempted
from headway.core.kv.cache import NO_MATCH, KVCache
from headway.core.request import RequestState
from headway.core.running.victim import VictimRules, choose_victim
from headway.core.waiting.policies import fcfs
from tests.support.harness import Harness, expected_output, make_request, own_tokens


def victims(engine: Harness) -> list[tuple[str, str]]:
    return [(event.request_id, event.by) for event in engine.seen(Preempted)]


# ------------------------------------------------------------- for a block to grow


def three_in_twelve_blocks(method: str = "auto") -> Harness:
    """Three requests hold four blocks each and need a fifth at the same step."""
    engine = Harness(
        num_blocks=12, block_size=4, max_num_batched_tokens=64, preemption_method=method
    )
    for request_id in "abc":
        engine.add(request_id, 16, max_tokens=8)
    engine.step()
    assert engine.num_free == 0
    return engine


def test_the_highest_eviction_key_is_preempted():
    engine = three_in_twelve_blocks()
    assert list(engine.step()) == ["a", "b"]
    assert victims(engine) == [("c", "a")]
    assert engine.scheduler.requests["c"].state is RequestState.PREEMPTED


def test_under_priority_the_highest_number_is_preempted():
    engine = Harness(
        num_blocks=12, block_size=4, max_num_batched_tokens=64, scheduling_policy="priority"
    )
    for request_id, rank in (("a", 2), ("b", 0), ("c", 1)):
        engine.add(request_id, 16, max_tokens=8, priority=rank)
    engine.steps(2)
    assert victims(engine) == [("a", "b")]


def test_a_preempted_request_keeps_its_arrival_order():
    engine = three_in_twelve_blocks()
    engine.add("late", 4, max_tokens=1)
    engine.step()
    assert engine.waiting == {"c", "late"}
    head = engine.scheduler.waiting.pop()
    assert head is not None
    assert head.id == "c"


def test_no_request_is_admitted_into_blocks_freed_in_the_same_step():
    engine = three_in_twelve_blocks("recompute")
    engine.add("late", 1, max_tokens=1)
    step = engine.step()
    assert victims(engine) == [("c", "a")]
    assert engine.num_free == 2
    assert "late" not in step
    assert "late" in engine.step()


def test_output_continues_after_preemption_without_repeats():
    engine = three_in_twelve_blocks()
    engine.run()
    assert victims(engine)
    for request_id in "abc":
        assert engine.output(request_id) == expected_output(own_tokens(request_id, 16), 8)


def test_the_requester_may_be_its_own_victim():
    engine = Harness(num_blocks=8, block_size=4, max_num_batched_tokens=64)
    engine.add("a", 14, max_tokens=16)
    engine.add("b", 16, max_tokens=8)
    engine.step()
    assert list(engine.step()) == ["a"]
    assert victims(engine) == [("b", "b")]


def test_the_lowest_eviction_key_is_never_a_victim():
    engine = Harness(num_blocks=6, block_size=2, max_num_batched_tokens=64)
    for request_id in "abcd":
        engine.add(request_id, 2, max_tokens=10)
    while engine.core.has_work:
        strongest = min(request.arrival_order for request in engine.scheduler.requests.values())
        before = len(engine.seen(Preempted))
        engine.step()
        for event in engine.seen(Preempted)[before:]:
            assert event.request_id != "abcd"[strongest - 1]
    assert [event.request_id for event in engine.seen(Finished)] == ["a", "b", "c", "d"]


def test_a_request_with_only_shared_blocks_is_no_victim():
    kv = KVCache(num_blocks=4, block_size=4, enable_prefix_caching=True)
    strong, short = make_request("strong", 4), make_request("short", 8)
    heir = make_request("heir", [*short.token_ids, 5])
    kv.allocate(short, NO_MATCH, 8)
    short.num_computed = 8
    kv.publish(short)
    kv.allocate(heir, kv.match(heir), 9)
    kv.allocate(strong, NO_MATCH, 4)
    assert (kv.num_freeable([short]), kv.num_freeable([heir])) == (0, 1)
    assert kv.num_freeable([short, heir]) == 3
    assert (
        choose_victim(strong, [strong, heir, short], kv, VictimRules(lambda it: fcfs(it)[:2], 4))
        is heir
    )


# ------------------------------------------------------------------------ immunity


def test_a_growing_request_skips_steps_if_all_others_are_immune():
    engine = Harness(num_blocks=8, block_size=4, max_preemptions=1)
    engine.add("a", 8, max_tokens=20)
    engine.add("b", 4, max_tokens=13, num_preemptions=1)
    engine.until(lambda: engine.num_free == 0)
    engine.until(lambda: "a" not in engine.step())
    assert engine.running == ["a", "b"]
    engine.run()
    assert victims(engine) == []
    assert engine.output("a") == expected_output(own_tokens("a", 8), 20)


def immune_engine(max_preemptions: int) -> Harness:
    """The victim is preempted `max_preemptions` times, each time by another request."""
    engine = Harness(
        num_blocks=8,
        block_size=4,
        max_num_batched_tokens=64,
        max_preemptions=max_preemptions,
        scheduling_policy="priority",
        max_num_seqs=1,
    )
    engine.add("victim", 8, max_tokens=16, priority=9)
    for at in range(max_preemptions):
        engine.step()
        engine.add(f"s{at}", 4, max_tokens=1)
        engine.step()
    return engine


@pytest.mark.parametrize("max_preemptions", [1, 3])
def test_a_request_preempted_k_times_is_immune(max_preemptions: int):
    engine = immune_engine(max_preemptions)
    assert len(victims(engine)) == max_preemptions
    engine.step()
    engine.add("last", 4, max_tokens=1)
    assert list(engine.step()) == ["victim"]
    engine.run()
    assert len(victims(engine)) == max_preemptions
    assert engine.output("victim") == expected_output(own_tokens("victim", 8), 16)


def test_an_immune_request_gets_room_for_its_whole_output():
    engine = immune_engine(2)
    engine.step()
    assert len(engine.scheduler.kv.tables["victim"].block_ids) == -(-(8 + 16 - 1) // 4)


def test_an_immune_request_waits_until_its_whole_output_fits():
    engine = Harness(
        num_blocks=8, block_size=4, max_num_batched_tokens=64, max_preemptions=1, max_wait_s=0.0
    )
    engine.add("a", 14, max_tokens=16)
    engine.add("b", 16, max_tokens=8)
    while "a" in engine.scheduler.requests:
        engine.step()
        assert engine.scheduler.requests["b"].num_preemptions <= 1
    assert "b" in engine.waiting
    engine.step()
    assert len(engine.scheduler.kv.tables["b"].block_ids) == 6
    engine.run()


# --------------------------------------------------------- for a waiting request


def full_batch(*ranks: int, **settings: Any) -> Harness:
    """Requests r0, r1, ... of these priorities, decoding at the running limit."""
    engine = Harness(
        num_blocks=settings.pop("num_blocks", 32),
        max_num_seqs=len(ranks),
        max_num_batched_tokens=64,
        scheduling_policy="priority",
        **settings,
    )
    for at, rank in enumerate(ranks):
        engine.add(f"r{at}", 8, max_tokens=30, priority=rank)
    engine.step()
    return engine


def test_an_arrival_of_higher_priority_starts_in_the_next_step():
    engine = full_batch(5, 5, 7)
    engine.add("vip", 4, priority=0)
    assert "vip" in engine.step()
    assert victims(engine) == [("r2", "vip")]


@pytest.mark.parametrize("rank", [5, 6])
def test_an_arrival_of_equal_or_lower_priority_does_not_preempt(rank: int):
    engine = full_batch(5, 5)
    engine.add("peer", 4, priority=rank)
    engine.step()
    assert (victims(engine), engine.waiting) == ([], {"peer"})


def test_under_fcfs_priority_does_not_preempt():
    engine = Harness(max_num_seqs=1, scheduling_policy="fcfs")
    engine.add("a", 4, priority=9)
    engine.step()
    engine.add("b", 4, priority=0)
    engine.step()
    assert victims(engine) == []


def test_as_many_are_preempted_as_the_arrival_has_samples():
    engine = full_batch(5, 6, 7)
    engine.add("vip", 4, n=2, priority=0)
    engine.step()
    assert victims(engine) == [("r2", "vip"), ("r1", "vip")]
    assert engine.running == ["vip", "vip#1", "r0"]


def test_an_arrival_below_the_running_limit_preempts_for_blocks():
    engine = Harness(
        num_blocks=8, max_num_seqs=8, max_num_batched_tokens=64, scheduling_policy="priority"
    )
    engine.add("r0", 10, max_tokens=2, priority=5)
    engine.add("r1", 10, max_tokens=2, priority=7)
    engine.step()
    engine.add("vip", 12, priority=0)
    assert "vip" in engine.step()
    assert victims(engine) == [("r1", "vip")]


def test_no_preemption_if_it_is_not_enough():
    engine = full_batch(0, 5, num_blocks=12)
    engine.add("r2", 44, max_tokens=1, priority=3)
    engine.step()
    assert victims(engine) == [], "without r1 ten blocks are free, and r2 needs eleven"
    assert "r2" in engine.waiting


def test_no_preemption_if_a_growing_request_needs_the_blocks():
    engine = full_batch(0, 5, num_blocks=12)
    engine.add("r2", 40, max_tokens=1, priority=3)
    # Without r1 there are ten blocks and r2 needs ten, but r0 needs one more in this step.
    engine.step()
    assert victims(engine) == []
    assert "r2" in engine.waiting


def test_no_preemption_if_the_watermark_is_used_up():
    engine = Harness(
        num_blocks=10,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_watermark=0.3,
        scheduling_policy="priority",
    )
    engine.add("strong", 16, max_tokens=20, priority=0)
    engine.add("weak", 8, max_tokens=17, priority=9)
    engine.until(lambda: engine.num_free == 0)
    num_tenant_blocks = len(engine.scheduler.kv.tables["weak"].block_ids)
    # The blocks of weak are enough for the prompt, but not for the prompt and the watermark.
    engine.add("vip", 4 * num_tenant_blocks - 4, max_tokens=1, priority=5)
    engine.begin()
    for event in engine.scheduler.take_events():
        assert not (isinstance(event, Preempted) and event.by == "vip")
    assert "vip" in engine.waiting


def test_a_victim_that_is_not_needed_keeps_running():
    engine = Harness(
        num_blocks=12, max_num_seqs=8, max_num_batched_tokens=64, scheduling_policy="priority"
    )
    engine.add("rich", 30, max_tokens=2, priority=5)
    engine.add("poor", 2, max_tokens=8, priority=9)
    engine.step()
    engine.add("vip", 36, max_tokens=1, priority=0)
    engine.step()
    assert victims(engine) == [("rich", "vip")]
    assert engine.running == ["poor"]


def test_blocks_that_only_the_victims_share_count_as_freed():
    engine = Harness(
        num_blocks=12, max_num_seqs=8, max_num_batched_tokens=64, scheduling_policy="priority"
    )
    engine.add("p", 33, n=3, max_tokens=3, priority=5)
    engine.step()
    assert engine.num_free == 1
    engine.add("vip", 40, max_tokens=1, priority=0)
    assert list(engine.step()) == ["vip"]
    assert {victim for victim, _ in victims(engine)} == {"p", "p#1", "p#2"}


def test_an_arrival_reuses_the_blocks_of_its_victim():
    engine = Harness(
        num_blocks=6, max_num_seqs=8, max_num_batched_tokens=64, scheduling_policy="priority"
    )
    prompt = list(range(16))
    engine.add("old", prompt, max_tokens=6, priority=5)
    engine.step()
    engine.add("vip", [*prompt, *range(100, 107)], max_tokens=1, priority=0)
    assert list(engine.step()) == ["vip"], "old's tail and the free blocks are enough"
    assert engine.seen(Admitted, "vip")[0].num_cached_tokens == 16
    engine.run()


def test_blocks_shared_with_the_arrival_do_not_count_as_freed():
    engine = Harness(num_blocks=5, max_num_batched_tokens=64, scheduling_policy="priority")
    prompt = list(range(8))
    engine.add("strong", 2, max_tokens=3, priority=0)
    engine.add("weak", prompt, max_tokens=8, priority=9)
    engine.steps(2)
    # Five blocks, two of them matched; one is free and weak has one that is not matched.
    engine.add("vip", [*prompt, *range(100, 112)], max_tokens=1, priority=5)
    engine.step()
    assert victims(engine) == []


@pytest.mark.parametrize("ranks", [(0, 0, 9), (5, 5, 9), (5, 7)])
def test_equal_priority_is_not_preempted_with_lower_priority(ranks: tuple[int, ...]):
    engine = full_batch(*ranks)
    engine.add("vip", 4, n=2, priority=5)
    engine.step()
    assert victims(engine) == []


def test_growth_frees_blocks_without_computed_tokens_first():
    engine = Harness(num_blocks=11, block_size=4, max_num_batched_tokens=8)
    engine.add("a", 4, max_tokens=20)
    engine.add("b", 40, max_tokens=2)
    engine.steps(2)
    (event,) = engine.seen(Preempted, "b")
    assert (event.by, event.num_tokens_lost) == ("a", 0)
    engine.run()


def test_an_arrival_frees_blocks_without_computed_tokens_first():
    engine = Harness(num_blocks=11, block_size=4, max_num_batched_tokens=8)
    engine.add("b", 40, max_tokens=2, priority=1)
    engine.step()
    engine.add("c", 8, max_tokens=2, priority=0)
    engine.step()
    (event,) = engine.seen(Preempted, "b")
    assert (event.by, event.num_tokens_lost) == ("c", 0)
    engine.run()
