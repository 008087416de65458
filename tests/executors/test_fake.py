"""FakeExecutor: what is wrong with a block shows in a token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headway.core.executor import Capacity
from headway.core.params import SamplingParams
from headway.core.plan import (
    BlockCopy,
    BlockLoad,
    BlockSave,
    NewRequest,
    Sample,
    ScheduledRequest,
    StepPlan,
)
from headway.executors.fake import VOCAB_SIZE, FakeExecutor, next_token

TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12)


def executor() -> FakeExecutor:
    return FakeExecutor(Capacity(8, 4, 32, num_slots=2), step_s=0.5)


def new(*token_ids: int, seed: int = 7, index: int = 0) -> NewRequest:
    return NewRequest(SamplingParams(), seed, index, token_ids, len(token_ids))


def run(target: FakeExecutor, plan: StepPlan) -> list[int | None]:
    outcomes = target.collect(target.submit(plan)).outcomes
    return [outcome.token_ids[0] if isinstance(outcome, Sample) else None for outcome in outcomes]


def first(token_ids: tuple[int, ...], *block_ids: int, id: str = "a") -> ScheduledRequest:
    return ScheduledRequest(id, 0, token_ids, block_ids, True, new(*token_ids))


@given(TOKENS, st.integers(0, 11), st.integers(0, 5), st.integers(0, 3))
def test_any_change_of_context_seed_or_index_is_likely_to_change_the_token(
    token_ids: list[int], at: int, seed: int, index: int
):
    changed = list(token_ids)
    changed[at % len(changed)] += 1
    cases = [
        (token_ids, seed, index),
        (changed, seed, index),
        (token_ids, seed + 1, index),
        (token_ids, seed, index + 1),
    ]
    tokens = [next_token(*case) for case in cases]
    assert all(0 <= token < VOCAB_SIZE for token in tokens)
    assert len(set(tokens)) > 1
    assert [next_token(*case) for case in cases] == tokens


def test_a_token_follows_from_the_whole_context():
    assert run(executor(), StepPlan(1, (first((1, 2, 3, 4, 5), 3, 6),))) == [
        next_token((1, 2, 3, 4, 5), 7, 0)
    ]


def test_a_prompt_in_chunks_gives_the_token_of_the_whole():
    target = executor()
    chunk = ScheduledRequest("a", 0, (1, 2, 3), (5, 2), False, new(1, 2, 3, 4, 5))
    assert run(target, StepPlan(1, (chunk,))) == [None]
    rest = ScheduledRequest("a", 3, (4, 5), (), True)
    assert run(target, StepPlan(2, (rest,))) == [next_token((1, 2, 3, 4, 5), 7, 0)]


def test_a_block_overwritten_by_another_request_changes_the_output():
    target = executor()
    run(target, StepPlan(1, (first((1, 2, 3), 0),)))
    run(target, StepPlan(2, (first((9, 9, 9), 0, id="thief"),)))
    after = run(target, StepPlan(3, (ScheduledRequest("a", 3, (4,), (), True),)))
    assert after != [next_token((1, 2, 3, 4), 7, 0)]


def test_a_matched_prefix_is_read_from_its_blocks():
    target = executor()
    run(target, StepPlan(1, (first((1, 2, 3, 4), 0),)))
    reuse = ScheduledRequest("b", 4, (5,), (0, 1), True, new(1, 2, 3, 4, 5))
    assert run(target, StepPlan(2, (reuse,))) == [next_token((1, 2, 3, 4, 5), 7, 0)]


def test_all_sources_are_read_before_any_target_is_written():
    target = executor()
    run(target, StepPlan(1, (first((1, 2, 3), 0), first((4, 5, 6), 1, id="b"))))
    swap = (BlockCopy(0, 1), BlockCopy(1, 0))
    items = (
        ScheduledRequest("a", 3, (7,), (), True),
        ScheduledRequest("b", 3, (7,), (), True),
    )
    assert run(target, StepPlan(2, items, swap)) == [
        next_token((4, 5, 6, 7), 7, 0),
        next_token((1, 2, 3, 7), 7, 0),
    ]


def test_a_saved_block_comes_back_after_others_wrote_into_it():
    target = executor()
    run(target, StepPlan(1, (first((1, 2, 3), 0),)))
    thief = first((9, 9, 9), 0, id="thief")
    run(target, StepPlan(2, (thief,), released_ids=("a",), saves=(BlockSave(0, 1),)))
    back = ScheduledRequest("a", 3, (4,), (5,), True, new(1, 2, 3, 4))
    right, wrong = (BlockLoad(1, 5),), (BlockLoad(0, 5),)
    assert run(target, StepPlan(3, (back,), loads=right)) == [next_token((1, 2, 3, 4), 7, 0)]
    assert run(target, StepPlan(4, (back,), loads=wrong)) != [next_token((1, 2, 3, 4), 7, 0)]


def test_a_released_id_can_come_back_as_new():
    target = executor()
    run(target, StepPlan(1, (first((1, 2), 0),)))
    assert run(target, StepPlan(2, (first((3, 4), 1),), released_ids=("a", "ghost"))) == [
        next_token((3, 4), 7, 0)
    ]


def test_a_step_is_said_to_take_the_time_it_was_given():
    target = executor()
    result = target.collect(target.submit(StepPlan(4, ())))
    assert (result.step_id, result.elapsed_s, result.outcomes) == (4, 0.5, ())
    target.close()


def test_capacity_is_what_it_was_given():
    assert executor().capacity() == Capacity(8, 4, 32, num_slots=2)
