"""Requests that are in an engine by a decision that was made elsewhere."""

from __future__ import annotations

import pytest

from tests.routing.support import prompt, request, router, serve, step


def test_a_restored_request_counts_as_if_it_was_sent_here():
    here, there = router(), router()
    one = request(prompt(1, 2, 3), "a", name="one", n=3)
    there.arrive(one, 0.0)
    (sending,) = there.tick(0.0)
    here.restore(request(prompt(1, 2, 3), "a", name="one", n=3), sending.engine, 0.0)
    for made in (here, there):
        made.check()
        assert made.is_sent("one") and made.engine_of("one") == sending.engine
    assert here.shares.counter(one) == there.shares.counter(one) > 0.0
    assert [e.load_s for e in here.engines] == [e.load_s for e in there.engines]
    serve(here, "one")
    here.finished("one", [7] * 5)
    here.check()
    # Its prefix is known from now on.
    here.arrive(request(prompt(1, 2, 9), "a", name="two"), 0.0)
    assert here.tick(0.0)[0].num_cached == 32
    with pytest.raises(ValueError, match="already"):
        here.restore(request(name="two"), "e0", 0.0)


def test_a_restored_request_is_charged_for_what_was_not_cached():
    made = router(1)
    for name in ("one", "two"):
        made.restore(request(prompt(*range(20)), "a", name=name), "e0", 0.0)
        made.check()
    first, second = made._requests["one"], made._requests["two"]
    assert second.charged_s < first.charged_s / 2
    made.admitted("two", 0)  # the engine had evicted it
    assert second.work_s == pytest.approx(first.work_s)


def test_a_forgotten_request_is_not_refunded_and_not_charged_again():
    made = router(2)
    made.restore(request(512, "a", name="one"), "e0", 0.0)
    charged = made.shares.counter(request(tenant="a"))
    made.forget("one")
    made.check()
    assert made.shares.counter(request(tenant="a")) == charged
    made.arrive(request(512, "a", name="one"), 0.1, is_resent=True)
    made.tick(0.1)
    assert made.shares.counter(request(tenant="a")) == charged
    made.forget("unknown")


def test_a_waiting_request_can_be_assigned_anew():
    class Allowed:
        restricts = True

        def __init__(self) -> None:
            self.engines = {"e0", "e1"}

        def may_assign(self, _request: object, engine: str) -> bool:
            return engine in self.engines

        may_send = may_assign

    allowed = Allowed()
    made = router(2, allowed=allowed)
    for number in range(12):
        made.arrive(request(400, name=f"r{number}"), 0.0)
    made.tick(0.0)
    waiting = [f"r{n}" for n in range(12) if not made.is_sent(f"r{n}")]
    gone = [name for name in waiting if made.engine_of(name) == "e0"]
    assert gone
    allowed.engines = {"e1"}
    for name in [*waiting, "unknown"]:
        made.reassign(name, 0.1)
        made.check()
    assert {made.engine_of(name) for name in waiting} == {"e1"}
    for number in range(40):
        made.observe("e1", step(512), 0.1 * number)
        for sending in made.tick(0.1 * number):
            assert sending.engine == "e1"
            serve(made, sending.request.id)
            made.finished(sending.request.id)
    assert not made.num_waiting
