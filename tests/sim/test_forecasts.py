"""Simulated frontends ask the forecasts of engines, as the API process does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.sim.deadlines import arrivals
from benchmarks.sim.pace_rig import CAPACITY
from headway.config import SchedulerConfig
from headway.core.events import Finished, Idled, Stepped
from headway.core.executor import Capacity
from headway.core.request import FinishReason, Request
from headway.core.slo.demand import HORIZONS_S
from headway.core.slo.forecast import DemandSample
from headway.core.terms import NO_TARGETS, Targets, Terms
from headway.routing import Router
from headway.sim import SMOLLM2_135M
from headway.sim.direct import DirectRouter
from headway.sim.fleet import EngineSpec, FleetRecord, VirtualFleet
from headway.sim.forecasts import FeasibleEngines
from tests.core.slo.paced import Paced
from tests.routing.support import request

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=256, scheduling_policy="fair")
SPEC = EngineSpec(CONFIG, Capacity(num_blocks=500, block_size=16, max_model_len=2048))
BY_DEADLINE = EngineSpec(
    replace(CONFIG, scheduling_policy="deadline"), SPEC.capacity, enable_prefix_caching=False
)
SOON = Targets(ttft_s=1.0)


def of_two_engines() -> FeasibleEngines:
    """Of two engines the second has minutes of work that is due at once; both have said so."""
    engines = FeasibleEngines(BY_DEADLINE)
    for name in ("idle", "full"):
        engines.engine_joined(name)
    assert engines.arrive(request(targets=SOON, name="first"), 0.0)
    engines.ended("first")
    core = Paced(scheduling_policy="fair")
    core.ask("a", 8, 4, ttft_s=5.0)
    core.step()
    forecast = core.seen(Stepped)[-1].forecast
    assert forecast is not None
    work_ms = [100_000] * len(HORIZONS_S)
    full = replace(forecast, demand=DemandSample(work_ms, work_ms, {}))
    for name, said in (("idle", forecast), ("full", full)):
        engines.observe(name, [Idled(0.0, 0, said)], 0.0)
    return engines


def test_a_request_waits_only_for_engines_that_may_meet_its_targets():
    engines, hurried, patient = of_two_engines(), request(targets=SOON), request()
    assert engines.arrive(hurried, 0.0) and engines.arrive(patient, 0.0)
    assert engines.restricts
    assert engines.may_assign(hurried, "idle") and not engines.may_assign(hurried, "full")
    assert engines.may_assign(patient, "full")
    engines.ended(hurried.id)
    assert not engines.restricts and engines.may_assign(hurried, "full")


def test_a_lost_engine_is_none_to_wait_for():
    engines, hurried = of_two_engines(), request(targets=SOON)
    assert engines.arrive(hurried, 0.0)
    engines.engine_lost("idle")
    assert engines.may_assign(hurried, "full")
    assert not engines.arrive(request(targets=SOON), 0.0), "no other engine is left"
    engines.engine_lost("full")
    assert engines.arrive(request(targets=SOON), 0.0), "it waits for an engine"


def test_a_draining_engine_is_none_to_wait_for():
    engines, waiting = of_two_engines(), request(targets=SOON)
    assert engines.arrive(waiting, 0.0) and not engines.may_assign(waiting, "full")
    engines.engine_draining("idle")
    assert engines.may_assign(waiting, "full"), "or it would wait until the other has left"
    assert not engines.arrive(request(targets=SOON), 0.0)


def test_requests_that_were_sent_count_until_the_engine_says_so():
    engines = of_two_engines()
    engines.engine_lost("full")
    sent: list[Request] = []
    while engines.arrive(one := request(100, targets=SOON), 0.0):
        engines.sent(one, "idle", 0.0)
        sent.append(one)
        assert len(sent) < 20, "a tenth of a second each"
    assert len(sent) > 2
    ended = [Finished(one.id, 0.0, FinishReason.LENGTH, 1) for one in sent]
    engines.observe("idle", ended, 0.0)
    assert engines.arrive(request(100, targets=SOON), 0.0)


def num_refused_of_tiers() -> int:
    """Return how many requests are refused at 1.5 times what one engine can do."""
    config = SchedulerConfig(scheduling_policy="fair")
    fleet = VirtualFleet([DirectRouter()], [SMOLLM2_135M], EngineSpec(config, CAPACITY))
    for one in arrivals(9.0, 25.0, 0):
        token_ids = [100_000 + int(one.id[1:])] * one.num_prompt
        record = FleetRecord(one.id, token_ids, one.num_output, one.terms, one.arrived_at)
        record.max_tokens = one.max_tokens
        fleet.send(record)
    fleet.run(1000.0)
    return sum(one.is_refused for one in fleet.records.values())


def test_an_api_process_refuses_nothing_that_the_engine_would_serve(
    monkeypatch: pytest.MonkeyPatch,
):
    """Targets of 1 and 4 s: by the time left, a request would be looser than those before it."""
    with_early = num_refused_of_tiers()
    monkeypatch.setattr(FeasibleEngines, "arrive", lambda *_: True)
    by_engine = num_refused_of_tiers()
    assert with_early == by_engine > 10


@pytest.mark.parametrize("targets", [NO_TARGETS, Targets(tpot_s=0.1)])
def test_a_slow_engine_gets_no_request_whose_targets_it_cannot_meet(targets: Targets):
    """By its forecast; without targets, it gets requests too."""
    slow = SMOLLM2_135M.scaled(12.0)
    fleet = VirtualFleet([Router(), Router()], [SMOLLM2_135M, slow], SPEC)
    terms = Terms(tenant="a", targets=targets)
    for number in range(300):
        record = FleetRecord(f"r{number}", [number] * 200, 40, terms, 0.1 * number)
        record.frontend = number % 2
        fleet.send(record)
    fleet.run(300.0)
    records = list(fleet.records.values())
    assert all(one.finished_at is not None or one.is_refused for one in records)
    served_slowly = [one for one in records if one.engine == "engine-1" and not one.is_refused]
    if targets == NO_TARGETS:
        assert len(served_slowly) > 10
    else:
        # A few come before the engine has said how slow it is.
        assert len(served_slowly) < 5 and sum(one.is_refused for one in records) < 5
