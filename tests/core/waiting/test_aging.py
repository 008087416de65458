"""Every wait has a bound: from then on nobody goes before one that has waited so long."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.events import Admitted, Preempted
from headway.core.terms import Terms
from headway.core.waiting.aging import MAX_AGED_PER_STEP
from tests.support.harness import Harness, make_request


def endless(engine: Harness, num_steps: int = 1000, **fields: Any) -> float:
    """Keep requests of higher priority waiting until `low` is admitted; return its wait."""
    engine.add("first", 4, max_tokens=6)
    engine.add("second", 4, max_tokens=6)
    engine.step()
    engine.add("low", 4, max_tokens=2, **{"priority": 9, **fields})
    for at in range(num_steps):
        engine.add(f"high{at}", 4, max_tokens=6)
        engine.step()
        engine.advance(0.1)
        admitted = engine.seen(Admitted, "low")
        if admitted:
            assert not engine.seen(Preempted, "low")
            return admitted[0].waited_s
    raise AssertionError(f"it waited for {engine.clock.now()} s")


LONGEST_RUN_S = 0.7
"""Six tokens at a tenth of a second, and the step in which it comes."""


@pytest.mark.parametrize("policy", ["priority", "fair"])
@pytest.mark.parametrize("max_wait_s", [0.0, 2.0, 20.0])
def test_an_endless_stream_of_higher_priority_delays_no_request_past_the_bound(
    policy: str, max_wait_s: float
):
    engine = Harness(max_num_seqs=2, scheduling_policy=policy, max_wait_s=max_wait_s)
    waited_s = endless(engine)
    assert max_wait_s <= waited_s <= max_wait_s + LONGEST_RUN_S


def test_spot_gets_nothing_of_a_full_machine_however_long_it_waits():
    engine = Harness(max_num_seqs=2, max_wait_s=1.0)
    with pytest.raises(AssertionError, match="it waited for"):
        endless(engine, 100, terms=Terms("s", is_spot=True))
    assert engine.scheduler.requests["low"].is_aged


def test_spot_that_has_aged_goes_before_the_other_spot_requests_of_its_tenant():
    engine = Harness(max_num_seqs=1, max_wait_s=1.0)
    engine.add("ordinary", 4, max_tokens=15)
    spot = Terms("s", is_spot=True)
    engine.add("old", 4, priority=9, terms=spot)
    for _ in range(12):
        engine.step()
        engine.advance(0.1)
    engine.add("new", 4, terms=spot)
    engine.until(lambda: bool(engine.seen(Admitted, "new")))
    assert [event.request_id for event in engine.seen(Admitted)] == ["ordinary", "old", "new"]
    engine.run()


def test_spot_that_has_aged_gives_its_place_to_an_ordinary_request():
    engine = Harness(max_num_seqs=1, max_wait_s=0.0)
    engine.add("spot", 4, max_tokens=20, terms=Terms("s", is_spot=True))
    engine.steps(2)
    assert engine.scheduler.requests["spot"].is_aged
    engine.add("ordinary", 4, terms=Terms("a"))
    assert "ordinary" in engine.step()
    assert engine.seen(Preempted, "spot")
    engine.run()


def test_spot_that_has_aged_keeps_no_tenant_from_a_place_of_its_own():
    engine = Harness(num_blocks=16, block_size=4, max_num_seqs=3, max_wait_s=2.0)
    share = Terms("t", max_kv_share=0.5)
    engine.add("low", 20, max_tokens=12, priority=9, terms=share)
    engine.add("other", 36, max_tokens=3, terms=Terms("o"))
    engine.step()
    engine.add("spot", 60, max_tokens=1, terms=Terms("s", is_spot=True))
    engine.advance(3.0)
    engine.step()
    assert engine.scheduler.requests["spot"].is_aged
    engine.add("high", 30, max_tokens=2, terms=share)
    engine.until(lambda: engine.running == ["low"])
    assert not engine.seen(Admitted, "high"), "the blocks of low alone were not enough"
    engine.step()
    assert engine.seen(Preempted, "low")
    assert engine.running == ["high"]
    engine.run()


def test_without_the_bound_it_would_wait_for_ever():
    engine = Harness(max_num_seqs=2, scheduling_policy="priority", max_wait_s=1e9)
    with pytest.raises(AssertionError, match="it waited for"):
        endless(engine, 300)


def test_once_admitted_it_is_not_preempted_by_higher_priorities():
    engine = Harness(max_num_seqs=1, scheduling_policy="priority", max_wait_s=1.0)
    engine.add("high", 4, max_tokens=15)
    engine.add("low", 4, max_tokens=10, priority=9)
    while "low" not in engine.running:
        engine.step()
        engine.advance(0.1)
    engine.add("vip", 4, max_tokens=1, priority=-5)
    engine.step()
    assert engine.running == ["low"]
    engine.run()


def test_a_long_wait_is_no_reason_to_preempt():
    engine = Harness(max_num_seqs=1, scheduling_policy="priority", max_wait_s=1.0)
    engine.add("first", 4, max_tokens=30)
    engine.step()
    engine.add("peer", 4)
    for _ in range(20):
        engine.step()
        engine.advance(0.1)
    assert engine.scheduler.requests["peer"].is_aged
    assert not engine.seen(Preempted)


def test_smaller_ones_do_not_pass_one_that_is_old():
    engine = Harness(num_blocks=16, block_size=4, max_wait_s=1.0)
    engine.add("holder", 40, max_tokens=24)
    engine.step()
    engine.add("big", 40, max_tokens=1)
    engine.add("small", 4, max_tokens=1)
    assert "small" in engine.step()
    engine.advance(1.0)
    engine.add("small2", 4, max_tokens=1)
    assert "small2" not in engine.step()


def test_a_tenants_long_line_is_its_own_affair():
    engine = Harness(max_num_seqs=1, max_wait_s=1.0)
    for at in range(30):
        engine.add(f"f{at}", 4, max_tokens=4, terms=Terms("flood"))
    for _ in range(20):
        engine.step()
        engine.advance(0.1)
    engine.add("quiet", 4, terms=Terms("q"))
    num_before = len(engine.seen(Admitted))
    engine.until(lambda: "quiet" in engine.running)
    # Of two tenants given as much, the earlier request goes first, and then it is its turn.
    assert len(engine.seen(Admitted)) <= num_before + 2


def test_a_crowd_grows_old_a_few_at_a_time_and_in_order():
    engine = Harness(max_num_seqs=1, max_wait_s=1.0)
    for at in range(3 * MAX_AGED_PER_STEP):
        engine.add(f"r{at}", 4, max_tokens=20)
    engine.step()
    engine.advance(1.5)
    engine.step()
    old = [it.arrival_order for it in engine.scheduler.waiting if it.is_aged]
    assert sorted(old) == list(range(2, MAX_AGED_PER_STEP + 2))


def test_one_that_grows_old_while_it_stands_aside_is_the_next_of_its_tenant():
    engine = Harness(num_blocks=16, block_size=4, max_num_seqs=2, max_wait_s=5.0)
    share = Terms("t", max_kv_share=0.5)
    engine.add("holder", 24, max_tokens=8, terms=share)
    engine.step()
    engine.add("low", 24, max_tokens=1, priority=9, terms=share)
    engine.advance(3.0)
    for at in range(3):
        engine.add(f"high{at}", 24, max_tokens=1, terms=share)
    engine.step()
    assert engine.running == ["holder"], "its tenant is at its KV quota"
    engine.add("other", 4, max_tokens=40, n=2, terms=Terms("o"))
    engine.step()
    engine.abort("holder")
    engine.step()
    queue = engine.scheduler.waiting
    head = queue.peek()
    assert len(engine.running) == 2
    assert head is not None
    assert head.id == "high0", "its tenant is below its KV quota, and it waits for a slot"
    engine.advance(3.0)
    engine.step()
    head = queue.peek()
    assert head is not None
    assert head.id == "low"
    engine.run()


@pytest.mark.parametrize("num_steps", [30, 100])
def test_the_time_in_which_it_ran_is_no_wait(num_steps: int):
    engine = Harness(max_num_seqs=1, scheduling_policy="priority", max_wait_s=5.0)
    engine.add("low", 4, max_tokens=200, priority=9)
    for _ in range(num_steps):
        engine.step()
        engine.advance(0.1)
    engine.add("vip", 4, max_tokens=20)
    engine.add("other", 4, max_tokens=20)
    engine.step()
    (preempted,) = engine.seen(Preempted, "low")
    low = engine.scheduler.requests["low"]
    engine.advance(4.9)
    engine.step()
    assert not low.is_aged
    engine.advance(preempted.at + 5.0 - engine.clock.now())
    engine.step()
    assert low.is_aged
    engine.run()


def test_nothing_is_kept_of_tenants_that_are_gone():
    engine = Harness(max_num_seqs=1, max_wait_s=0.5)
    for number in range(5):
        engine.add(f"r{number}", 4, max_tokens=3, terms=Terms(f"t{number}"))
    for _ in range(30):
        engine.step()
        engine.advance(0.5)
    assert not engine.scheduler.waiting._urgent


def test_a_resent_request_has_not_waited_while_it_ran():
    engine = Harness(max_wait_s=10.0, scheduling_policy="fair")
    engine.advance(100.0)
    request = make_request("ran", 4, arrived_at=40.0)
    engine.core.add(request, is_resent=True)
    engine.advance(1.0)
    engine.step()
    assert not request.is_aged
    (event,) = engine.seen(Admitted, "ran")
    assert event.waited_s == pytest.approx(1.0)
    assert sum(one.seconds for one in event.causes) == pytest.approx(1.0)
    engine.run()


@pytest.mark.parametrize(("waited_s", "is_aged"), [(5.0, False), (9.5, True)])
def test_a_resent_request_that_had_waited_waits_on(waited_s: float, is_aged: bool):
    engine = Harness(max_wait_s=10.0, scheduling_policy="fair")
    engine.advance(100.0)
    request = make_request("waited", 4, arrived_at=40.0)
    engine.core.add(request, is_resent=True, waited_s=waited_s)
    engine.advance(1.0)
    engine.step()
    assert request.is_aged == is_aged
    (event,) = engine.seen(Admitted, "waited")
    assert event.waited_s == pytest.approx(waited_s + 1.0)
    assert sum(one.seconds for one in event.causes) == pytest.approx(event.waited_s)
    engine.run()


def test_a_request_that_came_while_there_was_no_engine_has_not_aged():
    engine = Harness(max_wait_s=10.0, scheduling_policy="fair")
    engine.advance(100.0)
    request = make_request("came", 4, arrived_at=40.0)
    engine.core.add(request, waited_s=0.0)
    engine.step()
    assert not request.is_aged
    engine.run()
