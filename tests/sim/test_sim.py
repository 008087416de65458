"""The virtual engine: its clock, what arrives when, and what the records say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.config import SchedulerConfig
from headway.core.events import Admitted, Event
from headway.core.executor import Capacity
from headway.core.plan import BlockLoad, BlockSave, StepPlan
from headway.core.slo.steptime import StepCost
from headway.core.terms import NO_TERMS
from headway.executors.fake import FakeExecutor
from headway.sim import (
    SMOLLM2_135M,
    CannedExecutor,
    Record,
    Simulation,
    StepProfile,
    TimedExecutor,
    VirtualEngine,
)
from tests.support.harness import make_request

CAPACITY = Capacity(num_blocks=100, block_size=16, max_model_len=1024)
SECOND = StepProfile(StepCost(1.0, 0.0, 0.0, 0.0, 0.0))
"""Every step takes a second."""


def make_engine(events: list[Event]) -> VirtualEngine:
    executor = TimedExecutor(FakeExecutor(CAPACITY), SECOND)
    return VirtualEngine(SchedulerConfig(), executor, events.extend)


def make_record(name: str, at: float, num_output: int = 3) -> Record:
    return Record(name, at, 8, num_output, 100, NO_TERMS)


def test_the_clock_moves_by_what_each_step_takes():
    engine = make_engine([])
    engine.send([make_request("a", max_tokens=4)])
    engine.run()
    assert engine.clock.now() == 4.0


def test_copies_of_kv_blocks_are_part_of_a_step():
    capacity = replace(CAPACITY, num_slots=4, block_copy_s=0.5)
    executor = TimedExecutor(CannedExecutor(capacity), SECOND)
    plan = StepPlan(0, (), saves=(BlockSave(0, 1),), loads=(BlockLoad(1, 2),))
    result = executor.collect(executor.submit(plan))
    assert (result.elapsed_s, result.copy_s, executor.step_s) == (2.0, 1.0, 2.0)


def test_what_arrives_during_a_step_joins_at_its_end():
    events: list[Event] = []
    engine = make_engine(events)
    engine.send([make_request("a", max_tokens=4), make_request("b", arrived_at=0.5)])
    asked_at: list[float] = []
    engine.may_join = lambda _request: not asked_at.append(engine.clock.now())
    engine.run()
    assert asked_at == [0.0, 0.5]
    admitted = {one.request_id: one.at for one in events if isinstance(one, Admitted)}
    assert admitted == {"a": 0.0, "b": 1.0}


def test_the_engine_sleeps_until_the_next_arrival():
    engine = make_engine([])
    engine.send([make_request("a", max_tokens=1, arrived_at=7.5)])
    engine.run()
    assert engine.clock.now() == 8.5


def test_a_request_is_aborted_at_its_time():
    engine = make_engine([])
    engine.send([make_request("a", max_tokens=50)], aborts=[(3.0, "a")])
    engine.run()
    assert engine.clock.now() == 3.0


def test_records_hold_times_and_refusals():
    simulation = Simulation(SchedulerConfig(), CAPACITY, SECOND)
    simulation.may_join = lambda record: record.id != "refused"
    simulation.send([make_record("a", 0.0), make_record("refused", 0.0), make_record("b", 0.5)])
    simulation.run(until_s=10.0)
    a, refused, b = (simulation.records[name] for name in ("a", "refused", "b"))
    assert (a.ttft_s, a.tpot_s, a.e2e_s) == (1.0, 1.0, 3.0)
    assert (b.ttft_s, b.finished_at) == (1.5, 4.0)
    assert refused.is_refused and refused.finished_at is None
    assert [step.num_running for step in simulation.steps] == [1, 2, 2, 1]


@pytest.mark.parametrize(("drain", "is_finished"), [(True, True), (False, False)])
def test_nothing_arrives_after_the_end_and_the_rest_is_drained(drain: bool, is_finished: bool):
    simulation = Simulation(SchedulerConfig(), CAPACITY, SECOND)
    simulation.send([make_record("a", 0.0, num_output=20), make_record("late", 6.0)])
    simulation.run(until_s=5.0, drain=drain)
    assert simulation.records.keys() == {"a"}
    assert (simulation.records["a"].finished_at is not None) == is_finished


def test_a_seed_fixes_the_noise():
    def run(seed: int) -> list[float]:
        simulation = Simulation(SchedulerConfig(), CAPACITY, SMOLLM2_135M, seed)
        simulation.send([make_record("a", 0.0, num_output=20)])
        simulation.run(until_s=1.0)
        return [step.elapsed_s for step in simulation.steps]

    assert run(1) == run(1) != run(2)


def test_a_slower_machine_is_slower_by_its_factor():
    cost, scaled = SMOLLM2_135M.cost, SMOLLM2_135M.scaled(2.0).cost
    assert scaled.constant_s == 2 * cost.constant_s
    assert scaled.per_attended_s == 2 * cost.per_attended_s
