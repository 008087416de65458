"""The router: which engine a request is assigned to, and when it is sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.core.slo.steptime import StepCost
from headway.core.terms import Targets
from headway.routing import RULES, NoEngineInTime, Reason, Router
from tests.routing.support import COST, LIMITS, prompt, request, router, serve, step


def send(made: Router, one, now: float = 0.0) -> str | None:
    """Have a request arrive; return the engine that it was sent to."""
    made.arrive(one, now)
    sent = {sending.request.id: sending.engine for sending in made.tick(now)}
    return sent.get(one.id)


def test_an_idle_fleet_takes_a_request_at_once():
    made = router()
    assert send(made, request()) == "e0"
    assert made.num_waiting == 0


def test_unlike_prompts_are_spread():
    made = router(4)
    assert {send(made, request(200)) for _ in range(4)} == {"e0", "e1", "e2", "e3"}


def test_a_conversation_stays_with_its_engine():
    made = router(4)
    first = prompt(1, 2, 3, 4)
    send(made, request(200))
    one = request(first)
    engine = send(made, one)
    serve(made, one.id)
    made.finished(one.id, [7] * 32)
    turn = request([*first, *[7] * 32, *prompt(5)])
    made.arrive(turn, 1.0)
    (sending,) = made.tick(1.0)
    assert sending.engine == engine
    assert sending.num_cached == 5 * 16  # the last token of an answer is never computed
    assert sending.reason is Reason.PREFIX


def test_an_answer_that_fills_its_last_block_makes_the_router_forget_nothing():
    made = router(1)
    kept, talk = prompt(1, 2), prompt(3, 4)
    for name, tokens in (("kept", kept), ("talk", talk)):
        send(made, request([*tokens, 0], name=name))
        serve(made, name)
        made.finished(name, [7] * 15)
    turn = request([*talk, 0, *[7] * 15, *prompt(5)], name="turn")
    send(made, turn)
    serve(made, "turn", num_cached=2 * 16)  # what an engine has after 47 computed tokens
    made.finished("turn")
    made.arrive(request([*kept, *prompt(6)]), 1.0)
    (sending,) = made.tick(1.0)
    assert sending.num_cached == 2 * 16


def test_a_burst_of_one_new_prefix_stays_together():
    made = router(4)
    shared = prompt(*range(40))
    engines = [send(made, request([*shared, *prompt(100 + n)])) for n in range(3)]
    assert len(set(filter(None, engines))) == 1


def test_a_hot_prefix_spreads_when_its_engine_is_full():
    made = router(2)
    shared = prompt(*range(10))
    engines = {send(made, request([*shared, *prompt(100 + n)])) for n in range(12)}
    assert {"e0", "e1"} <= engines


def test_a_slow_engine_gets_less():
    made = router(1)
    slow = StepCost(0.08, 3e-3, 2.5e-3, num_steps=100)
    made.engine_joined("slow", LIMITS, slow)
    engines = [made.arrive(request(200), 0.0) for _ in range(11)]
    assert 1 <= engines.count("slow") <= 3


def test_tenants_do_not_share_prefixes():
    made = router(2)
    send(made, request(prompt(*range(20)), "a"))
    made.arrive(request(prompt(*range(20)), "b"), 0.0)
    sent = made.tick(0.0)
    assert [sending.num_cached for sending in sent] == [0]


def test_a_request_waits_for_its_turn_in_the_engine():
    made = router(1)
    assert send(made, request(512)) == "e0"
    behind = request(64)
    assert send(made, behind) is None
    made.observe("e0", step(512, num_running=1), 0.1)
    assert [sending.request for sending in made.tick(0.1)] == [behind]
    assert made.num_waiting == 0


def test_an_engine_gets_no_more_sequences_than_it_runs():
    made = router(1, replace(LIMITS, max_num_seqs=2))
    ids = [request(16).id for _ in range(3)]
    for name in ids:
        made.arrive(request(16, name=name), 0.0)
    assert [sending.request.id for sending in made.tick(0.0)] == ids[:2]
    for name in ids[:2]:
        serve(made, name)
    assert made.tick(0.1) == []
    made.finished(ids[0])
    assert [sending.request.id for sending in made.tick(0.2)] == ids[2:]


def test_an_engine_gets_no_more_blocks_than_it_has():
    made = router(1, replace(LIMITS, num_blocks=10))
    made.arrive(request(96), 0.0)
    made.arrive(request(96), 0.0)
    assert len(made.tick(0.0)) == 1


def test_an_engine_without_our_requests_takes_one_whatever_it_reported():
    made = router(1)
    made.observe("e0", step(8, num_running=8, num_waiting=5), 0.0)
    assert send(made, request(), 60.0) == "e0"


def test_a_lost_engine_gives_back_what_was_not_sent():
    made = router(2)
    shared = prompt(*range(60))
    ids = [f"p{n}" for n in range(4)]
    for n, name in enumerate(ids):
        made.arrive(request([*shared, *prompt(100 + n)], name=name), 0.0)
    assert len(made.tick(0.0)) == 1
    engine = made.engine_of("p0") or ""
    assert made.engine_lost(engine, 0.1) == ids[1:]
    other = {"e0": "e1", "e1": "e0"}[engine]
    assert {made.engine_of(name) for name in ids[1:]} == {other}
    made.arrive(request([*shared, *prompt(100)], name="p0"), 0.1, is_resent=True)
    sending = made.tick(0.1)[0]  # the resent request goes first
    assert (sending.request.id, sending.reason) == ("p0", Reason.FAILOVER)
    made.check()


def test_a_resent_request_does_not_wait_for_sent_prompts():
    made = router(1)
    send(made, request(2048))
    one = request(64)
    made.arrive(one, 0.0, is_resent=True)
    assert [sending.request for sending in made.tick(0.0)] == [one]


def test_requests_wait_for_an_engine_to_join():
    made = Router()
    one = request()
    assert made.arrive(one, 0.0) is None
    assert made.tick(0.0) == []
    made.engine_joined("late", LIMITS)
    assert [sending.engine for sending in made.tick(0.1)] == ["late"]


def test_a_draining_engine_gets_nothing_more():
    made = router(2)
    made.arrive(request(512, name="a"), 0.0)
    made.tick(0.0)
    made.engine_draining("e0", 0.0)
    for _ in range(6):
        assert made.arrive(request(512), 0.0) == "e1"
    made.check()


def test_a_new_engine_takes_over_what_waits():
    made = router(1)
    for _ in range(20):
        made.arrive(request(512), 0.0)
    made.tick(0.0)
    made.engine_joined("new", LIMITS, COST)
    sent = [sending for n in range(20) for sending in made.tick(0.1 + n / 100)]
    assert {(sending.engine, sending.reason) for sending in sent} == {("new", Reason.MOVED)}
    by_engine = {one.name: len(one.queue) + len(one.sent) for one in made.engines}
    assert 5 <= by_engine["new"] <= 12
    made.check()


def test_a_miss_drops_what_was_evicted_before_it():
    made = router(1)
    old, new = prompt(1, 2, 3), prompt(4, 5, 6)
    for name, tokens in (("old", old), ("old+", [*old, *prompt(9)]), ("new", new)):
        made.arrive(request(tokens, name=name), 0.0)
        made.tick(0.0)
        serve(made, name)
        made.finished(name)
    # The engine found one block of the first chain: it has evicted the rest.
    made.arrive(request(old, name="again"), 1.0)
    (sending,) = made.tick(1.0)
    assert sending.num_cached == 32
    made.admitted("again", 16)
    assert made.arrive(request([*old, *prompt(9, 9)], name="longer"), 1.0) == "e0"
    assert made._requests["longer"].num_cached == 48  # as `again` computes it anew
    made.arrive(request([*new, *prompt(9)], name="newer"), 1.0)
    assert made._requests["newer"].num_cached == 48
    made.check()


def test_a_prefix_that_is_still_computed_is_not_a_miss():
    made = router(1)
    other, shared = prompt(50, 51), prompt(*range(10))
    made.arrive(request(other, name="other"), 0.0)
    made.tick(0.0)
    serve(made, "other")
    made.finished("other")
    for name, part in (("a", 60), ("b", 61)):
        made.arrive(request([*shared, *prompt(part)], name=name), 0.0)
    assert len(made.tick(0.0)) == 2
    made.admitted("a", 0)
    made.admitted("b", 0)  # in the same step as a
    made.arrive(request([*other, *prompt(1)], name="c"), 0.0)
    assert made._requests["c"].num_cached == 32


def test_targets_are_refused_only_if_no_engine_can_meet_them():
    made = router(2)
    for _ in range(40):
        made.arrive(request(512), 0.0)
    hurried = Targets(ttft_s=0.5)
    outcome = made.arrive(request(64, "", targets=hurried), 0.0)
    assert isinstance(outcome, NoEngineInTime)
    assert outcome.retry_after_s >= 1.0
    made.engine_joined("idle", LIMITS, COST)
    assert made.arrive(request(64, targets=hurried), 0.0) == "idle"
    made.check()


def test_another_tenants_flood_refuses_no_targets():
    made = router(2)
    for _ in range(60):
        made.arrive(request(512, "flood"), 0.0)
    made.tick(0.0)
    assert isinstance(made.arrive(request(64, "calm", targets=Targets(ttft_s=1.0)), 0.0), str)


def test_an_urgent_request_does_not_wait_for_sent_prompts():
    made = router(1)
    send(made, request(2048))
    assert send(made, request(64, targets=Targets(ttft_s=5.0))) == "e0"


def test_a_request_that_may_not_be_sent_waits_and_is_tried_again():
    class Closed:
        is_open = False

        def may_assign(self, request, engine):
            return True

        def may_send(self, request, engine):
            return self.is_open

    allowed = Closed()
    made = router(1, allowed=allowed)
    assert send(made, request()) is None
    allowed.is_open = True
    assert len(made.tick(1.0)) == 1


class Only:
    """Allows some engines by name."""

    restricts = True

    def __init__(self) -> None:
        self.names = {"e0"}

    def may_assign(self, request, engine):
        return engine in self.names

    def may_send(self, request, engine):
        return True


def test_a_request_moves_if_its_engine_may_no_longer_have_it():
    allowed = Only()
    made = router(2, allowed=allowed)
    send(made, request(512))
    assert made.arrive(request(512), 0.0) == "e0"
    allowed.names = {"e1"}
    assert [sending.engine for sending in made.tick(0.1)] == ["e1"]


@pytest.mark.parametrize(
    ("num_prompts", "terms", "is_cached", "moves"),
    [
        (0, {}, True, True),
        (8, {}, True, False),
        (8, {}, False, True),
        (8, {"tenant": "flood"}, True, True),
        (8, {"is_spot": True}, True, True),
    ],
)
def test_a_request_moves_unless_it_delays_many_by_what_is_cached_here(
    num_prompts, terms, is_cached, moves
):
    allowed = Only()
    made = router(2, replace(LIMITS, max_num_seqs=64), allowed=allowed)
    shared = prompt(*range(40))
    if is_cached:
        first = request(shared)
        send(made, first)
        serve(made, first.id)
        made.finished(first.id)
    allowed.names = {"e1"}
    for _ in range(num_prompts):
        send(made, request(16, **terms))
    allowed.names = {"e0"}
    send(made, request(3000))
    assert made.arrive(request([*shared, *prompt(100)]), 0.0) == "e0"
    assert made.tick(0.0) == []
    allowed.names = {"e0", "e1"}
    assert [sending.engine for sending in made.tick(0.0)] == (["e1"] if moves else [])
    made.check()


def test_a_cancelled_request_is_not_sent():
    made = router(1)
    send(made, request(512))
    one = request(512)
    made.arrive(one, 0.0)
    made.cancel(one.id)
    made.observe("e0", step(512, num_running=1), 1.0)
    assert made.tick(1.0) == []
    assert made.num_waiting == 0
    made.check()


def test_a_request_cancelled_before_its_prefill_leaves_no_prefix():
    made = router(2)
    one = request(prompt(*range(8)))
    send(made, one)
    made.cancel(one.id)
    made.arrive(request(prompt(*range(8))), 0.0)
    assert [sending.num_cached for sending in made.tick(0.0)] == [0]


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_sends_every_request(rule):
    made = router(3, rule=RULES[rule]())
    ids = [f"q{n}" for n in range(30)]
    sent: list[str] = []
    for n, name in enumerate(ids):
        made.arrive(request([*prompt(n % 3, n % 5), *prompt(n)], name=name), 0.0)
        sent += [sending.request.id for sending in made.tick(0.0)]
    for n in range(40):
        for name in list(sent):
            serve(made, name)
            made.finished(name, [7])
        made.check()
        sent += [sending.request.id for sending in made.tick(1.0 + n)]
    assert sorted(set(sent)) == sorted(ids)
    assert len(sent) == len(set(sent))
