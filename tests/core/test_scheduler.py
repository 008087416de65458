"""The step: plans, updates, aborts in every state, and how requests end."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core import invariants
from headway.core.events import Admitted, Arrived, Finished, Forked, Preempted, TokensEmitted
from headway.core.executor import Ticket
from headway.core.plan import Failure, Sample, StepPlan, StepResult, TokenLogprobs
from headway.core.request import FailureCause, FinishReason, RequestState
from headway.core.terms import Terms
from headway.executors.fake import FakeExecutor
from tests.support.harness import Harness, expected_output, own_tokens

# ----------------------------------------------------------------------------- plans


def test_a_request_is_sent_whole_once_and_then_only_what_is_new():
    engine = Harness(block_size=4)
    engine.add("a", 4, max_tokens=6, terms=Terms(tenant="t"))
    items = [engine.step()["a"] for _ in range(6)]
    assert [item.new is not None for item in items] == [True] + [False] * 5
    new = items[0].new
    assert new is not None
    assert (new.token_ids, new.num_prompt_tokens, new.seed) == (tuple(own_tokens("a", 4)), 4, 7)
    assert [len(item.block_ids) for item in items] == [1, 1, 0, 0, 0, 1]


def test_a_resumed_request_is_sent_as_new_with_its_output_so_far():
    settings = {"enable_prefix_caching": False, "preemption_method": "recompute"}
    engine = Harness(num_blocks=6, block_size=4, **settings)
    engine.add("a", 8, max_tokens=12)
    engine.add("b", 8, max_tokens=8)
    engine.until(lambda: bool(engine.seen(Preempted, "b")))
    so_far = engine.output("b")
    sent = None
    while sent is None:
        sent = engine.step().get("b")
    assert sent.new is not None
    assert sent.new.token_ids == (*own_tokens("b", 8), *so_far)
    assert (sent.start, sent.new.num_prompt_tokens) == (0, 8)


def test_ids_are_released_once_when_a_request_finishes_and_when_it_is_preempted():
    engine = Harness(num_blocks=6, block_size=4)
    engine.add("a", 8, max_tokens=12)
    engine.add("b", 8, max_tokens=8)
    released: list[str] = []
    while engine.core.has_work:
        plan = engine.begin()
        assert plan is not None
        released.extend(plan.released_ids)
        engine.end()
    engine.add("last", 1, max_tokens=1)
    plan = engine.begin()
    assert plan is not None
    released.extend(plan.released_ids)
    num_left = len(engine.seen(Preempted)) + len(engine.seen(Finished))
    assert len(released) == num_left
    assert set(released) == {"a", "b"}


def test_an_id_may_be_used_again_in_the_plan_that_releases_it():
    engine = Harness()
    engine.add("a", list(range(6)), max_tokens=20)
    engine.step()
    engine.abort("a")
    engine.add("a", list(range(50, 60)), max_tokens=3)
    plan = engine.begin()
    assert plan is not None
    assert plan.released_ids == ("a",)
    engine.end()
    engine.run()
    assert engine.output("a")[1:] == expected_output(list(range(50, 60)), 3)


def test_step_ids_only_grow():
    engine = Harness()
    engine.add("a", 4)
    first = engine.begin()
    engine.end()
    second = engine.begin()
    assert first is not None
    assert second is not None
    assert first.step_id < second.step_id


def test_under_the_budget_the_strongest_decodes_go_on():
    engine = Harness(max_num_batched_tokens=3, max_num_seqs=8)
    for request_id in "abcde":
        engine.add(request_id, 1, max_tokens=4)
    engine.run()
    ended = [event.request_id for event in engine.seen(Finished)]
    assert ended == sorted(ended)


# ------------------------------------------------------------------------------ ids


def test_a_live_id_cannot_be_used_twice():
    engine = Harness()
    engine.add("a")
    with pytest.raises(ValueError, match="in use"):
        engine.add("a")
    assert len(engine.seen(Arrived)) == 1


def test_an_id_whose_samples_would_collide_with_live_ones_cannot_be_used():
    engine = Harness()
    engine.add("a", n=2, max_tokens=20)
    engine.step()
    engine.abort("a")
    with pytest.raises(ValueError, match="in use"):
        engine.add("a", n=2)
    engine.add("a", n=1)
    engine.run()


# -------------------------------------------------------------------------- endings


def test_length_ends_with_exactly_max_tokens():
    engine = Harness()
    engine.add("a", 5, max_tokens=7)
    engine.run()
    assert engine.output("a") == expected_output(own_tokens("a", 5), 7)
    finish = engine.finish("a")
    assert (finish.reason, finish.num_output_tokens) == (FinishReason.LENGTH, 7)


def test_a_stop_token_ends_and_is_the_last_token():
    oracle = expected_output(own_tokens("a", 5), 9)
    engine = Harness()
    engine.add("a", 5, max_tokens=9, stop_token_ids=(oracle[3],))
    engine.run()
    assert engine.output("a") == oracle[:4]
    assert engine.finish("a").reason is FinishReason.STOP


def test_min_tokens_holds_back_an_early_stop():
    oracle = expected_output(own_tokens("a", 5), 9)
    engine = Harness()
    engine.add("a", 5, max_tokens=9, min_tokens=5, stop_token_ids=(oracle[1], oracle[6]))
    engine.run()
    assert engine.output("a") == oracle[:7]


class Scripted(FakeExecutor):
    """Answers some requests with outcomes of its own."""

    def __init__(self, engine: Harness) -> None:
        super().__init__(engine.capacity)
        self.script: dict[str, Sample | Failure] = {}
        self._plans: dict[int, StepPlan] = {}

    def submit(self, plan: StepPlan) -> Ticket:
        self._plans[plan.step_id] = plan
        return super().submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        result = super().collect(ticket)
        ids = [item.request_id for item in self._plans.pop(ticket.step_id).scheduled]
        pairs = zip(ids, result.outcomes, strict=True)
        outcomes = tuple(self.script.pop(id, outcome) for id, outcome in pairs)
        return StepResult(result.step_id, outcomes, result.elapsed_s)


def scripted() -> tuple[Harness, Scripted]:
    executor = Scripted(Harness())
    return Harness(executor=executor), executor


def test_a_failure_ends_only_its_own_request_and_says_why():
    engine, executor = scripted()
    engine.add("bad", 5, max_tokens=6)
    engine.add("good", 5, max_tokens=6)
    engine.steps(2)
    executor.script["bad"] = Failure("out of luck", FailureCause.GRAMMAR)
    engine.run()
    finish = engine.finish("bad")
    assert (finish.reason, finish.message) == (FinishReason.ERROR, "out of luck")
    assert finish.failure_cause is FailureCause.GRAMMAR
    assert engine.finish("good").failure_cause is None
    assert finish.num_output_tokens == 2
    assert engine.output("good") == expected_output(own_tokens("good", 5), 6)


def test_a_failure_in_prefill_ends_a_prompt_with_all_its_samples():
    engine, executor = scripted()
    engine.add("p", 5, n=3)
    executor.script["p"] = Failure("no")
    engine.run()
    assert [event.request_id for event in engine.seen(Finished)] == ["p"]
    assert not engine.seen(Forked)


def test_the_blocks_of_a_failed_chunk_are_not_published():
    engine, executor = scripted()
    engine.add("a", list(range(12)))
    executor.script["a"] = Failure("garbage in the blocks")
    engine.step()
    engine.add("b", list(range(12)), max_tokens=1)
    engine.step()
    assert engine.seen(Admitted, "b")[0].num_cached_tokens == 0


def test_of_several_sampled_tokens_those_after_the_end_are_dropped():
    engine, executor = scripted()
    engine.add("a", 4, max_tokens=9, stop_token_ids=(5,))
    executor.script["a"] = Sample((1, 5, 7), tuple(TokenLogprobs(-1.0, at) for at in range(3)))
    engine.run()
    (event,) = engine.seen(TokensEmitted)
    assert event.token_ids == (1, 5)
    assert event.logprobs is not None
    assert len(event.logprobs) == 2
    assert engine.finish("a").num_output_tokens == 2


# --------------------------------------------------------------------------- aborts


def check_aborted(engine: Harness, request_id: str) -> None:
    assert engine.finish(request_id).reason is FinishReason.ABORT
    assert not engine.abort(request_id), "it is gone"
    engine.run()
    assert len(engine.seen(Finished, request_id)) == 1


def test_abort_of_a_waiting_request():
    engine = Harness(max_num_seqs=1)
    engine.add("a", max_tokens=2)
    engine.add("b")
    engine.step()
    assert engine.abort("b")
    check_aborted(engine, "b")


def test_abort_of_a_running_request_frees_its_blocks_at_once():
    engine = Harness(num_blocks=8)
    engine.add("a", 16)
    engine.step()
    assert engine.num_free == 4
    assert engine.abort("a")
    assert engine.num_free == 8
    check_aborted(engine, "a")


def test_abort_in_the_middle_of_prefill():
    engine = Harness(max_num_batched_tokens=5)
    engine.add("a", 16)
    engine.step()
    assert engine.abort("a")
    check_aborted(engine, "a")


def test_abort_of_a_preempted_request():
    engine = Harness(num_blocks=6, block_size=4)
    engine.add("a", 8, max_tokens=12)
    engine.add("b", 8, max_tokens=8)
    engine.until(lambda: bool(engine.seen(Preempted, "b")))
    assert engine.scheduler.requests["b"].state is RequestState.PREEMPTED
    assert engine.abort("b")
    check_aborted(engine, "b")
    assert engine.output("a") == expected_output(own_tokens("a", 8), 12)


def test_abort_of_a_request_in_flight_drops_its_result():
    engine = Harness()
    engine.add("a", 4)
    engine.add("b", 4, max_tokens=3)
    engine.begin()
    assert engine.abort("a")
    engine.end()
    assert engine.output("a") == []
    check_aborted(engine, "a")
    assert engine.output("b") == expected_output(own_tokens("b", 4), 3)


def test_an_id_aborted_and_used_again_in_flight_gets_none_of_the_old_result():
    engine = Harness()
    engine.add("a", list(range(4)))
    engine.begin()
    engine.abort("a")
    engine.add("a", list(range(70, 75)), max_tokens=2)
    engine.end()
    assert engine.output("a") == []
    engine.run()
    assert engine.output("a") == expected_output(list(range(70, 75)), 2)


def test_abort_of_a_parent_before_it_forks_ends_all_its_samples():
    engine = Harness(max_num_batched_tokens=4)
    engine.add("p", 8, n=3)
    engine.step()
    assert engine.abort("p")
    check_aborted(engine, "p")
    assert not engine.seen(Forked)
    assert not engine.abort("p#1")


@pytest.mark.parametrize("gone", ["p", "p#1", "p#2"])
def test_abort_of_one_sample_leaves_the_others_alone(gone: str):
    engine = Harness(block_size=4)
    prompt = list(range(6))
    engine.add("p", prompt, n=3, max_tokens=5)
    engine.steps(2)
    assert engine.abort(gone)
    check_aborted(engine, gone)
    for index, sample in enumerate(("p", "p#1", "p#2")):
        if sample != gone:
            assert engine.output(sample) == expected_output(prompt, 5, index=index)


def test_abort_of_a_child_that_waits_for_a_block():
    engine = Harness(num_blocks=3, block_size=4)
    engine.add("p", 6, n=3, max_tokens=6)
    engine.step()
    assert "p#2" in engine.waiting
    assert engine.abort("p#2")
    check_aborted(engine, "p#2")


def test_abort_of_a_child_the_executor_has_never_seen():
    engine = Harness()
    engine.add("p", 6, n=2, max_tokens=3)
    engine.step()
    assert engine.abort("p#1")
    check_aborted(engine, "p#1")


def test_abort_of_an_unknown_id_is_no_matter():
    engine = Harness()
    assert not engine.abort("ghost")
    assert engine.events == []


# --------------------------------------------------------------------------- events


def test_a_life_in_events_each_exactly_once():
    engine = Harness()
    engine.add("a", 4, max_tokens=3)
    engine.run()
    kinds = [type(event).__name__ for event in engine.events]
    assert kinds == [
        "Arrived",
        *("Admitted", "TokensEmitted", "Stepped"),
        *("TokensEmitted", "Stepped"),
        *("TokensEmitted", "Finished", "Stepped"),
    ]


def test_every_sample_has_its_own_end():
    engine = Harness()
    engine.add("p", 4, n=3, max_tokens=3)
    engine.run()
    assert sorted(event.request_id for event in engine.seen(Finished)) == ["p", "p#1", "p#2"]
    assert len(engine.seen(Arrived)) + len(engine.seen(Forked)) == len(engine.seen(Finished))


def test_two_runs_of_the_same_requests_are_the_same_to_the_last_event():
    def run() -> list[object]:
        engine = Harness(num_blocks=10, max_num_batched_tokens=12, scheduling_policy="priority")
        for at in range(12):
            engine.add(f"r{at}", 5 + at % 4, n=1 + at % 2, priority=at % 3, max_tokens=6)
            engine.step()
        engine.run()
        return list(engine.events)

    assert run() == run()


def test_the_tokens_do_not_depend_on_the_schedule():
    def outputs(**settings: Any) -> dict[str, list[int]]:
        engine = Harness(**settings)
        for at in range(6):
            engine.add(f"r{at}", 5 + at, max_tokens=9)
        engine.run()
        return {f"r{at}": engine.output(f"r{at}") for at in range(6)}

    roomy = outputs()
    assert outputs(num_blocks=5) == roomy
    assert outputs(max_num_batched_tokens=2) == roomy
    assert outputs(max_num_seqs=1, block_size=3) == roomy


def test_the_checker_sees_a_lost_request_and_a_lost_block():
    engine = Harness()
    engine.add("a", 4)
    engine.step()
    request = engine.scheduler.running.pop()
    with pytest.raises(AssertionError, match="differ from"):
        engine.check()
    engine.scheduler.running.append(request)
    engine.scheduler.kv.pool.allocate(1)
    with pytest.raises(AssertionError, match="1 references, 0 owners"):
        invariants.check(engine.scheduler)
