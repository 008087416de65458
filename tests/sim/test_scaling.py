"""A simulated fleet that gains and loses engines: no request is lost with them."""

from __future__ import annotations

from headway.config import SchedulerConfig
from headway.core.executor import Capacity
from headway.routing import Router
from headway.sim import SMOLLM2_135M
from headway.sim.fleet import EngineSpec, FleetRecord, VirtualFleet

CAPACITY = Capacity(num_blocks=500, block_size=16, max_model_len=1024)


def test_requests_of_a_drained_engine_end_and_later_ones_go_elsewhere() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256)
    fleet = VirtualFleet([Router()], [SMOLLM2_135M] * 3, EngineSpec(config, CAPACITY))
    for number in range(60):
        prompt = [100 + number] * 64
        fleet.send(FleetRecord(f"r{number}", prompt, 20, arrived_at=number / 30))
    fleet.at(0.7, fleet.drain_engine)
    fleet.at(1.0, fleet.drain_engine)
    fleet.at(1.2, lambda: fleet.add_engine(SMOLLM2_135M))
    fleet.run(60.0)
    fleet.routers[0].check()
    assert fleet.num_engines == 2
    assert all(one.finished_at is not None for one in fleet.records.values())
    late = {one.engine for one in fleet.records.values() if one.arrived_at > 1.3}
    assert late <= {"engine-0", "engine-3"}
    assert len(list(fleet.routers[0].engines)) == 2
    assert fleet.routers[0].demand(60.0).backlog_s == 0.0


def test_a_new_engine_gets_at_once_what_waited_for_one() -> None:
    config = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=2048)
    fleet = VirtualFleet([Router()], [], EngineSpec(config, CAPACITY))
    for number in range(20):
        fleet.send(FleetRecord(f"r{number}", [100 + number] * 8, 200, arrived_at=number / 100))

    def join() -> None:
        fleet.add_engine(SMOLLM2_135M)
        fleet.tick()

    fleet.at(1.0, join)
    fleet.run(1.1)
    assert [one.engine for one in fleet.records.values()] == ["engine-0"] * 20
