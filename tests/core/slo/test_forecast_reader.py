"""Early refusals: by a fresh forecast only, and by no reservation of requests that have ended."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headway.core.events import Idled, Stepped
from headway.core.params import SamplingParams
from headway.core.slo.admission import TENANTS_PER_STEP
from headway.core.slo.demand import GRID
from headway.core.slo.forecast import Forecast
from headway.core.slo.forecast_reader import ForecastReader
from headway.core.terms import Targets, Terms
from headway.engine.process.messages import AddRequest, EngineInfo
from headway.errors import DeadlineError
from tests.core.slo.paced import CAPACITY, Paced

NUM_TENANTS = 3 * TENANTS_PER_STEP
INFO = EngineInfo(CAPACITY, 64, 100, scheduling_policy="fair", has_prefix_cache=False)


def command_of(name: str, tenant: str, num_prompt: int = 8, **targets: float) -> AddRequest:
    terms = Terms(tenant=tenant, targets=Targets(**targets))
    return AddRequest(name, [1] * num_prompt, SamplingParams(max_tokens=4), 0, 0.0, terms=terms)


def is_refused(reader: ForecastReader, command: AddRequest, now: float) -> bool:
    """Whether a request is refused; if it is not, it is sent."""
    try:
        reader.check(command, INFO, now)
    except DeadlineError:
        return True
    reader.add(command, INFO, now)
    return False


def busy_engine() -> Paced:
    """An engine in which every tenant has a small share, and a TPOT target shortens steps."""
    engine = Paced(scheduling_policy="fair")
    for number in range(NUM_TENANTS):
        engine.ask(f"r{number}", 8, 12, tenant=f"t{number}", tpot_s=0.2)
    engine.steps(4)
    return engine


def last_forecast(engine: Paced) -> Forecast:
    events = [one for one in engine.events if isinstance(one, Stepped | Idled)]
    assert events[-1].forecast is not None
    return events[-1].forecast


def refused_tenants(reader: ForecastReader, now: float) -> list[str]:
    names = [f"t{number}" for number in range(NUM_TENANTS)]
    return [one for one in names if is_refused(reader, command_of(one, one, tpot_s=0.03), now)]


@pytest.mark.parametrize("is_aborted", [False, True])
def test_an_engine_whose_last_request_ended_refuses_no_tenant(is_aborted: bool):
    engine, reader = busy_engine(), ForecastReader()
    reader.observe(engine.events, engine.clock.now())
    assert len(refused_tenants(reader, engine.clock.now())) == NUM_TENANTS
    engine.events.clear()
    if is_aborted:
        for name in list(engine.scheduler.requests):
            engine.abort(name)
    engine.run()
    reader.observe(engine.events, engine.clock.now())
    assert refused_tenants(reader, engine.clock.now() + 1.0) == []
    forecast = last_forecast(engine)
    assert (forecast.tenants, forecast.demand.due_ms, forecast.active_weight) == ({}, [], 0.0)
    assert forecast.speed.step_s == forecast.speed.full_step_s
    # Nor does what was known of the tenants come back with the next step.
    engine.add("other", 8, max_tokens=4)
    engine.step()
    assert last_forecast(engine).tenants == {}


def test_a_step_after_an_abort_in_the_same_report_counts():
    engine, reader = busy_engine(), ForecastReader()
    for name in list(engine.scheduler.requests):
        engine.abort(name)
    for number in range(NUM_TENANTS):
        engine.ask(f"s{number}", 8, 12, tenant=f"t{number}", tpot_s=0.2)
    engine.steps(3)
    reader.observe(engine.events, engine.clock.now())
    assert len(refused_tenants(reader, engine.clock.now())) == NUM_TENANTS


def test_a_forecast_of_an_engine_that_may_be_hung_refuses_nothing():
    reader = ForecastReader(max_age_s=10.0)
    reader.observe(busy_engine().events, 100.0)
    hopeless = command_of("x", "t0", num_prompt=9000, ttft_s=1.0)
    assert is_refused(reader, hopeless, 105.0)
    assert not is_refused(reader, hopeless, 111.0)
    assert refused_tenants(reader, 111.0) == []


def test_the_forecast_of_a_tenant_that_is_too_old_is_not_used():
    reader, engine = ForecastReader(max_age_s=10.0), busy_engine()
    stepped = engine.seen(Stepped)[-1]
    forecast = last_forecast(engine)
    tenants = {
        name: one._replace(made_at=forecast.made_at - (11.0 if name == "t1" else 9.0))
        for name, one in forecast.tenants.items()
    }
    forecast = replace(forecast, tenants=tenants, active_weight=1.0)
    reader.observe([replace(stepped, forecast=forecast)], 0.0)
    assert is_refused(reader, command_of("a", "t0", tpot_s=0.03), 0.0)
    assert not is_refused(reader, command_of("b", "t1", tpot_s=0.03), 0.0)


def test_the_work_for_an_arrival_does_not_grow_with_the_requests_sent():
    reader, draw = ForecastReader(), random.Random(3)
    reader.observe(busy_engine().events, 0.0)
    for number in range(2000):
        deadline_s = draw.uniform(40_000.0, 60_000.0)
        command = command_of(f"r{number}", f"t{number % 2}", num_prompt=1, deadline_s=deadline_s)
        assert not is_refused(reader, command, 0.001 * number)
    reader._sent.check()
    assert reader._forecast is not None
    for table in (reader._sent._table, *reader._sent._tables.values()):
        assert len(table.due(reader._forecast.speed.cost).times) < GRID
    for number in range(2000):
        reader.remove(f"r{number}")
    reader._sent.check()


def test_the_requests_sent_count_until_they_are_removed():
    reader = ForecastReader()
    reader.observe(busy_engine().events, 0.0)

    def num_accepted(now: float) -> int:
        commands = [command_of(f"r{number}", "new", 100, deadline_s=2.0) for number in range(50)]
        return sum(not is_refused(reader, command, now) for command in commands)

    num_first = num_accepted(0.0)
    assert 5 < num_first < 25
    assert is_refused(reader, command_of("x", "new", 100, deadline_s=2.0), 0.0)
    for number in range(num_first):
        reader.remove(f"r{number}")
    reader._sent.check()
    assert num_accepted(0.0) == num_first
