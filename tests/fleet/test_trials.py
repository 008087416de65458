"""Requests on trial in an engine that frontends share: one at a time, and nobody beside it."""

from __future__ import annotations

from headway.core.events import Finished, Forked, TokensEmitted
from headway.core.params import SamplingParams
from headway.core.request import FinishReason
from headway.engine.process.messages import AddRequest, EventBatch
from headway.engine.supervise.loss import NUM_CLEARING_TOKENS, EngineLoss
from headway.fleet.engines.trials import (
    AFTER_FAILURE_S,
    MAX_DRAIN_S,
    MAX_HOLD_S,
    MAX_TRIAL_S,
    Trials,
)

PARAMS = SamplingParams(max_tokens=100)


def add(trials: Trials, name: str, num_crashes: int = 0, now: float = 0.0) -> None:
    trials.add(AddRequest(name, [1], PARAMS, 0, 0.0, num_crashes=num_crashes), now)


def passed_on(trials: Trials, now: float) -> list[str]:
    names: list[str] = []
    while (command := trials.pop_ready(now)) is not None:
        names.append(command.id)
    return names


def emit(trials: Trials, name: str, num_tokens: int) -> None:
    trials.record(EventBatch(tokens=[TokensEmitted(name, (5,) * num_tokens, None)]))


def finish(trials: Trials, name: str) -> None:
    trials.record(EventBatch(finished=[Finished(name, 0.0, FinishReason.LENGTH, 1, "")]))


def test_without_a_trial_all_requests_are_passed_on_at_once() -> None:
    trials = Trials()
    trials.start_process(0.0)
    add(trials, "1:a")
    add(trials, "2:b")
    assert passed_on(trials, 0.0) == ["1:a", "2:b"]
    assert not trials.is_holding


def test_one_request_is_on_trial_at_a_time_and_others_wait_for_it() -> None:
    trials = Trials()
    add(trials, "1:first", num_crashes=2)
    add(trials, "2:second", num_crashes=2)
    add(trials, "2:other")
    assert passed_on(trials, 0.0) == ["1:first"]
    emit(trials, "1:first", NUM_CLEARING_TOKENS - 1)
    assert passed_on(trials, 1.0) == []
    emit(trials, "1:first", 1)
    assert passed_on(trials, 1.0) == ["2:second"]
    finish(trials, "2:second")
    assert passed_on(trials, 1.0) == ["2:other"]


def test_the_samples_of_one_request_are_on_trial_together() -> None:
    trials = Trials()
    for name in ("1:a", "1:a#1", "2:b"):
        add(trials, name, num_crashes=2)
    assert passed_on(trials, 0.0) == ["1:a", "1:a#1"]
    add(trials, "1:a#2", num_crashes=2)
    assert passed_on(trials, 0.0) == ["1:a#2"]
    for name in ("1:a", "1:a#1"):
        emit(trials, name, NUM_CLEARING_TOKENS)
    assert passed_on(trials, 0.0) == []
    finish(trials, "1:a#2")
    assert passed_on(trials, 0.0) == ["2:b"]


def test_a_prompt_that_forks_is_on_trial_with_all_its_samples() -> None:
    trials = Trials()
    add(trials, "1:a", num_crashes=2)
    add(trials, "2:b")
    assert passed_on(trials, 0.0) == ["1:a"]
    trials.record(EventBatch(forked=[Forked("1:a#1", 0.0, "1:a")]))
    emit(trials, "1:a", NUM_CLEARING_TOKENS)
    assert passed_on(trials, 0.0) == []
    emit(trials, "1:a#1", NUM_CLEARING_TOKENS)
    assert passed_on(trials, 0.0) == ["2:b"]


def test_others_wait_twice_as_long_for_each_further_failure() -> None:
    for num_crashes, seconds in ((2, MAX_TRIAL_S), (3, 2 * MAX_TRIAL_S), (5, 8 * MAX_TRIAL_S)):
        trials = Trials()
        add(trials, "1:long", num_crashes)
        add(trials, "2:b")
        assert passed_on(trials, 0.0) == ["1:long"]
        assert passed_on(trials, 0.99 * seconds) == []
        assert passed_on(trials, seconds) == ["2:b"]


def test_a_process_after_a_failed_one_gets_requests_on_trial_first() -> None:
    trials = Trials()
    trials.lose_process(EngineLoss(frozenset({"1:a"})))
    trials.start_process(10.0)
    add(trials, "2:b")
    assert passed_on(trials, 10.0) == []
    add(trials, "1:a", num_crashes=2)
    assert passed_on(trials, 10.0) == ["1:a"]
    emit(trials, "1:a", NUM_CLEARING_TOKENS)
    assert passed_on(trials, 10.0 + AFTER_FAILURE_S) == ["2:b"]
    # A process that was ended between steps has nobody to try.
    trials.lose_process(EngineLoss())
    trials.start_process(20.0)
    add(trials, "2:b")
    assert passed_on(trials, 20.0) == ["2:b"]


def test_samples_are_new_until_they_have_tokens_or_end() -> None:
    trials = Trials()
    for name in ("1:old", "1:new", "2:ended"):
        add(trials, name)
    passed_on(trials, 0.0)
    emit(trials, "1:old", NUM_CLEARING_TOKENS)
    finish(trials, "2:ended")
    add(trials, "2:suspect", num_crashes=2)
    add(trials, "2:held")
    assert trials.new_ids == ["1:new"]
    assert trials.held_ids == ["2:suspect", "2:held"]
    trials.lose_process(EngineLoss(has_failed=True))
    assert not trials.is_holding and not trials.new_ids


def test_a_trial_waits_until_no_other_request_is_new() -> None:
    trials = Trials()
    add(trials, "2:a")
    passed_on(trials, 0.0)
    add(trials, "1:suspect", num_crashes=2)
    add(trials, "2:b")
    assert passed_on(trials, 0.0) == []
    emit(trials, "2:a", NUM_CLEARING_TOKENS)
    assert passed_on(trials, 1.0) == ["1:suspect"]
    add(trials, "2:second", num_crashes=2)  # not longer than a while, though
    assert passed_on(trials, MAX_DRAIN_S) == []
    assert passed_on(trials, 1.0 + MAX_TRIAL_S) == ["2:second"]


def test_no_request_is_held_without_bound() -> None:
    """Frontends that send one suspect after another do not starve the others."""
    trials = Trials()
    add(trials, "2:b", now=1.0)
    for number in range(100):
        add(trials, f"1:{number}", num_crashes=99)
    assert passed_on(trials, 1.0) == ["1:0"]
    assert passed_on(trials, 0.9 * MAX_HOLD_S) == []
    assert passed_on(trials, 1.0 + MAX_HOLD_S) == ["2:b"]


def test_an_aborted_request_waits_no_longer() -> None:
    trials = Trials()
    add(trials, "1:a", num_crashes=2)
    passed_on(trials, 0.0)
    add(trials, "2:b")
    add(trials, "2:c")
    assert trials.take(["1:a", "2:b"]) == ["2:b"]
    finish(trials, "1:a")
    assert passed_on(trials, 0.0) == ["2:c"]
