"""A slice of the isolation scenarios; `scripts/test-slow` runs hundreds."""

from __future__ import annotations

import pytest

from headway.core.request import Request
from headway.core.waiting.accounts import Accounts
from headway.core.waiting.fair import FairQueue
from tests.properties.isolation import draw_scenario, judge_scenario


@pytest.mark.parametrize("seed", range(15))
def test_a_hostile_tenant_costs_the_others_no_more_than_its_share(seed: int):
    verdict = judge_scenario(draw_scenario(seed))
    assert verdict.worst_ratio <= 1.0
    assert verdict.wrongly_refused == 0


def test_the_scenarios_find_a_scheduler_without_a_step_floor(monkeypatch: pytest.MonkeyPatch):
    scenario = draw_scenario(4, "tpot")
    assert judge_scenario(scenario).worst_ratio <= 1.0
    monkeypatch.setattr("headway.core.slo.pacer.step_floor_s", lambda *_: 0.0)
    monkeypatch.setattr("headway.core.slo.feasibility.step_floor_s", lambda *_: 0.0)
    monkeypatch.setattr(Accounts, "charge_lost", lambda *_: None)
    assert judge_scenario(scenario).worst_ratio > 1.0


def test_the_scenarios_find_a_prefill_order_by_latest_start_alone(monkeypatch: pytest.MonkeyPatch):
    def order_prefill(_queue: FairQueue, prefilling: list[Request], _: float) -> list[Request]:
        return sorted(prefilling, key=lambda request: request.start_by)

    def goes_before(_queue: FairQueue, request: Request, other: Request, _: float) -> bool:
        return request.start_by < other.start_by

    monkeypatch.setattr(FairQueue, "order_prefill", order_prefill)
    monkeypatch.setattr(FairQueue, "goes_before", goes_before)
    seeds = [7, 12]  # of ordinary hostile tenants: spot requests stay out of these steps
    assert all(judge_scenario(draw_scenario(seed)).worst_ratio > 1.0 for seed in seeds)
