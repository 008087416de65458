"""What one tenant asks for costs the others no more than its share, one case at a time.

Random scenarios are in tests/properties/isolation.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headway.core.events import Finished, PromptScored, Refused, Stepped, TokensEmitted
from headway.core.slo.admission import TENANTS_PER_STEP
from headway.core.slo.demand import DemandTable, RunningWork
from headway.core.slo.steptime import shape_of
from headway.core.terms import NO_TARGETS, Targets, Terms
from tests.core.slo.paced import COST, Paced
from tests.support.harness import make_request


@pytest.mark.parametrize("policy", ["fair", "deadline"])
def test_refused_requests_cost_other_tenants_nothing(policy: str):
    engine = Paced(scheduling_policy=policy)

    def ask(name: str, tenant: str, max_tokens: int, deadline_s: float) -> None:
        terms = Terms(tenant=tenant, targets=Targets(deadline_s=deadline_s))
        now = engine.clock.now()
        engine.core.add(make_request(name, 100, max_tokens, terms=terms, arrived_at=now))

    for number in range(50):
        ask(f"a{number}", "attacker", 3000, 0.3)
        engine.advance(0.2)
    assert len(engine.seen(Refused)) == 50
    ask("victim", "victim", 200, 60.0)
    assert engine.refusal("victim") is None


def test_a_tenant_that_reserved_the_machine_loses_what_is_beyond_its_share():
    engine = Paced(scheduling_policy="fair", max_num_seqs=8)
    for number in range(40):
        engine.ask(f"a{number}", 900, 10, tenant="a", deadline_s=30.0)
    assert engine.refusal("a39") is not None, "there is no room left"
    engine.steps(4)
    for number in range(8):
        engine.ask(f"b{number}", 400, 5, tenant="b", deadline_s=10.0)
    refused = [number for number in range(8) if engine.refusal(f"b{number}")]
    assert len(refused) <= 1, "3.3 s of work in half of 10 s"
    engine.run()
    for number in set(range(8)) - set(refused):
        finished = engine.finish(f"b{number}")
        assert finished.at <= 10.0 + 3.0


class Neighbours:
    """Tenant b keeps the engine full; tenant a comes with one request."""

    def __init__(self, policy: str = "fair", weight: float = 1.0) -> None:
        self.engine = Paced(scheduling_policy=policy, max_num_seqs=24)
        self.weight = weight
        self._num_added = 0

    def b_tokens_per_s(self, num_steps: int) -> float:
        engine, began_at = self.engine, self.engine.clock.now()
        engine.events.clear()
        for _ in range(num_steps):
            while len(engine.scheduler.requests) < 36:
                self._num_added += 1
                terms = Terms(tenant="b", weight=self.weight)
                name, at = f"b{self._num_added}", engine.clock.now()
                engine.core.add(make_request(name, 16, 60, terms=terms, arrived_at=at))
            plan = engine.core.begin_step()
            if plan is not None:
                engine.advance(COST.predict(shape_of(plan)))
                engine.core.end_step()
        found = [one for one in engine.seen(TokensEmitted) if one.request_id.startswith("b")]
        return sum(len(one.token_ids) for one in found) / (engine.clock.now() - began_at)


@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize("tpot_ms", [0.001, 25.0, 40.0])
def test_a_tpot_target_leaves_other_tenants_their_share(tpot_ms: float, weight: float):
    both = Neighbours(weight=weight)
    alone = both.b_tokens_per_s(150)
    both.engine.ask("a", 8, 2000, tenant="a", tpot_s=tpot_ms / 1000)
    both.b_tokens_per_s(50)
    share = weight / (1.0 + weight)
    assert both.b_tokens_per_s(150) >= 0.95 * share * alone


def test_a_tpot_target_below_the_floor_of_its_tenant_is_refused_with_the_numbers():
    both = Neighbours()
    both.b_tokens_per_s(50)
    both.engine.ask("a", 8, 2000, tenant="a", tpot_s=0.012)
    refused = both.engine.refusal("a")
    assert refused is not None
    assert "with a share of 50% of the machine; tpot_ms is 12" in refused.message


def test_a_tpot_target_that_was_feasible_alone_yields_when_another_tenant_comes():
    both = Neighbours()
    both.engine.ask("a", 8, 2000, tenant="a", tpot_s=0.013)
    both.engine.steps(5)
    assert both.engine.refusal("a") is None
    assert both.engine.scheduler.pacer.limits.step_s == pytest.approx(0.9 * 0.013)
    both.b_tokens_per_s(100)
    assert (both.engine.scheduler.pacer.limits.step_s or 0.0) > 0.016


@pytest.mark.parametrize("tpot_ms", [25.0, 30.0, 40.0])
def test_the_capacity_that_short_steps_lose_is_charged_to_who_asked_for_them(tpot_ms: float):
    per_s: dict[bool, tuple[float, float]] = {}
    for has_target in (False, True):
        both = Neighbours()
        both.b_tokens_per_s(100)
        targets = Targets(tpot_s=tpot_ms / 1000) if has_target else NO_TARGETS
        request = make_request("a", 8, 2000, terms=Terms("a", targets=targets))
        both.engine.core.add(request)
        both.b_tokens_per_s(50)
        accounts, began_at = both.engine.scheduler.accounts, both.engine.clock.now()
        own, other = accounts.of(request), accounts.get("b")
        assert other is not None
        before, served = own.counter - own.served, own.served + other.served
        both.b_tokens_per_s(200)
        elapsed_s = both.engine.clock.now() - began_at
        charged_per_s = (own.counter - own.served - before) / elapsed_s
        per_s[has_target] = (own.served + other.served - served) / elapsed_s, charged_per_s
    lost_per_s = per_s[False][0] - per_s[True][0]
    assert per_s[False][1] == 0.0
    assert 0.9 * lost_per_s < per_s[True][1] < 2.0 * lost_per_s


@pytest.mark.parametrize("tpot_s", [0.1, 1.0])
def test_nothing_is_charged_for_steps_that_the_target_does_not_cut(tpot_s: float):
    engine = Paced(scheduling_policy="fair", max_num_seqs=24)
    engine.ask("a", 8, 2000, tenant="a", tpot_s=tpot_s)
    engine.add("b", 8, max_tokens=2000, terms=Terms("b"))
    # Tenant c is at its KV quota: its second request waits, and no step could admit it.
    for name in ("c0", "c1"):
        engine.add(name, 40, max_tokens=100, terms=Terms("c", max_kv_share=0.04))
    engine.steps(80)
    assert engine.waiting == {"c1"}
    account = engine.scheduler.accounts.of(engine.scheduler.requests["a"])
    assert account.counter == pytest.approx(account.served)


def test_nothing_is_charged_while_kv_blocks_keep_requests_waiting():
    engine = Paced(scheduling_policy="fair", max_num_seqs=24)
    engine.ask("a", 8, 2000, tenant="a", tpot_s=0.5)
    for number in range(4):
        engine.add(f"b{number}", 1200, max_tokens=400, terms=Terms("b"))
    engine.until(lambda: len(engine.seen(TokensEmitted, "b2")) > 0)
    account = engine.scheduler.accounts.of(engine.scheduler.requests["a"])
    before = account.counter - account.served
    engine.steps(40)
    assert engine.waiting == {"b3"}
    assert account.counter - account.served == pytest.approx(before)


def test_nothing_is_charged_where_there_is_nobody_else():
    engine = Paced(scheduling_policy="fair")
    engine.ask("a", 8, 2000, tenant="a", tpot_s=0.013)
    engine.add("long", 5000, max_tokens=2, terms=Terms(tenant="a"))
    engine.steps(20)
    account = engine.scheduler.accounts.of(engine.scheduler.requests["a"])
    assert account.counter == pytest.approx(account.served)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_targets_shape_no_steps_under_policies_that_are_not_slo_aware(policy: str):
    both = Neighbours(policy)
    both.b_tokens_per_s(50)
    targets = Targets(ttft_s=0.001, tpot_s=1e-6, deadline_s=0.001)
    both.engine.add("a", 8, max_tokens=500, terms=Terms(tenant="a", targets=targets))
    both.b_tokens_per_s(100)
    limits = both.engine.scheduler.pacer.limits
    assert (limits.max_num_seqs, limits.prefill_cap, limits.step_s) == (24, 512, None)
    assert both.engine.refusal("a") is None


def test_the_forecast_carries_the_demand_as_durations():
    engine = Paced(scheduling_policy="fair", max_num_seqs=2)
    engine.advance(1000.0)
    for number in range(6):
        engine.ask(f"a{number}", 100, 10, tenant="a", deadline_s=20.0)
    engine.step()
    forecast = engine.seen(Stepped)[-1].forecast
    assert forecast is not None
    due = forecast.demand.demand().due
    assert due == forecast.tenants["a"].demand.demand().due
    assert due.until(10.0) == 0.0
    assert due.until(25.0) == due.total == pytest.approx(6 * 0.11, rel=0.4)
    assert forecast.active_weight == 1.0


def test_a_step_makes_the_forecast_of_a_few_tenants_and_keeps_the_others():
    engine = Paced(scheduling_policy="fair", max_num_seqs=2)
    num_tenants = 3 * TENANTS_PER_STEP
    for number in range(num_tenants):
        engine.ask(f"r{number}", 20, 10, tenant=f"t{number}", deadline_s=60.0)
    for num_steps in range(1, 6):
        engine.step()
        forecast = engine.seen(Stepped)[-1].forecast
        assert forecast is not None
        assert len(forecast.tenants) == min(num_tenants, num_steps * TENANTS_PER_STEP)
        new = [one for one in forecast.tenants.values() if one.made_at == forecast.made_at]
        assert len(new) == TENANTS_PER_STEP
    ages_s = [forecast.made_at - one.made_at for one in forecast.tenants.values()]
    oldest_s = max(ages_s)
    assert oldest_s > 0.0
    oldest = next(
        one for one in forecast.tenants.values() if forecast.made_at - one.made_at == oldest_s
    )
    assert oldest.demand.demand(oldest_s).due.times[0] == pytest.approx(
        oldest.demand.demand().due.times[0] - oldest_s
    )


def test_a_step_updates_the_tables_of_tenants_with_running_requests_only(
    monkeypatch: pytest.MonkeyPatch,
):
    engine = Paced(scheduling_policy="fair", max_num_seqs=2)
    for number in range(50):
        engine.ask(f"r{number}", 20, 10, tenant=f"t{number}", deadline_s=600.0)
    engine.steps(2)
    num_updates, set_running = 0, DemandTable.set_running

    def count(table: DemandTable, running: RunningWork) -> None:
        nonlocal num_updates
        num_updates += 1
        set_running(table, running)

    monkeypatch.setattr(DemandTable, "set_running", count)
    engine.steps(4)
    assert 0 < num_updates <= 4 * 3, "those of two running requests, and that of all"
    engine.run()
    engine.advance(1.0)
    engine.ask("last", 20, 2, tenant="t", deadline_s=600.0)
    assert set(engine.scheduler.pacer.open_requests.tables) == {"t"}


# ---------------------------------------------------------------- running prefills


def steps_until(engine: Paced, name: str, flood: Callable[[int], None]) -> int:
    """Return the steps until a request has its first token, with a flood before each."""
    for number in range(200):
        flood(number)
        engine.step()
        if engine.seen(TokensEmitted, name):
            return number
    return 200


def flood_with_targets(engine: Paced, is_spot: bool = False) -> Callable[[int], None]:
    """Return a flood of tenant a: a prompt of two chunks per step, due long from now."""
    terms = Terms("a", is_spot=is_spot, targets=Targets(ttft_s=300.0))

    def add(number: int) -> None:
        at = engine.clock.now()
        engine.core.add(make_request(f"a{number}", 100, 2, terms=terms, arrived_at=at))

    return add


def test_an_slo_flood_goes_before_a_running_prefill_by_its_lead_only(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("headway.core.waiting.fair.URGENT_LEAD", 400.0)
    engine = Paced(scheduling_policy="fair", max_num_batched_tokens=50)
    engine.add("b", 150, max_tokens=2, terms=Terms("b", targets=NO_TARGETS))
    engine.step()
    # Alone three steps; a lead of 400 over a counter of 150, and a prompt, come to 13 more.
    assert steps_until(engine, "b", flood_with_targets(engine)) in range(8, 18)


def test_spot_requests_with_targets_do_not_delay_an_ordinary_prefill():
    engine = Paced(scheduling_policy="fair", max_num_batched_tokens=50)
    engine.add("b", 150, max_tokens=2, terms=Terms("b"))
    engine.step()
    assert steps_until(engine, "b", flood_with_targets(engine, is_spot=True)) == 1


def test_running_prefills_go_by_the_service_of_their_tenants():
    engine = Paced(scheduling_policy="fair", max_num_batched_tokens=50)
    engine.add("s", 4, max_tokens=500, terms=Terms("s", is_spot=True))
    engine.step()
    # Beside a spot request all ordinary requests are admitted at once, whatever the budget.
    for number in range(20):
        engine.add(f"a{number}", 100, max_tokens=2, terms=Terms("a"))
    engine.step()
    engine.add("b", 150, max_tokens=2, terms=Terms("b"))
    assert steps_until(engine, "b", lambda number: None) <= 4


@pytest.mark.parametrize("policy", ["deadline", "priority"])
def test_a_running_prefill_goes_first_after_max_wait_s(policy: str):
    engine = Paced(scheduling_policy=policy, max_num_batched_tokens=50, max_wait_s=2.0)
    engine.add("b", 150, max_tokens=2, priority=5, terms=Terms("b"))
    engine.step()
    steps_until(engine, "b", flood_with_targets(engine))
    first = engine.seen(TokensEmitted, "b")
    assert first and 2.0 < engine.clock.now() < 2.5


def test_no_decode_is_deferred_for_the_prompt_of_a_spot_request():
    engine = Paced(scheduling_policy="fair", max_num_batched_tokens=50)
    engine.ask("b", 8, 100, tenant="b", tpot_s=0.5)
    engine.step()
    pacer, now = engine.scheduler.pacer, engine.clock.now()
    needed_s = {}
    for is_spot in (False, True):
        terms = Terms("a", is_spot=is_spot, targets=Targets(ttft_s=20.0))
        request = make_request("a", 400, 2, terms=terms, arrived_at=now)
        needed_s[is_spot] = pacer._urgent_prefill_s([request], 0, 0.1, now)
    floor_s = COST.prefill_s(engine.scheduler.config.prefill_floor)
    assert needed_s[False] > needed_s[True] == pytest.approx(floor_s, rel=0.1)


@pytest.mark.parametrize("policy", ["fair", "deadline"])
def test_scored_prompts_do_not_slow_a_neighbour_down(policy: str):
    """A flood of prompts to score; a decode beside them keeps its TPOT target."""
    engine = Paced(scheduling_policy=policy)
    engine.ask("victim", 4, 200, tenant="victim", tpot_s=0.05)
    engine.steps(3)
    for number in range(20):
        terms = Terms(tenant="attacker")
        engine.add(f"a{number}", 400, max_tokens=1, prompt_logprobs=20, terms=terms)
    began_at, num_before = engine.clock.now(), len(engine.output("victim"))
    while not engine.seen(Finished, "victim"):
        engine.step()
    tpot_s = (engine.clock.now() - began_at) / (200 - num_before)
    assert tpot_s <= 0.05
    assert engine.seen(PromptScored), "nothing was scored meanwhile"
