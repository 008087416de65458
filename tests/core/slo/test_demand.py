"""The demand tables: rounding, exact sums, and what they cost with many open requests."""

from __future__ import annotations

import random
import time
from math import inf

import pytest

from headway.core.request import Request
from headway.core.slo.demand import (
    GRID,
    DemandEntry,
    DemandTable,
    OutputLengths,
    Points,
    RunningWork,
    TighterLoad,
    points_of_sample,
    round_down,
)
from headway.core.slo.steptime import StepCost, StepShape
from headway.core.terms import Targets, Terms
from tests.core.slo.paced import Paced, crowded
from tests.support.harness import make_request

COST = StepCost(num_steps=100)


@pytest.mark.parametrize("horizon_s", [0.1, 0.5, 1.0, 3.0, 60.0, 5000.0])
def test_a_time_is_rounded_down_by_at_most_a_part_of_its_horizon(horizon_s: float):
    for now in (0.0, 17.3, 1e6):
        rounded = round_down(now + horizon_s, now)
        assert now + horizon_s * (1 - 1.01 / GRID) <= rounded <= now + horizon_s


def test_times_that_have_passed_share_one_entry():
    assert round_down(4.0, 5.0) == round_down(5.0, 5.0) == -inf


def test_many_requests_share_few_entries():
    table, now = DemandTable(), 100.0
    draw = random.Random(1)
    for _ in range(5000):
        at = round_down(now + draw.uniform(0.5, 120.0), now)
        table.add(DemandEntry(((at, StepShape(10, 20)),), at, StepShape(0, 20), 40.0))
    assert len(table.due(COST).times) < 300


def test_a_table_is_the_sum_of_what_was_added_and_not_removed():
    draw, table, entries = random.Random(2), DemandTable(), list[DemandEntry]()
    for _ in range(2000):
        if entries and draw.random() < 0.5:
            table.remove(entries.pop(draw.randrange(len(entries))))
        else:
            at = float(draw.randrange(20))
            shape = StepShape(draw.randrange(50), draw.randrange(50), draw.randrange(999))
            entries.append(DemandEntry(((at, shape),), at - 1.0, shape, 1.0))
            table.add(entries[-1])
        if draw.random() < 0.2:
            table.due(COST)
        table.check(entries)
        seconds = sum(COST.work_s(shape) for one in entries for _, shape in one.demands)
        assert table.due(COST).total == pytest.approx(seconds)
        assert list(table.due(COST).times) == sorted(table.due(COST).times)
    table.set_running(running := RunningWork())
    running.due.append((3.5, 7.0))
    table.set_running(running)
    assert table.due(COST).until(3.5) - table.due(COST).until(3.4) == pytest.approx(7.0)


def test_an_entry_without_work_leaves_the_others_alone():
    table = DemandTable()
    some, none = (
        DemandEntry(((3.0, work),), 3.0, work, 0.0) for work in (StepShape(2), StepShape())
    )
    for entry in (some, none):
        table.add(entry)
    for entry in (some, none):
        table.remove(entry)
    table.check([])


def test_a_sample_has_the_work_due_within_each_horizon():
    table = DemandTable()
    for at in (1.0, 2.0, 5.0):
        table.add(DemandEntry(((at, StepShape(0, 4000)),), at, StepShape(), 0.0))
    sampled = table.due(COST).sampled_ms(1.5)
    points = points_of_sample(sampled)
    assert sampled == [1000, 1000, 2000, 2000, 2000, 2000, 2000, 2000, 3000]
    assert points.until(0.4) == 1.0
    assert points.until(0.6) == 2.0
    assert points.until(3.5) == 2.0, "work counts from the next horizon on"
    assert points.until(4.0) == points.total == 3.0
    assert table.starts(COST).sampled_ms(1.5) == []
    later = points_of_sample(sampled, age_s=0.6)
    assert later.until(0.0) == 0.0, "work that was due since the sample counts as done"
    assert later.until(3.4) == later.total == 1.0
    assert points_of_sample(sampled, age_s=9.0) == points_of_sample([], age_s=9.0) == ([], [])


def test_points_plus_points_have_the_work_of_both():
    table = DemandTable()
    table.add(DemandEntry(((1.0, StepShape(0, 4)), (3.0, StepShape(0, 8))), 0.0, StepShape(), 0.0))
    points = table.due(COST).plus(Points([2.0, 3.0], [0.5, 0.75]))
    assert points.times == [1.0, 2.0, 3.0, 3.0]
    assert points.totals == pytest.approx([1e-3, 0.501, 0.503, 0.753])


def test_output_lengths_are_those_of_the_tenant_and_at_first_of_its_tier():
    lengths = OutputLengths()
    assert lengths.expected_left("a", "gold", 0, 100) == 100
    for _ in range(300):
        lengths.observe("a", "gold", 10, 100)
    assert lengths.expected_left("a", "gold", 0, 100) == 12
    assert lengths.expected_left("b", "gold", 0, 100) == 12
    lengths.observe("b", "gold", 100, 100)
    assert lengths.expected_left("b", "gold", 0, 100) == 100
    assert lengths.expected_left("a", "gold", 0, 100) == 12, "another tenant changes nothing"
    assert lengths.expected_left("a", "gold", 50, 100) == 25, "half-way to the end"


def test_the_rate_of_admitted_work_is_forgotten():
    load = TighterLoad()
    for at in range(100):
        load.add(1, 0.5, float(at))
    assert load.rates(100.0)[1] == pytest.approx(0.5, rel=0.1)
    assert load.rates(200.0)[1] < 0.01


@pytest.mark.timing
def test_an_arrival_costs_the_same_however_many_requests_are_open():
    few, many = crowded(250), crowded(5000)
    terms = Terms(tenant="t0", targets=Targets(deadline_s=50_000.0))
    least_s = {few: inf, many: inf}
    for number in range(30):
        for engine in (few, many):
            scheduler, request = engine.scheduler, request_of(f"x{number}", terms)
            began_at = time.process_time()
            scheduler.slo_admission.add(request, scheduler.running, scheduler.waiting.shares, 0.0)
            least_s[engine] = min(least_s[engine], time.process_time() - began_at)
    assert least_s[many] < 2 * least_s[few], "linear in the open requests, it would be 20"


def request_of(name: str, terms: Terms) -> Request:
    return make_request(name, 8, max_tokens=16, terms=terms)


@pytest.mark.timing
def test_a_forecast_costs_the_same_however_many_tenants_there_are():
    least_s = {8: inf, 64: inf}
    engines = {num_tenants: shared(num_tenants) for num_tenants in least_s}
    for _ in range(20):
        for num_tenants, engine in engines.items():
            engine.step()
            began_at = time.process_time()
            forecast = engine.scheduler.forecast(engine.clock.now())
            least_s[num_tenants] = min(least_s[num_tenants], time.process_time() - began_at)
            if num_tenants == 8:
                assert len(forecast.tenants) <= 8
    assert len(forecast.tenants) == 64
    assert least_s[64] < 2 * least_s[8], "with every tenant made anew, it would be 8"


def shared(num_tenants: int) -> Paced:
    engine, draw = Paced(scheduling_policy="fair"), random.Random(3)
    for number in range(1000):
        targets = Targets(ttft_s=draw.uniform(5.0, 100.0), deadline_s=draw.uniform(40.0, 600.0))
        terms = Terms(tenant=f"t{number % num_tenants}", targets=targets)
        engine.core.add(request_of(f"r{number}", terms))
    return engine
