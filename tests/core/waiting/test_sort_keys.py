"""Waiting requests with smaller keys: which running requests they preempt, and which not."""

from __future__ import annotations

from collections import Counter

import pytest

from headway.core.events import Admitted, Preempted
from headway.core.terms import Terms
from headway.core.waiting.queue import MAX_URGENT
from tests.support.harness import Harness


def test_a_seat_is_taken_over_also_when_the_limit_has_come_down():
    engine = Harness(max_num_seqs=8)
    for at in range(6):
        engine.add(f"r{at}", 4, max_tokens=9, priority=1)
    engine.step()
    pacer = engine.scheduler.pacer
    pacer.limits = pacer.limits._replace(max_num_seqs=3)
    engine.add("urgent", 4, max_tokens=2)
    engine.step()
    assert "urgent" in engine.running
    assert len(engine.seen(Preempted)) == 1, "one seat was needed"
    engine.run()


def test_however_many_have_a_claim_on_their_own_few_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
):
    engine = Harness(max_num_seqs=9, max_num_batched_tokens=64)
    for tenant in "abcdefghi":
        engine.add(f"running-{tenant}", 4, max_tokens=9, priority=1, terms=Terms(tenant))
    engine.step()
    for at in range(20):
        for tenant in "abcdefghi":
            engine.add(f"{tenant}{at}", 4, terms=Terms(tenant))
    accounts, looks = engine.scheduler.accounts, list[str]()
    of = accounts.of
    monkeypatch.setattr(accounts, "of", lambda one: (looks.append(one.id), of(one))[1])
    turns = ["a0", "b0", "c0", "d0"], ["e0", "f0", "g0", "h0"], ["i0", "a0", "b0", "c0"]
    for expected in turns:
        looks.clear()
        assert [one.id for one in engine.scheduler.waiting.urgent()] == expected
        assert len(looks) <= MAX_URGENT


def test_requests_that_do_not_fit_keep_no_other_tenant_from_its_own_places():
    engine = Harness(num_blocks=64, block_size=4, max_num_seqs=3)
    for at in range(2):
        engine.add(f"low{at}", 20, max_tokens=90, priority=1, terms=Terms("b"))
    engine.add("parked", 4, max_tokens=90, terms=Terms("a"))
    engine.until(lambda: len(engine.running) == 3)
    for at in range(20):
        engine.add(f"huge{at}", 240, max_tokens=1, priority=-9, terms=Terms("a"))
    engine.step()
    engine.add("high", 4, max_tokens=2, terms=Terms("b"))
    engine.step()
    assert "high" in engine.running
    engine.run()


def test_a_request_that_has_aged_still_takes_a_place_of_its_own_tenant():
    engine = Harness(max_num_seqs=2)
    engine.add("low", 4, max_tokens=20, priority=1, terms=Terms("b"))
    engine.add("other", 4, max_tokens=20, terms=Terms("a"))
    engine.step()
    engine.add("head", 4, terms=Terms("c"))
    engine.step()
    engine.add("high", 4, terms=Terms("b"), is_aged=True)
    engine.step()
    assert [event.by for event in engine.seen(Preempted, "low")] == ["high"]
    engine.run()


def test_none_of_a_tenant_overtakes_its_aged_request():
    engine = Harness(max_num_seqs=2, max_wait_s=1.0)
    for at in range(2):
        engine.add(f"b{at}", 4, max_tokens=20, priority=5, terms=Terms("b"))
    engine.step()
    engine.add("old", 4, priority=9, max_tokens=30, terms=Terms("b"))
    engine.step()
    engine.advance(2.0)
    engine.add("head", 4, max_tokens=2, terms=Terms("c"))
    engine.step()
    assert engine.scheduler.requests["old"].is_aged
    engine.add("high", 4, terms=Terms("b"))
    engine.step()
    assert not engine.seen(Preempted)
    engine.run()
    order = [event.request_id for event in engine.seen(Admitted)]
    assert order.index("old") < order.index("high")


def test_a_weak_request_that_runs_does_not_open_the_free_seats_to_its_tenant():
    engine = Harness(max_num_seqs=3, max_preemptions=1)
    engine.add("low", 4, max_tokens=100, priority=1, terms=Terms("a"))
    engine.step()
    for at in range(3):
        engine.add(f"x{at}", 4, max_tokens=2, terms=Terms("a"))
    engine.until(lambda: engine.running == ["low"] and bool(engine.seen(Preempted, "low")))
    engine.events.clear()  # it may not be preempted again
    for at in range(12):
        engine.add(f"a{at}", 4, max_tokens=2, terms=Terms("a"))
        engine.add(f"b{at}", 4, max_tokens=2, terms=Terms("b"))
    engine.until(lambda: len(engine.seen(Admitted)) >= 12)
    admitted = Counter(event.request_id[0] for event in engine.seen(Admitted))
    assert admitted["b"] >= 5, admitted
    engine.run()
