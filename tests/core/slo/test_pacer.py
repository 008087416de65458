"""The pacer in the engine: refusals, order by slack, decodes that give way, steps in time."""

from __future__ import annotations

import pytest

from headway.core.events import Admitted, Finished, Refused, Stepped
from headway.core.request import FinishReason
from headway.core.slo.pacer import MAX_DEFERRED_STEPS
from headway.core.slo.step_limits import StepLimits, StepLoad
from headway.core.slo.steptime import StepCost, StepShape
from headway.core.terms import Targets, Terms
from tests.core.slo.paced import Paced
from tests.support.harness import Harness, make_request


def test_what_cannot_be_promised_is_refused_with_a_reason():
    engine = Paced()
    engine.ask("hopeless", 2000, 5, ttft_s=1.0)
    refused = engine.refusal("hopeless")
    assert refused is not None
    assert refused.reason == "deadline"
    assert "the first token is expected in" in refused.message
    engine.ask("fine", 200, 5, ttft_s=1.0)
    assert engine.refusal("fine") is None
    engine.run()


def test_a_refusal_is_for_the_promises_already_made():
    engine = Paced()
    for number in range(6):
        engine.ask(f"a{number}", 200, 2, ttft_s=1.5)
    refused = [number for number in range(6) if engine.refusal(f"a{number}")]
    assert refused in ([4, 5], [5]), "as many as a second and a half has room for"
    engine.run()
    for number in set(range(6)) - set(refused):
        first_at = engine.finish(f"a{number}").at
        assert first_at <= engine.seen(Admitted)[0].at + 1.6


def test_a_refusal_says_when_the_token_would_come():
    engine = Paced()
    for number in range(6):
        engine.ask(f"a{number}", 200, 2, ttft_s=1.5)
    messages = [refused.message for refused in engine.seen(Refused)]
    assert messages
    assert all(message.startswith("the first token is expected in") for message in messages)
    assert not any("inf" in message for message in messages)
    engine.run()


def test_one_that_ends_at_a_stop_string_counts_for_the_length_of_outputs():
    engine = Paced()
    engine.ask("a", 4, 100, deadline_s=100.0)
    engine.steps(10)
    engine.core.abort("a", FinishReason.STOP)
    lengths = engine.scheduler.pacer.open_requests.lengths
    assert lengths.expected_left("", "", 0, 100) < 20


def test_nothing_is_refused_before_the_cost_of_a_step_is_known():
    engine = Harness(scheduling_policy="deadline")
    engine.add("a", 100, terms=Terms(targets=Targets(ttft_s=0.0001)))
    assert not engine.seen(Refused)
    engine.run()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_policies_that_do_not_heed_targets_refuse_nothing(policy: str):
    engine = Paced(scheduling_policy=policy)
    engine.ask("a", 2000, 5, ttft_s=0.1)
    assert engine.refusal("a") is None
    engine.run()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_policies_that_do_not_heed_targets_let_nobody_wait_longer_for_one(policy: str):
    engine = Paced(scheduling_policy=policy, max_num_seqs=1, max_wait_s=1.0)
    engine.add("running", 4, max_tokens=200)
    engine.step()
    engine.ask("a", 4, 5, deadline_s=600.0)
    engine.advance(1.0)
    engine.step()
    assert engine.scheduler.requests["a"].is_aged
    engine.run()


def test_one_that_comes_back_after_a_crash_is_not_refused():
    engine = Paced()
    terms = Terms(targets=Targets(ttft_s=0.001))
    again = make_request("a", 100, 30, num_prompt_tokens=90, terms=terms)
    engine.core.add(again, is_resent=True)
    engine.core.add(make_request("b", 100, 30, terms=terms), is_resent=True)
    assert engine.refusal("a") is engine.refusal("b") is None
    engine.run()


@pytest.mark.parametrize("policy", ["deadline", "fair"])
def test_who_must_be_begun_first_is_first(policy: str):
    engine = Paced(max_num_seqs=1, scheduling_policy=policy)
    engine.add("running", 4, max_tokens=20)
    engine.step()
    engine.add("whenever", 20, max_tokens=2)
    engine.ask("later", 20, 2, deadline_s=30.0)
    engine.ask("soon", 20, 2, ttft_s=2.0)
    engine.run()
    order = [event.request_id for event in engine.seen(Admitted)]
    assert order == ["running", "soon", "later", "whenever"]


def test_one_that_is_continued_after_a_crash_is_taken_to_be_on_time():
    engine = Paced()
    terms = Terms(targets=Targets(tpot_s=0.1))
    request = make_request("again", 34, 60, terms=terms, num_prompt_tokens=4)
    engine.core.add(request)
    engine.step()
    assert request.num_output_tokens == 31
    work = engine.scheduler.pacer.open_requests.work(request)
    assert work.next_due_at == pytest.approx(engine.clock.now() + 0.1)
    engine.run()


def late_by(late_s: float) -> int:
    """Tokens of prefill beside one that has had 10 of its 50 tokens, so much too late."""
    engine = Paced()
    engine.ask("reader", 4, 50, tpot_s=0.1)
    engine.steps(11)
    engine.advance(10 * 0.1 - 10 * 0.011 + late_s)
    engine.add("long", 1000, max_tokens=2)
    return len(engine.step()["long"].token_ids)


def test_steps_are_shorter_while_somebody_has_to_catch_up():
    in_time = late_by(-0.5)
    assert late_by(0.1) == pytest.approx(in_time, abs=1), "what steps keep in hand is enough"
    # Half a second over 40 tokens: 12.5 of its 100 ms. It needs 87 on average, and gets 83.
    assert late_by(0.5) == pytest.approx(in_time - 7, abs=3)
    assert late_by(1.5) < late_by(0.5) - 15
    assert late_by(4.0) == in_time, "it will not be in time whatever is done"


def test_an_urgent_prompt_goes_before_the_rest_of_a_long_one():
    engine = Paced(prefill_cap=50)
    engine.add("decoding", 4, max_tokens=100)
    engine.step()
    engine.ask("long", 1000, 2, deadline_s=60.0)
    engine.step()
    engine.ask("short", 40, 2, ttft_s=1.0)
    step = engine.step()
    assert len(step["short"].token_ids) == 40
    assert len(step["long"].token_ids) == 10
    engine.run()


def test_prefill_is_cut_so_that_the_step_ends_in_time():
    engine = Paced()
    engine.ask("reader", 4, 200, tpot_s=0.1)
    engine.step()
    engine.add("long", 1000, max_tokens=2)
    for _ in range(3):
        step = engine.step()
        assert 40 < len(step["long"].token_ids) < 100
        assert engine.timed.step_s <= 0.1
    engine.run()


def test_how_far_a_prompt_has_come_counts_in_the_size_of_its_next_part(
    monkeypatch: pytest.MonkeyPatch,
):
    engine = Paced()
    engine.ask("reader", 4, 200, tpot_s=0.1)
    engine.step()
    engine.add("long", 1000, max_tokens=2)
    controller, starts = engine.scheduler.pacer._controller, []
    decide = controller.decide

    def note(load: StepLoad, cost: StepCost) -> StepLimits:
        starts.append(load.prefill_start)
        return decide(load, cost)

    monkeypatch.setattr(controller, "decide", note)
    sizes = [len(engine.step()["long"].token_ids) for _ in range(3)]
    assert starts == [0, sizes[0], sizes[0] + sizes[1]]
    engine.run()


def test_the_prefill_of_a_step_is_not_cut_where_nobody_reads():
    engine = Paced()
    engine.add("other", 4, max_tokens=200)
    engine.step()
    engine.add("long", 1000, max_tokens=2)
    assert len(engine.step()["long"].token_ids) == 511


def test_decodes_without_haste_give_way_to_those_behind_their_readers():
    engine = Paced()
    for number in range(40):
        engine.ask(f"batch{number}", 4, 60, deadline_s=120.0)
    while len(engine.step()) < 40 or engine.scheduler.num_seqs < 40:
        pass
    engine.ask("reader", 4, 30, tpot_s=0.04)
    engine.until(lambda: bool(engine.output("reader")))
    times = []
    for _ in range(10):
        began_at = engine.clock.now()
        step = engine.step()
        times.append(engine.clock.now() - began_at)
        assert "reader" in step
    assert len(step) < 41
    assert sorted(times)[5] <= 0.04
    engine.run()
    assert all(event.at < 120.0 for event in engine.seen(Finished))


def test_nobody_gives_way_for_ever():
    engine = Paced()
    for number in range(60):
        engine.ask(f"batch{number}", 4, 40, deadline_s=1000.0)
    while engine.scheduler.num_seqs < 60:
        engine.step()
    engine.ask("reader", 4, 60, tpot_s=0.03)
    last_in = dict.fromkeys(engine.running, 0)
    for number in range(1, 40):
        for name in engine.step():
            last_in[name] = number
        for name in engine.running:
            assert number - last_in.setdefault(name, number) <= MAX_DEFERRED_STEPS + 1
    engine.run()


def test_the_step_event_carries_the_forecast():
    engine = Paced()
    engine.ask("reader", 4, 5, tpot_s=0.1)
    engine.step()
    engine.step()
    forecast = engine.seen(Stepped)[-1].forecast
    assert forecast is not None
    assert forecast.speed.step_s == pytest.approx(0.09)
    assert forecast.speed.cost.predict(StepShape(10, 20)) == pytest.approx(0.04, rel=0.1)
    assert forecast.speed.cost.error < 0.05


def test_a_prompt_of_many_samples_gets_its_seats_however_low_the_limit_is():
    engine = Paced(max_num_seqs=16)
    pacer = engine.scheduler.pacer
    engine.ask("reader", 4, 40, tpot_s=0.02)
    engine.step()
    pacer._controller._running_limit = 4.0
    engine.step()
    assert pacer.limits.max_num_seqs < 8
    engine.add("many", 4, max_tokens=4, n=8)
    engine.run()
    assert engine.output("many")
    assert engine.output("many#7")


def test_throughput_mode_takes_larger_steps_than_the_budget_says():
    engine = Paced(mode="throughput", max_num_batched_tokens=64)
    engine.add("long", 250, max_tokens=2)
    assert len(engine.step()["long"].token_ids) == 250
    engine.run()


def test_what_is_kept_of_a_promise_goes_with_the_request():
    engine = Paced()
    for number in range(5):
        engine.ask(f"a{number}", 4, 5, ttft_s=5.0, tpot_s=0.5)
    engine.abort("a0")
    engine.run()
    opened = engine.scheduler.pacer.open_requests
    assert not opened.requests
    assert not opened.first_token_at


def test_a_step_in_which_all_would_give_way_has_them_all(monkeypatch: pytest.MonkeyPatch):
    engine = Paced()
    for name in "abc":
        engine.add(name, 4, max_tokens=8)
    engine.steps(2)
    # As when the ones that stay find no block and sit out.
    monkeypatch.setattr(engine.scheduler.pacer, "begin", lambda *_: [])
    assert set(engine.step()) == {"a", "b", "c"}


def test_what_was_promised_to_those_who_left_is_refused_to_nobody():
    engine = Paced()
    for number in range(4):
        engine.ask(f"a{number}", 200, 2, ttft_s=1.5)
        engine.abort(f"a{number}")
    engine.ask("fine", 1000, 2, ttft_s=1.5)
    assert engine.refusal("fine") is None, "the engine is empty, and no step will come to clear it"
    engine.run()


def test_every_sample_of_a_prompt_has_what_was_promised():
    engine = Paced()
    terms = Terms(targets=Targets(ttft_s=0.1, tpot_s=0.5))
    engine.add("a", 4, max_tokens=40, n=2, terms=terms)
    engine.steps(20)
    pacer, opened = engine.scheduler.pacer, engine.scheduler.pacer.open_requests
    other = engine.scheduler.requests["a#1"]
    assert opened.work(other).next_due_at > engine.clock.now(), "it is ahead of its reader"
    engine.abort("a")
    engine.steps(2)
    assert pacer.limits.step_s is not None, "somebody still reads"
    engine.run()
    assert not opened.requests
    assert not opened.first_token_at


def test_a_step_looks_only_at_the_promised_that_are_in_it(monkeypatch: pytest.MonkeyPatch):
    engine = Paced(max_num_seqs=2)
    for number in range(50):
        engine.ask(f"a{number}", 4, 5, deadline_s=1000.0)
    engine.step()
    opened, followed = engine.scheduler.pacer.open_requests, list[str]()
    follow = opened.follow
    monkeypatch.setattr(
        opened, "follow", lambda one, now: (followed.append(one.id), follow(one, now))
    )
    engine.step()
    assert followed == engine.running
    monkeypatch.undo()
    engine.run()
