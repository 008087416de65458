"""Waiting requests of stronger claim: whose places they take, and whose not."""

from __future__ import annotations

from collections import Counter

import pytest

from headway.core.events import Admitted, Preempted
from headway.core.terms import Terms
from headway.core.waiting.queue import MAX_LOOKS
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
    engine = Harness(max_num_seqs=1)
    engine.add("running", 4, max_tokens=9, priority=1, terms=Terms("a"))
    engine.step()
    for at in range(100):
        engine.add(f"a{at}", 4, terms=Terms("a"))
    accounts, looks = engine.scheduler.accounts, list[str]()
    of = accounts.of
    monkeypatch.setattr(accounts, "of", lambda one: (looks.append(one.id), of(one))[1])
    assert [one.id for one in engine.scheduler.waiting.urgent()] == ["a0", "a1", "a2", "a3"]
    assert len(looks) <= MAX_LOOKS


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
