"""Why a request waits: one cause at any time, and causes that add up."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.causes import WaitCause
from headway.core.events import Admitted, Finished, Preempted
from headway.core.terms import Targets, Terms
from headway.core.waiting.fair import URGENT_LEAD
from tests.support.harness import Harness


def cause(engine: Harness, request_id: str) -> WaitCause:
    request = engine.scheduler.requests[request_id]
    return engine.scheduler.waiting.cause_of(request)


def tick(engine: Harness, count: int = 1) -> None:
    """Steps of one second each."""
    for _ in range(count):
        engine.step()
        engine.advance(1.0)


def causes_of(event: Admitted | Finished) -> dict[WaitCause, Any]:
    return {one.cause: pytest.approx(one.seconds) for one in event.causes}


def admitted(engine: Harness, request_id: str) -> Admitted:
    """The last admission of a request that waits, once it has come."""
    while request_id in engine.waiting:
        tick(engine)
    return engine.seen(Admitted, request_id)[-1]


def test_one_that_is_admitted_at_once_waited_for_nothing():
    engine = Harness()
    engine.add("a")
    engine.step()
    assert engine.seen(Admitted, "a")[0].causes == ()


def test_one_that_comes_while_a_step_runs_waits_for_the_executor():
    engine = Harness()
    engine.add("a", 4, max_tokens=9)
    engine.begin()
    engine.add("b")
    assert cause(engine, "b") is WaitCause.EXECUTOR_BUSY
    engine.advance(0.5)
    engine.end()
    assert causes_of(admitted(engine, "b")) == {WaitCause.EXECUTOR_BUSY: 0.5}


def test_a_full_batch_and_who_holds_it():
    engine = Harness(max_num_seqs=2)
    for request_id in ("a", "b"):
        engine.add(request_id, 4, max_tokens=4, terms=Terms("hog"))
    engine.step()
    engine.advance(0.25)
    engine.add("c", terms=Terms("quiet"))
    engine.advance(0.5)
    engine.step()
    assert cause(engine, "c") is WaitCause.RUNNING_LIMIT
    engine.advance(1.0)
    event = admitted(engine, "c")
    busy, limit = WaitCause.EXECUTOR_BUSY, WaitCause.RUNNING_LIMIT
    assert causes_of(event) == {busy: 0.5, limit: event.waited_s - 0.5}
    assert event.held_by == "hog"


def test_blocks_and_who_holds_them():
    engine = Harness(num_blocks=8, block_size=4)
    engine.add("small", 4, max_tokens=9, terms=Terms("small"))
    engine.add("big", 20, max_tokens=5, terms=Terms("hog"))
    tick(engine)
    engine.add("c", 16, terms=Terms("quiet"))
    engine.step()
    assert cause(engine, "c") is WaitCause.KV_BLOCKS
    engine.advance(1.0)
    event = admitted(engine, "c")
    assert causes_of(event) == {WaitCause.KV_BLOCKS: event.waited_s}
    assert event.held_by == "hog"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_num_batched_tokens": 8}, WaitCause.TOKEN_BUDGET),
        ({"max_num_batched_tokens": 32, "prefill_cap": 8}, WaitCause.PREFILL_CAP),
    ],
)
def test_tokens(settings: dict[str, Any], expected: WaitCause):
    engine = Harness(**settings)
    engine.add("decoding", 2, max_tokens=40)
    engine.step()
    engine.add("long", 40, max_tokens=1)
    engine.add("next", 4, max_tokens=1)
    engine.step()
    assert cause(engine, "next") is expected
    engine.advance(1.0)
    event = admitted(engine, "next")
    assert causes_of(event) == {expected: event.waited_s}
    assert event.held_by == ""


def test_behind_a_smaller_rank_it_is_tier_order():
    engine = Harness(max_num_seqs=1, scheduling_policy="priority")
    engine.add("a", 4, max_tokens=4)
    engine.step()
    engine.add("weak", 4, max_tokens=1, priority=2)
    engine.add("strong", 4, max_tokens=3, priority=1)
    engine.step()
    assert cause(engine, "strong") is WaitCause.RUNNING_LIMIT
    assert cause(engine, "weak") is WaitCause.TIER_ORDER
    engine.advance(1.0)
    event = admitted(engine, "weak")
    causes = causes_of(event)
    assert set(causes) == {WaitCause.TIER_ORDER, WaitCause.RUNNING_LIMIT}
    assert causes[WaitCause.TIER_ORDER] == pytest.approx(engine.seen(Admitted, "strong")[0].at)


def test_spot_waits_by_tier_order_and_a_tenant_by_its_share():
    engine = Harness(max_num_seqs=1)
    engine.add("first", 4, max_tokens=20, terms=Terms("a"))
    engine.step()
    engine.add("spot", terms=Terms("s", is_spot=True))
    engine.add("more", terms=Terms("a"))
    engine.add("other", terms=Terms("b"))
    engine.steps(2)
    assert cause(engine, "other") is WaitCause.RUNNING_LIMIT
    assert cause(engine, "more") is WaitCause.TENANT_SHARE
    assert cause(engine, "spot") is WaitCause.TIER_ORDER


def test_behind_a_more_urgent_one_of_the_same_tenant_it_is_tier_order():
    engine = Harness(max_num_seqs=1)
    engine.add("first", 4, max_tokens=20, priority=-1)
    engine.step()
    engine.add("late", priority=1)
    engine.add("soon", priority=0)
    engine.step()
    assert cause(engine, "soon") is WaitCause.RUNNING_LIMIT
    assert cause(engine, "late") is WaitCause.TIER_ORDER


def test_under_fcfs_everybody_waits_for_what_the_head_waits_for_also_when_it_is_old():
    engine = Harness(max_num_seqs=1, scheduling_policy="fcfs", max_wait_s=3.0)
    for request_id in "abcd":
        engine.add(request_id, 4, max_tokens=3)
    tick(engine, 2)
    assert {cause(engine, it) for it in engine.waiting} == {WaitCause.RUNNING_LIMIT}
    engine.add("e")
    tick(engine, 2)
    assert engine.scheduler.requests["d"].is_aged
    assert not engine.scheduler.requests["e"].is_aged
    assert {cause(engine, it) for it in engine.waiting} == {WaitCause.RUNNING_LIMIT}
    event = admitted(engine, "e")
    assert causes_of(event) == {WaitCause.RUNNING_LIMIT: event.waited_s}


def test_one_that_is_tried_and_does_not_fit_has_its_own_cause():
    engine = Harness(num_blocks=16, block_size=4, max_num_seqs=3)
    engine.add("holder", 40, max_tokens=20)
    engine.step()
    engine.add("big", 40, max_tokens=1)
    engine.add("small", 4, max_tokens=9)
    engine.add("small2", 4, max_tokens=9)
    engine.add("last", 4, max_tokens=9)
    engine.step()
    assert cause(engine, "big") is WaitCause.KV_BLOCKS
    assert cause(engine, "last") is WaitCause.KV_BLOCKS, "it is behind one that waits for blocks"


def test_a_preempted_request_waits_anew_with_an_account_of_its_own():
    engine = Harness(num_blocks=12, block_size=4, max_num_batched_tokens=64)
    for request_id in "abc":
        engine.add(request_id, 16, max_tokens=8)
    tick(engine, 2)
    (preempted,) = engine.seen(Preempted)
    assert preempted.cause is WaitCause.KV_BLOCKS
    event = admitted(engine, "c")
    assert event.waited_s == event.at - preempted.at
    assert causes_of(event) == {WaitCause.KV_BLOCKS: event.waited_s}
    assert engine.seen(Admitted, "c")[0].causes == ()


def test_one_that_leaves_from_the_line_says_what_it_waited_for():
    engine = Harness(max_num_seqs=1)
    engine.add("a", max_tokens=20)
    engine.add("b")
    tick(engine, 2)
    engine.advance(0.5)
    engine.abort("b")
    assert causes_of(engine.finish("b")) == {WaitCause.RUNNING_LIMIT: 2.5}
    engine.abort("a")
    assert engine.finish("a").causes == ()


def test_the_clocks_of_those_who_left_are_gone():
    engine = Harness(max_num_seqs=1)
    for at in range(50):
        engine.add(f"r{at}", 4, max_tokens=1, priority=at, terms=Terms(f"t{at}"))
    engine.run()
    engine.step()
    assert not engine.scheduler.waiting._attribution._root.children
    assert not engine.scheduler.waiting._attribution._waits


SOON = Targets(ttft_s=60.0)


@pytest.mark.parametrize("policy", ["deadline", "fair"])
def test_behind_one_that_was_promised_an_early_start_it_is_deadline_order(policy: str):
    engine = Harness(max_num_seqs=1, scheduling_policy=policy)
    engine.add("running", 4, max_tokens=4)
    engine.step()
    engine.add("whenever", 4, max_tokens=1)
    engine.add("soon", 4, max_tokens=3, terms=Terms(targets=SOON))
    engine.step()
    assert cause(engine, "soon") is WaitCause.RUNNING_LIMIT
    assert cause(engine, "whenever") is WaitCause.DEADLINE_ORDER
    tick(engine)
    event = admitted(engine, "whenever")
    causes = causes_of(event)
    assert set(causes) == {WaitCause.DEADLINE_ORDER, WaitCause.RUNNING_LIMIT}
    assert sum(one.seconds for one in event.causes) == pytest.approx(event.waited_s)
    assert causes[WaitCause.DEADLINE_ORDER] == engine.seen(Admitted, "soon")[0].at


@pytest.mark.parametrize("lead", [URGENT_LEAD - 100, URGENT_LEAD + 100])
def test_behind_a_tenant_that_is_first_for_a_promise_only_it_is_deadline_order(lead: float):
    engine = Harness(max_num_seqs=1)
    engine.add("running", 4, max_tokens=9, terms=Terms("busy"))
    engine.step()
    engine.add("quiet", 4, max_tokens=3, terms=Terms("quiet"))
    account, other = (engine.scheduler.accounts.get(name) for name in ("busy", "quiet"))
    assert account is not None
    assert other is not None
    account.charge(other.counter + lead - account.counter)
    engine.add("soon", 4, max_tokens=3, terms=Terms("busy", targets=SOON))
    engine.step()
    is_early = lead < URGENT_LEAD
    behind = WaitCause.DEADLINE_ORDER if is_early else WaitCause.TENANT_SHARE
    first, last = ("soon", "quiet") if is_early else ("quiet", "soon")
    assert cause(engine, first) is WaitCause.RUNNING_LIMIT
    assert cause(engine, last) is behind
    tick(engine)
    event = admitted(engine, last)
    assert set(causes_of(event)) == {behind, WaitCause.RUNNING_LIMIT}
    assert sum(one.seconds for one in event.causes) == pytest.approx(event.waited_s)
    engine.run()
