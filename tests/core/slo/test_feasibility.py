"""Admission control: when tokens are due, who has slack, and which targets can be met."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import pytest

from headway.core.slo.demand import DemandEntry, DemandTable
from headway.core.slo.feasibility import (
    MAX_RETRY_AFTER_S,
    Feasible,
    Infeasible,
    TenantShare,
    expected_ttft_s,
    judge,
    step_floor_s,
)
from headway.core.slo.forecast import NO_DEMAND, Demand, EngineSpeed
from headway.core.slo.steptime import StepCost
from headway.core.slo.targets import RemainingWork, met, remaining_work, slack_s, tightness_of
from headway.core.terms import NO_TARGETS, Targets
from tests.support.harness import make_request

COST = StepCost(0.01, 1e-3, 1e-3, 0.0, 0.0, error=0.0, num_steps=1000)
"""A prefill token and a decode take a millisecond each, a step 10 ms by itself."""
IDLE = EngineSpeed(COST, step_s=0.1, full_step_s=0.5)
BATCH = Targets(deadline_s=60.0)
CHAT = Targets(ttft_s=1.0, tpot_s=0.1)


def waiting(
    targets: Targets, num_prompt: int = 100, num_output: int = 50, arrived_at: float = 0.0
) -> RemainingWork:
    return RemainingWork(arrived_at, targets, num_prompt, 0, num_output, num_prompt)


def decoding(
    targets: Targets, num_output: int, num_left: int, first_token_at: float
) -> RemainingWork:
    return RemainingWork(0.0, targets, 0, num_output, num_left, 100 + num_output, first_token_at)


def demand_of(others: Iterable[RemainingWork], rates: dict[int, float] | None = None) -> Demand:
    table = DemandTable()
    for work in others:
        start_at = work.planned_start_at(COST, IDLE.step_s)
        table.add(DemandEntry(work.demands, start_at, work.prefill, 0.0))
    return Demand(table.due(COST), table.starts(COST), rates or {})


def verdict_on(
    work: RemainingWork,
    others: Iterable[RemainingWork] = (),
    tenant: TenantShare | None = None,
    rates: dict[int, float] | None = None,
) -> Feasible | Infeasible:
    return judge(work, IDLE, demand_of(others, rates), tenant or TenantShare(), 0.0)


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


def test_the_due_times_of_decodes_count_from_the_first_token():
    work = decoding(CHAT, num_output=1, num_left=10, first_token_at=0.2)
    assert work.last_due_at == pytest.approx(0.2 + 10 * 0.1)


def test_a_request_with_a_deadline_starts_early_enough_for_all_its_tokens():
    work = waiting(BATCH, num_prompt=1000, num_output=100)
    assert work.latest_start_at(COST, 0.1) == pytest.approx(60.0 - 1.0 - 10.0)
    assert waiting(NO_TARGETS).latest_start_at(COST, 0.1) == inf


def test_the_slack_of_a_decode_is_the_time_until_its_next_token_is_due():
    ahead = decoding(CHAT, num_output=20, num_left=5, first_token_at=0.5)
    behind = decoding(CHAT, num_output=10, num_left=5, first_token_at=0.5)
    assert slack_s(ahead, 1.5, COST, 0.05) == pytest.approx(0.5 + 2.0 - 1.5 - 0.05)
    assert slack_s(behind, 1.5, COST, 0.05) < 0.0
    assert slack_s(decoding(NO_TARGETS, 10, 5, 0.5), 1.5, COST, 0.05) == inf


def test_the_slack_of_a_deadline_is_what_the_remaining_tokens_leave():
    work = decoding(BATCH, num_output=10, num_left=100, first_token_at=30.0)
    assert slack_s(work, 40.0, COST, 0.1) == pytest.approx(60.0 - 40.0 - 100 * 0.1)


def test_the_remaining_work_of_a_request():
    request = make_request("a", 100, max_tokens=50)
    assert remaining_work(request, 50).num_prefill_left == 100
    request.num_computed = 60
    assert remaining_work(request, 50).num_prefill_left == 40
    request.num_computed = 100
    request.append(7)
    work = remaining_work(request, 49, first_token_at=3.0)
    assert (work.num_prefill_left, work.num_output, work.num_context) == (0, 1, 101)


def test_cached_tokens_are_no_work():
    request = make_request("a", 100, max_tokens=50)
    work = remaining_work(request, 50, num_cached=96)
    assert (work.num_prefill_left, work.num_context) == (4, 100)
    request.num_computed = 50  # what was cached has been taken up, or was gone
    assert remaining_work(request, 50, num_cached=96).num_prefill_left == 50


def test_every_sample_has_its_own_decodes():
    one, eight = (remaining_work(make_request("a", 100, max_tokens=50, n=n), 50) for n in (1, 8))
    assert eight.decodes.num_decodes == 8 * one.decodes.num_decodes
    assert eight.prefill == one.prefill


# ------------------------------------------------------------------------- feasibility


def test_an_empty_engine_takes_what_it_can_do():
    assert isinstance(verdict_on(waiting(CHAT)), Feasible)
    assert isinstance(verdict_on(waiting(CHAT, num_prompt=2000)), Infeasible)


def test_an_idle_engine_begins_at_once():
    expected_s = expected_ttft_s(waiting(CHAT, num_prompt=90), IDLE, NO_DEMAND)
    assert expected_s == pytest.approx(0.01 + 0.1)


def test_a_first_token_is_expected_behind_the_prefills_that_must_start_before_it():
    new = waiting(CHAT, num_prompt=90)
    after = [waiting(BATCH, num_prompt=5000)]
    behind_s = expected_ttft_s(new, IDLE, demand_of(after))
    assert behind_s == pytest.approx(0.05 + 0.1), "half a step, and its own tokens in the rest"
    before = [waiting(CHAT, num_prompt=180, arrived_at=-0.5)]
    both_s = expected_ttft_s(new, IDLE, demand_of([*after, *before]))
    assert both_s - behind_s == pytest.approx(0.2)


def test_decodes_take_their_part_of_every_step():
    busy = EngineSpeed(COST, 0.1, 0.5, decode_s=0.045, busy_s=0.055)
    expected_s = expected_ttft_s(waiting(CHAT, num_prompt=90), busy, NO_DEMAND)
    assert expected_s == pytest.approx(0.05 + 0.2), "45 of 90 ms are left to prefill"


def test_a_tpot_that_no_step_can_have_is_refused_whatever_the_load():
    verdict = verdict_on(waiting(Targets(tpot_s=0.005)))
    assert isinstance(verdict, Infeasible)
    assert verdict.message == (
        "a token takes at least 11 ms here even without other requests; tpot_ms is 5"
    )
    assert verdict.retry_after_s == MAX_RETRY_AFTER_S


def test_a_tpot_below_the_floor_of_the_share_is_refused():
    # c = 10 ms, h = 1 ms, rho0 = 0.98: 11 / (1 - 0.49) is 21.6 ms.
    half = TenantShare(share=0.5, demand=NO_DEMAND)
    verdict = verdict_on(waiting(Targets(tpot_s=0.021)), tenant=half)
    assert isinstance(verdict, Infeasible)
    assert verdict.message == (
        "a token takes at least 22 ms here with a share of 50% of the machine; tpot_ms is 21"
    )
    assert isinstance(verdict_on(waiting(Targets(tpot_s=0.022)), tenant=half), Feasible)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("free_step_s", [0.011, 0.03, 0.5])
def test_the_step_floor_leaves_the_others_their_share(share: float, free_step_s: float):
    own_s = 0.002
    floor_s = step_floor_s(COST, own_s, share, free_step_s)
    others = (floor_s - COST.constant_s - own_s) / floor_s
    assert others == pytest.approx((1 - share) * (1 - COST.constant_s / free_step_s))


def test_a_deadline_is_refused_when_the_machine_has_no_time_left_for_it():
    others = [waiting(BATCH, num_prompt=3000, num_output=1000) for _ in range(11)]
    assert isinstance(verdict_on(waiting(BATCH), others), Feasible)
    others += [waiting(BATCH, num_prompt=3000, num_output=1000) for _ in range(3)]
    verdict = verdict_on(waiting(BATCH), others)
    assert isinstance(verdict, Infeasible)
    # 14 times 4 s of work at nine tenths of nine tenths of the machine's time.
    assert verdict.retry_after_s == pytest.approx(14 * 4 / 0.81 - 60, rel=0.1)


def test_a_target_that_was_admitted_is_not_broken_for_a_new_one():
    near = waiting(BATCH, num_prompt=800, arrived_at=-59.0)
    late = verdict_on(waiting(Targets(ttft_s=0.9), num_prompt=300), [near])
    assert isinstance(late, Infeasible)
    far = waiting(BATCH, num_prompt=800)
    assert isinstance(verdict_on(waiting(Targets(ttft_s=0.9), 300), [far]), Feasible)


def test_a_request_that_is_late_already_does_not_make_everything_infeasible():
    late = waiting(CHAT, num_prompt=100, num_output=2, arrived_at=-50.0)
    assert isinstance(verdict_on(waiting(CHAT), [late]), Feasible)


def test_time_that_tighter_requests_have_been_using_is_reserved():
    work = waiting(Targets(deadline_s=10.0), num_prompt=4000, num_output=1000)
    assert isinstance(verdict_on(work), Feasible)
    assert isinstance(verdict_on(work, rates={5: 0.5}), Feasible), "looser, not tighter"
    verdict = verdict_on(work, rates={-1: 0.3, 1: 0.2})
    assert isinstance(verdict, Infeasible)
    assert verdict.retry_after_s == pytest.approx(5 / 0.31 - 10, rel=0.01)
    verdict = verdict_on(work, rates={-1: 1.0})
    assert isinstance(verdict, Infeasible)
    assert verdict.message == "capacity is reserved for requests with tighter targets"


@pytest.mark.parametrize("age_s", [-0.5, 0.0, 0.5])
def test_a_request_is_no_looser_than_others_with_the_same_targets(age_s: float):
    """However old the forecast is by which the API process judges, or the request."""
    targets = Targets(ttft_s=4.0, deadline_s=10.0)
    assert tightness_of(targets) == 3
    work = waiting(targets, num_prompt=100, num_output=4000, arrived_at=-age_s)
    assert isinstance(verdict_on(work, rates={3: 0.9}), Feasible)
    assert isinstance(verdict_on(work, rates={2: 0.9}), Infeasible)


def test_the_shorter_of_ttft_and_deadline_says_how_tight_targets_are():
    assert tightness_of(Targets(ttft_s=0.9, deadline_s=60.0)) == -1
    assert tightness_of(Targets(deadline_s=1.0, tpot_s=0.1)) == 1
    assert tightness_of(Targets(deadline_s=1e9)) == 16
    assert tightness_of(Targets(tpot_s=0.1)) == -1


def test_service_that_other_tenants_are_owed_comes_first():
    assert isinstance(verdict_on(waiting(CHAT), tenant=TenantShare(owed_s=0.5)), Feasible)
    assert isinstance(verdict_on(waiting(CHAT), tenant=TenantShare(owed_s=0.9)), Infeasible)


def test_requests_without_targets_are_always_feasible():
    others = [waiting(BATCH, num_prompt=3000, num_output=1000) for _ in range(50)]
    assert isinstance(verdict_on(waiting(NO_TARGETS), others), Feasible)


def test_a_tenant_keeps_its_share_of_a_machine_that_others_have_reserved():
    others = [waiting(BATCH, num_prompt=3000, num_output=1000) for _ in range(14)]
    own = [waiting(BATCH, num_prompt=3000, num_output=1000) for _ in range(4)]
    half = TenantShare(0.5, demand_of(own))
    assert verdict_on(waiting(BATCH), [*others, *own], half) == Feasible(is_by_share=True)
    full = TenantShare(0.5, demand_of(own * 2))
    assert isinstance(verdict_on(waiting(BATCH), [*others, *own], full), Infeasible)
    spot = TenantShare(0.0, NO_DEMAND)
    assert isinstance(verdict_on(waiting(BATCH), [*others, *own], spot), Infeasible)


def test_speed_lost_to_the_targets_of_a_tenant_is_taken_from_its_share():
    others = [waiting(BATCH, num_prompt=3000, num_output=1000) for _ in range(14)]
    own = [waiting(BATCH, num_prompt=3000, num_output=1000) for _ in range(4)]
    # 16 s of work in 60 s need a speed of 0.27 of the 0.40 that are left of half the machine.
    for lost_speed, kind in ((0.05, Feasible), (0.2, Infeasible), (0.9, Infeasible)):
        tenant = TenantShare(0.5, demand_of(own), lost_speed=lost_speed)
        assert isinstance(verdict_on(waiting(BATCH), [*others, *own], tenant), kind)
