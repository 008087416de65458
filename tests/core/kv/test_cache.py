"""Block tables: prefix reuse, forking, and shared blocks."""

from __future__ import annotations

import pytest

from headway.core.events import Admitted, Forked, Preempted
from headway.core.request import RequestState
from headway.core.terms import Terms
from tests.support.harness import Harness, expected_output, own_tokens


def cached_tokens(engine: Harness, request_id: str) -> int:
    return engine.seen(Admitted, request_id)[-1].num_cached_tokens


def run_one(engine: Harness, request_id: str, prompt: list[int], **fields: object) -> None:
    engine.add(request_id, prompt, **fields)
    engine.run()


# ------------------------------------------------------------------- prefix reuse


def test_an_equal_prefix_is_not_computed_again():
    engine = Harness(block_size=4)
    run_one(engine, "a", list(range(10)))
    engine.add("b", [*range(8), 99, 98])
    (item,) = engine.step().values()
    assert (item.start, item.token_ids) == (8, (99, 98))
    assert engine.output("b") == expected_output([*range(8), 99, 98], 1)


def test_a_prefix_is_shared_while_its_first_owner_still_runs():
    engine = Harness(block_size=4)
    engine.add("a", list(range(8)), max_tokens=20)
    engine.step()
    engine.add("b", list(range(8)), max_tokens=20)
    engine.step()
    tables = [engine.scheduler.kv.tables[id].block_ids for id in ("a", "b")]
    assert tables[0][:1] == tables[1][:1]
    engine.run()
    assert engine.output("a") == engine.output("b")


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_the_last_token_is_never_matched(length: int):
    engine = Harness(block_size=4)
    prompt = list(range(length))
    run_one(engine, "a", prompt, max_tokens=9)
    run_one(engine, "b", prompt, max_tokens=9)
    assert cached_tokens(engine, "b") == (length - 1) // 4 * 4
    assert engine.output("a") == engine.output("b")


def test_output_is_part_of_the_prefix_of_the_next_turn():
    engine = Harness(block_size=4)
    run_one(engine, "a", list(range(6)), max_tokens=7)
    run_one(engine, "b", [*range(6), *engine.output("a"), 500])
    # The last output token was never fed back, so its block is full but for it.
    assert cached_tokens(engine, "b") == 12


def test_tenants_do_not_share_and_one_tenant_does():
    engine = Harness(block_size=4)
    prompt = list(range(12))
    run_one(engine, "a", prompt, terms=Terms(cache_group="x"))
    run_one(engine, "b", prompt, terms=Terms(cache_group="y"))
    run_one(engine, "c", prompt, terms=Terms(cache_group="x"))
    assert [cached_tokens(engine, id) for id in "abc"] == [0, 0, 8]


def test_nothing_is_reused_when_prefix_caching_is_off():
    engine = Harness(block_size=4, enable_prefix_caching=False)
    run_one(engine, "a", list(range(12)))
    run_one(engine, "b", list(range(12)))
    assert cached_tokens(engine, "b") == 0
    assert engine.scheduler.kv.pool.num_cached == 0


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    engine = Harness(num_blocks=4, block_size=4)
    run_one(engine, "a", list(range(12)), max_tokens=2)
    run_one(engine, "b", own_tokens("b", 8), max_tokens=1)
    # b needed two blocks: the empty one, and the last of the three of a.
    engine.add("c", [*range(12), 1, 2], max_tokens=1)
    engine.step()
    assert cached_tokens(engine, "c") == 8


def test_matched_blocks_are_not_evicted_for_their_own_request():
    engine = Harness(num_blocks=4, block_size=4)
    run_one(engine, "a", list(range(8)), max_tokens=1)
    run_one(engine, "b", [*range(8), *range(50, 58)], max_tokens=1)
    assert engine.output("b") == expected_output([*range(8), *range(50, 58)], 1)
    assert cached_tokens(engine, "b") == 8


def test_a_matched_block_without_an_owner_counts_against_the_free_ones():
    engine = Harness(num_blocks=4, block_size=4)
    run_one(engine, "a", list(range(8)), max_tokens=1)
    engine.add("holder", 8, max_tokens=8)
    engine.step()
    assert engine.num_free == 2
    engine.add("b", [*range(8), 9], max_tokens=1)
    engine.step()
    assert "b" in engine.waiting, "two cached blocks and a fresh one are three, not one"


# ------------------------------------------------------------------------ forking


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("caching", [True, False])
def test_forked_samples_are_right_at_every_prompt_length(length: int, caching: bool):
    engine = Harness(block_size=4, enable_prefix_caching=caching)
    prompt = list(range(length))
    run_one(engine, "p", prompt, n=3, max_tokens=11)
    for index, sample in enumerate(("p", "p#1", "p#2")):
        assert engine.output(sample) == expected_output(prompt, 11, index=index)
    assert [event.request_id for event in engine.seen(Forked)] == ["p#1", "p#2"]


@pytest.mark.parametrize("length", range(1, 10))
def test_a_fork_shares_full_blocks_and_copies_the_block_it_will_write(length: int):
    engine = Harness(block_size=4)
    engine.add("p", list(range(length)), n=2)
    engine.step()
    parent, child = (engine.scheduler.kv.tables[id].block_ids for id in ("p", "p#1"))
    num_shared, num_copied = divmod(length - 1, 4)
    assert child[:num_shared] == parent[:num_shared]
    assert not set(child[num_shared:]) & set(parent)
    plan = engine.begin()
    assert plan is not None
    expected = [(parent[num_shared], child[num_shared])] if num_copied else []
    assert [(copy.source, copy.target) for copy in plan.copies] == expected


def test_the_copy_is_right_if_the_parent_was_aborted_before():
    engine = Harness(num_blocks=6, block_size=4)
    engine.add("p", list(range(6)), n=2, max_tokens=5)
    engine.step()
    engine.abort("p")
    engine.add("thief", 8, max_tokens=1)
    engine.run()
    assert engine.output("p#1") == expected_output(list(range(6)), 5, index=1)


def test_the_copy_is_right_if_the_parent_ends_with_its_first_token():
    engine = Harness(block_size=4)
    run_one(engine, "p", list(range(6)), n=3, max_tokens=1)
    for index, sample in enumerate(("p", "p#1", "p#2")):
        assert engine.output(sample) == expected_output(list(range(6)), 1, index=index)


def test_a_copy_for_an_aborted_sample_changes_no_other_request():
    engine = Harness(num_blocks=4, block_size=4)
    engine.add("p", list(range(6)), n=2, max_tokens=5)
    engine.step()
    engine.abort("p#1")
    engine.add("heir", 4, max_tokens=1)
    engine.run()
    assert engine.output("heir") == expected_output(own_tokens("heir", 4), 1)
    assert engine.output("p") == expected_output(list(range(6)), 5)


@pytest.mark.parametrize("caching", [True, False])
def test_a_sample_without_a_block_waits_and_has_the_right_output(caching: bool):
    engine = Harness(num_blocks=3, block_size=4, enable_prefix_caching=caching)
    engine.add("p", list(range(6)), n=3, max_tokens=6)
    engine.step()
    assert (engine.running, engine.waiting) == (["p", "p#1"], {"p#2"})
    assert engine.scheduler.requests["p#2"].state is RequestState.WAITING
    engine.run()
    for index, sample in enumerate(("p", "p#1", "p#2")):
        assert engine.output(sample) == expected_output(list(range(6)), 6, index=index)


def test_a_waiting_sample_has_the_arrival_order_of_its_parent():
    engine = Harness(num_blocks=3, block_size=4, max_num_batched_tokens=8, max_wait_s=0.0)
    engine.add("p", list(range(8)), n=3, max_tokens=1)
    engine.add("later", 4, max_tokens=1)
    engine.step()
    assert "p#2" in engine.waiting
    assert list(engine.step()) == ["p#1", "p#2"]
    assert list(engine.step()) == ["later"]


def test_samples_count_as_sequences_before_the_fork():
    engine = Harness(max_num_seqs=3, max_num_batched_tokens=4)
    engine.add("p", 8, n=2)
    engine.add("a", 1)
    engine.add("b", 1)
    engine.steps(3)
    assert engine.running == ["p", "p#1", "a"]
    assert engine.waiting == {"b"}


# ----------------------------------------------------------------- sharing and loss


def test_shared_blocks_are_freed_by_the_last_sample():
    engine = Harness(num_blocks=16, block_size=4)
    engine.add("p", 9, n=3, max_tokens=30)
    engine.step()
    used = 16 - engine.num_free
    assert used == 3 + 2
    engine.abort("p")
    assert 16 - engine.num_free == 4
    engine.abort("p#1")
    engine.abort("p#2")
    assert engine.num_free == 16


def test_a_resumed_request_reuses_its_blocks():
    engine = Harness(num_blocks=6, block_size=4)
    engine.add("a", 8, max_tokens=12)
    engine.add("b", 8, max_tokens=8)
    engine.run()
    assert engine.seen(Preempted)
    resumed = [event for event in engine.seen(Admitted) if event.is_resumed]
    assert resumed[-1].num_cached_tokens > 0
    assert engine.output("b") == expected_output(own_tokens("b", 8), 8)
