"""How many engines the work needs: the formula, the measured rate, and the steps down."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.params import SamplingParams
from headway.core.request import Request
from headway.core.slo.steptime import StepCost
from headway.core.terms import Targets, Terms
from headway.routing import EngineLimits, Router
from headway.routing.autoscale import (
    DOWN_AFTER_S,
    Autoscaler,
    FleetDemand,
    PoolNeed,
    WorkRate,
    share_engines,
    total_need,
)

LIMITS = EngineLimits(num_blocks=1000, block_size=16, max_num_seqs=8)
COST = StepCost(0.001, 0.002, 0.0005, 0.0, 0.0, 0.01, 100)


def test_the_need_is_arriving_work_with_headroom_and_the_backlog_within_its_target() -> None:
    demand = FleetDemand(work_rate=2.0, backlog_s=6.0, ttft_s=2.0, speed=0.9)
    assert demand.need == pytest.approx((1.2 * 2.0 + 6.0 / 2.0) / 0.9)
    assert FleetDemand().need == 0.0


def test_the_needs_of_several_routers_add_up_before_they_are_rounded() -> None:
    thirds = [FleetDemand(work_rate=0.25)] * 3
    assert total_need(thirds) == pytest.approx(0.9)
    assert sum(ceil(one.need) for one in thirds) == 3
    assert total_need([]) == 0.0


def test_the_tightest_target_counts_only_if_its_router_has_a_backlog() -> None:
    idle = FleetDemand(work_rate=0.1, ttft_s=0.2)
    busy = FleetDemand(backlog_s=10.0, ttft_s=5.0)
    assert total_need([idle, busy]) == pytest.approx(1.2 * 0.1 + 10.0 / 5.0)


def test_the_rate_is_a_mean_over_a_minute() -> None:
    rate = WorkRate()
    assert rate.rate(0.0) == 0.0
    for second in range(120):
        rate.add(0.5, float(second))
    assert rate.rate(119.5) == pytest.approx(0.5, rel=0.05)
    assert rate.rate(149.5) == pytest.approx(0.25, rel=0.1)
    assert rate.rate(300.0) == 0.0


def test_a_single_early_request_is_no_rate() -> None:
    rate = WorkRate()
    rate.add(1.0, 100.0)
    assert rate.rate(100.0) == pytest.approx(0.1)


def test_up_at_once_and_down_one_by_one_after_five_minutes_below() -> None:
    scaler = Autoscaler()
    assert scaler.decide(3.2, 1, 1, 8, 0.0) == 4
    assert scaler.decide(2.9, 4, 1, 8, 1.0) == 4, "2.9 of 4 is not below 0.7"
    assert scaler.decide(1.0, 4, 1, 8, 10.0) == 4
    assert scaler.decide(1.0, 4, 1, 8, 10.0 + DOWN_AFTER_S - 1.0) == 4
    assert scaler.decide(1.0, 4, 1, 8, 10.0 + DOWN_AFTER_S) == 3
    assert scaler.decide(1.0, 3, 1, 8, 11.0 + DOWN_AFTER_S) == 3, "each step takes five minutes"
    assert scaler.decide(1.0, 3, 1, 8, 10.0 + 2 * DOWN_AFTER_S) == 2


def test_a_peak_begins_the_five_minutes_anew() -> None:
    scaler = Autoscaler()
    scaler.decide(1.0, 4, 1, 8, 0.0)
    scaler.decide(3.5, 4, 1, 8, 200.0)
    assert scaler.decide(1.0, 4, 1, 8, 310.0) == 4
    assert scaler.decide(1.0, 4, 1, 8, 310.0 + DOWN_AFTER_S) == 3


def test_to_zero_only_without_any_work_and_back_for_the_least() -> None:
    scaler = Autoscaler()
    scaler.decide(0.01, 1, 0, 4, 0.0)
    assert scaler.decide(0.01, 1, 0, 4, 1000.0) == 1
    scaler.decide(0.0, 1, 0, 4, 1001.0)
    assert scaler.decide(0.0, 1, 0, 4, 1001.0 + DOWN_AFTER_S) == 0
    assert scaler.decide(0.0002, 0, 0, 4, 2000.0) == 1


@given(
    st.lists(st.floats(0.0, 50.0), min_size=1, max_size=60),
    st.integers(0, 3),
    st.integers(3, 20),
)
def test_the_number_stays_within_its_bounds_and_falls_by_one_at_most(
    needs: list[float], low: int, high: int
) -> None:
    scaler, current, now = Autoscaler(), low, 0.0
    for need in needs:
        now += 100.0
        before, current = current, scaler.decide(need, current, low, high, now)
        assert low <= current <= high
        assert current >= before - 1
        assert current >= min(ceil(need), high)


def request(name: str, num_tokens: int, now: float, ttft_s: float | None = None) -> Request:
    terms = Terms(targets=Targets(ttft_s=ttft_s))
    params = SamplingParams(max_tokens=10)
    return Request(
        id=name,
        token_ids=[number + 1000 * int(now) for number in range(num_tokens)],
        params=params,
        seed=0,
        arrived_at=now,
        terms=terms,
    )


def test_a_router_measures_the_work_that_arrives_and_waits() -> None:
    router = Router()
    router.engine_joined("a", LIMITS, COST)
    for number in range(60):
        router.arrive(request(f"r{number}", 200, float(number)), float(number))
    demand = router.demand(59.9)
    work_s = COST.prefill_s(200) + 10 * COST.decode_s(200)
    assert demand.work_rate == pytest.approx(work_s, rel=0.1)
    assert demand.backlog_s == pytest.approx(60 * COST.prefill_s(200), rel=0.15)
    assert demand.ttft_s == 5.0


def test_requests_without_any_engine_need_one() -> None:
    router = Router()
    router.arrive(request("a", 50, 0.0), 0.0)
    assert router.demand(0.0).need > 0.0
    router.arrive(request("b", 50, 0.0, ttft_s=0.5), 0.0)
    assert router.demand(0.0).ttft_s == 0.5


def test_a_request_that_moves_is_not_counted_as_new_work() -> None:
    router = Router()
    router.engine_joined("a", LIMITS, COST)
    router.arrive(request("a", 200, 0.0), 0.0, is_resent=True)
    assert router.demand(1.0).work_rate == 0.0


def test_shared_engines_go_where_the_work_is() -> None:
    idle, busy = PoolNeed(0.2, 3, 1, 3), PoolNeed(4.0, 4, 1, 1)
    assert share_engines({"idle": idle, "busy": busy}, 5) == {"idle": 1, "busy": 4}
    assert share_engines({"idle": idle, "busy": busy}, 7) == {"idle": 3, "busy": 4}


def test_a_pool_keeps_its_engines_against_one_that_needs_them_little_more() -> None:
    has, wants = PoolNeed(2.6, 3, 1, 3), PoolNeed(3.0, 3, 1, 2)
    assert share_engines({"wants": wants, "has": has}, 5) == {"wants": 2, "has": 3}
    much = PoolNeed(3.5, 4, 1, 2)
    assert share_engines({"much": much, "has": has}, 5) == {"much": 3, "has": 2}


@given(
    st.lists(
        st.builds(
            PoolNeed,
            st.floats(0, 50),
            st.integers(0, 10),
            st.integers(0, 3),
            st.integers(0, 10),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 40),
)
def test_shares_stay_within_what_is_wanted_and_what_there_is(
    pools: list[PoolNeed], spare: int
) -> None:
    named = {str(number): pool for number, pool in enumerate(pools)}
    least = sum(min(pool.least, pool.wanted) for pool in pools)
    shares = share_engines(named, least + spare)
    assert all(min(p.least, p.wanted) <= shares[n] <= p.wanted for n, p in named.items())
    assert sum(shares.values()) == min(least + spare, sum(pool.wanted for pool in pools))
