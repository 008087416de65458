"""Promises: when tokens are due, who has slack, and what may still be promised."""

from __future__ import annotations

from math import inf

import pytest

from headway.core.deadlines import (
    MAX_RETRY_AFTER_S,
    Ahead,
    Feasible,
    Infeasible,
    Job,
    Pace,
    expected_ttft_s,
    feasible,
    job_of,
    met,
    slack_s,
)
from headway.core.steptime import StepCost
from headway.core.terms import NO_TARGETS, Targets
from tests.support.harness import make_request

COST = StepCost(0.01, 1e-3, 1e-3, 0.0, 0.0, error=0.0, num_steps=1000)
"""A prefill token and a decode take a millisecond each, a step 10 ms by itself."""
PACE = Pace(COST, step_s=0.1)
BATCH = Targets(deadline_s=60.0)
CHAT = Targets(ttft_s=1.0, tpot_s=0.1)


def waiting(
    targets: Targets, num_prompt: int = 100, num_output: int = 50, arrived_at: float = 0.0
) -> Job:
    return Job(arrived_at, targets, num_prompt, 0, num_output, num_prompt)


def decoding(targets: Targets, num_output: int, num_left: int, first_token_at: float) -> Job:
    return Job(0.0, targets, 0, num_output, num_left, 100 + num_output, first_token_at)


# ------------------------------------------------------------------------------ goodput


@pytest.mark.parametrize(
    ("targets", "ttft_s", "tpot_s", "e2e_s", "is_met"),
    [
        (NO_TARGETS, 9.0, 9.0, 99.0, True),
        (CHAT, 1.0, 0.1, 99.0, True),
        (CHAT, 1.01, 0.1, 2.0, False),
        (CHAT, 0.5, 0.11, 2.0, False),
        (CHAT, 0.5, None, 0.5, True),
        (CHAT, None, None, None, False),
        (BATCH, 30.0, 2.0, 60.0, True),
        (BATCH, 30.0, 2.0, 60.1, False),
        (BATCH, 1.0, None, None, False),
    ],
)
def test_a_request_is_good_if_every_target_was_met(
    targets: Targets, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None, is_met: bool
):
    assert met(targets, ttft_s, tpot_s, e2e_s) is is_met


# --------------------------------------------------------------------------- due times


def test_when_the_first_and_the_last_token_are_due():
    chat = waiting(CHAT, num_output=11, arrived_at=5.0)
    assert (chat.next_due_at, chat.last_due_at) == (6.0, pytest.approx(7.0))
    batch = waiting(BATCH, arrived_at=5.0)
    assert (batch.next_due_at, batch.last_due_at) == (inf, 65.0)
    assert waiting(NO_TARGETS).last_due_at == inf


def test_a_reader_begins_with_the_first_token_and_not_when_it_was_due():
    job = decoding(CHAT, num_output=1, num_left=10, first_token_at=0.2)
    assert job.last_due_at == pytest.approx(0.2 + 10 * 0.1)


def test_a_deadline_must_be_begun_early_enough_for_all_its_tokens():
    job = waiting(BATCH, num_prompt=1000, num_output=100)
    assert job.latest_start_at(COST, 0.1) == pytest.approx(60.0 - 1.0 - 10.0)
    assert waiting(NO_TARGETS).latest_start_at(COST, 0.1) == inf


def test_the_slack_of_a_decode_is_how_far_it_is_ahead_of_its_reader():
    ahead = decoding(CHAT, num_output=20, num_left=5, first_token_at=0.5)
    behind = decoding(CHAT, num_output=10, num_left=5, first_token_at=0.5)
    assert slack_s(ahead, 1.5, COST, 0.05) == pytest.approx(0.5 + 2.0 - 1.5 - 0.05)
    assert slack_s(behind, 1.5, COST, 0.05) < 0.0
    assert slack_s(decoding(NO_TARGETS, 10, 5, 0.5), 1.5, COST, 0.05) == inf


def test_a_decode_with_a_deadline_has_the_slack_that_its_remaining_tokens_leave():
    job = decoding(BATCH, num_output=10, num_left=100, first_token_at=30.0)
    assert slack_s(job, 40.0, COST, 0.1) == pytest.approx(60.0 - 40.0 - 100 * 0.1)


def test_what_is_left_of_a_request():
    request = make_request("a", 100, max_tokens=50)
    assert job_of(request, 50).num_prefill_left == 100
    request.num_computed = 60
    assert job_of(request, 50).num_prefill_left == 40
    request.num_computed = 100
    request.append(7)
    job = job_of(request, 49, first_token_at=3.0)
    assert (job.num_prefill_left, job.num_output, job.num_context) == (0, 1, 101)


def test_what_is_cached_need_not_be_computed():
    request = make_request("a", 100, max_tokens=50)
    job = job_of(request, 50, num_cached=96)
    assert (job.num_prefill_left, job.num_context) == (4, 100)
    request.num_computed = 50  # what was cached has been taken up, or was gone
    assert job_of(request, 50, num_cached=96).num_prefill_left == 50


def test_every_sample_has_its_own_decodes():
    one, eight = (job_of(make_request("a", 100, max_tokens=50, n=n), 50) for n in (1, 8))
    assert eight.decode_s(COST) == pytest.approx(8 * one.decode_s(COST))
    assert eight.prefill_s(COST) == one.prefill_s(COST)


# ------------------------------------------------------------------------- feasibility


def test_an_empty_engine_can_promise_what_it_can_do():
    assert isinstance(feasible(waiting(CHAT), (), PACE, 0.0), Feasible)
    assert isinstance(feasible(waiting(CHAT, num_prompt=2000), (), PACE, 0.0), Infeasible)


def test_an_idle_engine_begins_at_once():
    assert expected_ttft_s(waiting(CHAT, num_prompt=90), (), PACE) == pytest.approx(0.01 + 0.1)


def test_a_first_token_is_expected_behind_the_prefills_that_are_due_before_it():
    new = waiting(CHAT, num_prompt=90)
    after = [waiting(BATCH, num_prompt=5000), waiting(NO_TARGETS, num_prompt=5000)]
    behind_s = expected_ttft_s(new, after, PACE)
    assert behind_s == pytest.approx(0.05 + 0.1), "half a step, and its own tokens in the rest"
    before = [waiting(CHAT, num_prompt=180, arrived_at=-0.5)]
    assert expected_ttft_s(new, [*after, *before], PACE) - behind_s == pytest.approx(0.2)


def test_decodes_take_their_part_of_every_step():
    half = [decoding(NO_TARGETS, 5, 5, 0.0)] * 45
    expected_s = expected_ttft_s(waiting(CHAT, num_prompt=90), half, PACE)
    assert expected_s == pytest.approx(0.05 + 0.2), "45 of 90 ms are left to prefill"


def test_a_pace_no_step_can_have_is_refused_whatever_the_load():
    verdict = feasible(waiting(Targets(tpot_s=0.005)), (), PACE, 0.0)
    assert isinstance(verdict, Infeasible)
    assert "even without other requests" in verdict.message
    assert verdict.retry_after_s == MAX_RETRY_AFTER_S


def test_a_deadline_is_refused_when_the_machine_has_no_time_left_for_it():
    others = [waiting(BATCH, num_prompt=3000, num_output=1000) for _ in range(11)]
    assert isinstance(feasible(waiting(BATCH), others, PACE, 0.0), Feasible)
    others += [waiting(BATCH, num_prompt=3000, num_output=1000) for _ in range(3)]
    verdict = feasible(waiting(BATCH), others, PACE, 0.0)
    assert isinstance(verdict, Infeasible)
    # 14 times 4 s of work at nine tenths of nine tenths of the machine's time.
    assert verdict.retry_after_s == pytest.approx(14 * 4 / 0.81 - 60, rel=0.1)


def test_a_promise_already_made_is_not_broken_for_a_new_one():
    near = waiting(BATCH, num_prompt=800, arrived_at=-59.0)
    late = feasible(waiting(Targets(ttft_s=0.9), num_prompt=300), [near], PACE, 0.0)
    assert isinstance(late, Infeasible)
    far = waiting(BATCH, num_prompt=800)
    assert isinstance(feasible(waiting(Targets(ttft_s=0.9), 300), [far], PACE, 0.0), Feasible)


def test_one_that_is_late_already_does_not_make_everything_infeasible():
    late = waiting(CHAT, num_prompt=100, num_output=2, arrived_at=-50.0)
    assert isinstance(feasible(waiting(CHAT), [late], PACE, 0.0), Feasible)


def test_time_that_tighter_requests_are_about_to_ask_for_is_not_promised():
    job = waiting(Targets(deadline_s=10.0), num_prompt=4000, num_output=1000)
    assert isinstance(feasible(job, (), PACE, 0.0), Feasible)
    verdict = feasible(job, (), PACE, 0.0, Ahead(reserved=0.5))
    assert isinstance(verdict, Infeasible)
    assert verdict.retry_after_s == pytest.approx(5 / 0.31 - 10, rel=0.01)


def test_what_other_tenants_are_owed_comes_first():
    assert isinstance(feasible(waiting(CHAT), (), PACE, 0.0, Ahead(owed_s=0.5)), Feasible)
    assert isinstance(feasible(waiting(CHAT), (), PACE, 0.0, Ahead(owed_s=0.9)), Infeasible)


def test_requests_without_promises_are_always_feasible():
    others = [waiting(BATCH, num_prompt=3000, num_output=1000) for _ in range(50)]
    assert isinstance(feasible(waiting(NO_TARGETS), others, PACE, 0.0), Feasible)
