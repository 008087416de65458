"""A slice of the isolation scenarios; `scripts/test-slow` runs hundreds."""

from __future__ import annotations

import pytest

from tests.properties.isolation import draw_scenario, judge_scenario


@pytest.mark.parametrize("seed", range(25))
def test_a_hostile_tenant_costs_the_others_no_more_than_its_share(seed: int):
    verdict = judge_scenario(draw_scenario(seed))
    assert verdict.worst_ratio <= 1.0
    assert verdict.wrongly_refused == 0


@pytest.mark.skip(reason="a backlog behind a KV quota idles the engine until the queue unlists it")
@pytest.mark.parametrize("seed", range(1000, 1005))
def test_a_backlog_behind_a_kv_quota_costs_the_others_nothing(seed: int):
    verdict = judge_scenario(draw_scenario(seed, has_kv_quota=True))
    assert verdict.worst_ratio <= 1.0
    assert verdict.wrongly_refused == 0
