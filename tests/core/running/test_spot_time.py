"""Spot requests beside ordinary ones: out of their steps, but for a small share of the time."""

from __future__ import annotations

import random

from headway.config import SchedulerConfig
from headway.core.causes import WaitCause
from headway.core.executor import Capacity
from headway.core.params import SamplingParams
from headway.core.plan import StepPlan
from headway.core.request import Request
from headway.core.running.spot_time import MAX_SAVED_STEPS, SPOT_SHARE, SpotTime
from headway.core.slo.steptime import StepCost, StepShape
from headway.core.terms import Terms
from headway.sim import SMOLLM2_135M, CannedExecutor, TimedExecutor, VirtualEngine
from tests.support.harness import Harness

SPOT = Terms("s", is_spot=True)
COST = StepCost(0.01, 0.001, 0.001, 0.0, 0.0)


def test_saved_time_pays_for_tokens_and_is_bounded():
    saved = SpotTime()
    assert saved.num_tokens(COST) == 0
    for _ in range(10 * MAX_SAVED_STEPS):
        saved.earn(0.5, num_ordinary=3)
    assert saved.num_tokens(COST) == int(MAX_SAVED_STEPS * SPOT_SHARE * 0.5 / 0.001)
    saved.spend(StepShape(1, 400), COST)
    assert saved.num_tokens(COST) == 0, "more was spent than was saved"


def test_steps_without_ordinary_requests_earn_nothing():
    saved = SpotTime()
    saved.earn(1.0, num_ordinary=0)
    assert saved.num_tokens(COST) == 0


def test_spot_requests_have_all_of_a_step_without_ordinary_ones():
    engine = Harness()
    for name in ("s1", "s2", "s3"):
        engine.add(name, 4, max_tokens=4, terms=SPOT)
    assert set(engine.step()) == {"s1", "s2", "s3"}
    assert set(engine.step()) == {"s1", "s2", "s3"}
    engine.run()


def test_an_ordinary_request_that_arrives_has_most_of_its_steps_to_itself():
    engine = Harness()
    engine.add("spot", 4, max_tokens=20, terms=SPOT)
    engine.steps(3)
    engine.add("ordinary", 4, max_tokens=5)
    assert set(engine.step()) == {"ordinary"}
    num_beside = sum("spot" in engine.step() for _ in range(4))
    assert num_beside <= 2
    assert set(engine.step()) == {"spot"}
    engine.run()


def test_a_waiting_spot_request_waits_for_its_tier():
    engine = Harness()
    engine.add("ordinary", 4, max_tokens=5)
    spot = engine.add("spot", 4, max_tokens=2, terms=SPOT)
    engine.step()
    assert engine.scheduler.waiting.cause_of(spot) is WaitCause.TIER_ORDER
    engine.run()


def test_no_spot_request_shares_a_step_with_an_ordinary_prompt():
    engine = Harness(max_num_batched_tokens=8)
    engine.add("spot", 4, max_tokens=40, terms=SPOT)
    engine.add("first", 4, max_tokens=40)
    engine.steps(20)
    engine.add("prompt", 40, max_tokens=2)
    while engine.scheduler.requests["prompt"].num_computed < 40:
        assert "spot" not in engine.step()
    engine.run()


def test_spot_requests_get_their_share_of_the_time_beside_ordinary_ones():
    """An endless load of ordinary requests: spot work is SPOT_SHARE of the time, not less."""
    executor = TimedExecutor(CannedExecutor(Capacity(4000, 16, 4096)), SMOLLM2_135M, seed=1)
    engine = VirtualEngine(SchedulerConfig(), executor, lambda _events: None)
    cost, spot_s, num_mixed = SMOLLM2_135M.cost, 0.0, 0
    draw = random.Random(3)

    def request(name: str, num_prompt: int, num_output: int, terms: Terms) -> Request:
        tokens = [draw.randrange(1000) for _ in range(num_prompt)]
        params = SamplingParams(max_tokens=num_output)
        return Request(
            id=name, token_ids=tokens, params=params, seed=0, arrived_at=0.0, terms=terms
        )

    def count_spot(plan: StepPlan) -> None:
        nonlocal spot_s, num_mixed
        spot = [item for item in plan.scheduled if item.request_id.startswith("s")]
        num_mixed += 0 < len(spot) < len(plan.scheduled)
        for item in spot:
            count = len(item.token_ids)
            decode_s = cost.decode_s(item.start)
            spot_s += decode_s if count == 1 else cost.prefill_s(count, item.start)

    engine.on_step = count_spot
    engine.send([request(f"o{at}", 64, 2000, Terms("o")) for at in range(8)])
    engine.send([request(f"s{at}", 64, 400, SPOT) for at in range(8)])
    engine.run(20.0, drain=False)
    assert num_mixed > 20
    assert 0.6 * SPOT_SHARE < spot_s / 20.0 < 1.5 * SPOT_SHARE
