"""The token budget: decodes first, a floor and a cap for prefill."""

from __future__ import annotations

import pytest

from headway.core.budget import TokenBudget
from headway.core.plan import ScheduledRequest
from headway.core.terms import Targets, Terms
from tests.support.harness import Harness

BUDGET = TokenBudget(max_num_batched_tokens=32, prefill_floor=8, prefill_cap=12)


def prefill_tokens(step: dict[str, ScheduledRequest], *ids: str) -> int:
    return sum(len(step[request_id].token_ids) for request_id in ids if request_id in step)


def test_decodes_have_the_whole_budget_unless_prefill_is_present():
    assert BUDGET.for_decode(has_prefill=False) == 32
    assert BUDGET.for_decode(has_prefill=True) == 24


def test_prefill_has_what_decodes_leave_up_to_the_cap():
    assert BUDGET.for_prefill(0) == 32
    assert BUDGET.for_prefill(1) == 12
    assert BUDGET.for_prefill(24) == 8


def test_a_long_prompt_is_computed_in_chunks_within_the_budget():
    engine = Harness(max_num_batched_tokens=10)
    engine.add("a", 25, max_tokens=2)
    chunks = [engine.step()["a"] for _ in range(3)]
    assert [(item.start, len(item.token_ids)) for item in chunks] == [(0, 10), (10, 10), (20, 5)]
    assert [item.has_sample for item in chunks] == [False, False, True]


def test_two_prompts_share_one_budget():
    engine = Harness(max_num_batched_tokens=10)
    engine.add("a", 7)
    engine.add("b", 7)
    assert {id: len(item.token_ids) for id, item in engine.step().items()} == {"a": 7, "b": 3}


def test_decodes_go_first():
    engine = Harness(max_num_batched_tokens=10)
    engine.add("old", 4)
    engine.step()
    engine.add("new", 40)
    step = engine.step()
    assert list(step) == ["old", "new"]
    assert len(step["new"].token_ids) == 9


def test_decodes_go_before_prefill_of_a_higher_priority():
    engine = Harness(max_num_batched_tokens=10, scheduling_policy="priority")
    engine.add("weak", 4, priority=5)
    engine.step()
    engine.add("strong", 40, priority=0)
    assert list(engine.step()) == ["weak", "strong"]


def test_a_full_decode_batch_leaves_the_floor_to_an_arrival():
    engine = Harness(max_num_batched_tokens=8, prefill_floor=3, max_num_seqs=9)
    for at in range(8):
        engine.add(f"d{at}", 1, max_tokens=50)
    while len(engine.step()) < 8:
        pass
    engine.add("new", 20)
    step = engine.step()
    assert len(step) == 6
    assert len(step["new"].token_ids) == 3


def test_the_floor_holds_until_the_prompt_is_computed_and_not_longer():
    engine = Harness(max_num_batched_tokens=8, prefill_floor=3, max_num_seqs=9)
    for at in range(8):
        engine.add(f"d{at}", 1, max_tokens=50)
    while len(engine.step()) < 8:
        pass
    engine.add("new", 6, max_tokens=50)
    assert [prefill_tokens(engine.step(), "new") for _ in range(2)] == [3, 3]
    assert prefill_tokens(engine.step(), "new") == 0, "the weakest of nine decodes in eight tokens"


def test_decodes_leave_no_floor_to_those_who_have_no_seat():
    engine = Harness(max_num_batched_tokens=8, prefill_floor=3, max_num_seqs=8)
    for at in range(8):
        engine.add(f"d{at}", 1, max_tokens=50)
    while len(engine.step()) < 8:
        pass
    engine.add("new", 6)
    assert len(engine.step()) == 8


def test_the_cap_holds_while_anything_decodes():
    engine = Harness(max_num_batched_tokens=32, prefill_cap=5)
    engine.add("old", 4, max_tokens=3)
    engine.step()
    engine.add("long", 60)
    assert [prefill_tokens(engine.step(), "long") for _ in range(2)] == [5, 5]


def test_the_cap_does_not_hold_when_nothing_decodes():
    engine = Harness(max_num_batched_tokens=32, prefill_cap=5)
    engine.add("long", 60)
    assert prefill_tokens(engine.step(), "long") == 32


def test_the_cap_is_shared_by_all_prompts_of_a_step():
    engine = Harness(max_num_batched_tokens=32, prefill_cap=5)
    engine.add("old", 4)
    engine.step()
    engine.add("a", 3)
    engine.add("b", 20)
    step = engine.step()
    assert prefill_tokens(step, "a", "b") == 5


def test_decodes_have_what_prefill_could_not_use():
    engine = Harness(32, max_num_batched_tokens=8, prefill_floor=4)
    for number in range(6):
        engine.add(f"r{number}", 4, max_tokens=20)
    engine.steps(6)
    engine.add("large", 100, max_tokens=2)  # it has a seat to take, and no blocks
    for _ in range(3):
        assert len(engine.step()) == 6
    engine.run()


@pytest.mark.parametrize("is_spot", [False, True])
def test_decodes_beyond_the_budget_take_turns_within_their_rank(is_spot: bool):
    engine = Harness(
        400,
        max_num_batched_tokens=8,
        prefill_floor=3,
        max_num_seqs=9,
        scheduling_policy="fair",
        max_wait_s=1e9,
    )
    urgent = Terms(tenant="a", targets=Targets(deadline_s=36_000.0))
    for at in range(6):
        engine.add(f"a{at}", 1, max_tokens=500, terms=urgent)
    for at in range(2):
        engine.add(f"b{at}", 1, max_tokens=500, terms=Terms(tenant="b", is_spot=is_spot))
    engine.until(lambda: len(engine.scheduler.running) >= (6 if is_spot else 8))
    engine.add("long", 1000, max_tokens=2)  # leaves 5 of 8 decodes in each step
    num_before = {name: len(engine.output(name)) for name in ("a0", "a5", "b0", "b1")}
    engine.steps(48)
    gained = {name: len(engine.output(name)) - num_before[name] for name in num_before}
    if is_spot:
        assert gained == {"a0": 40, "a5": 40, "b0": 0, "b1": 0}
    else:
        assert gained == {"a0": 30, "a5": 30, "b0": 30, "b1": 30}
