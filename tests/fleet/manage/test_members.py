"""The state of a fleet, against hosts and frontends that are only simulated."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from headway.errors import ConfigError
from headway.fleet.manage.members import (
    DRAIN_S,
    GIVE_UP_S,
    FleetState,
    Member,
    Phase,
    SavedFleet,
)
from headway.fleet.manage.messages import (
    MANAGER_VERSION,
    FleetNeed,
    FrontendReport,
    HostReport,
    MemberOrder,
    ProcessState,
    Role,
    RunningProcess,
)
from headway.fleet.manage.scaling import FleetScaler
from headway.fleet.manage.spec import EnginesSpec, FleetSpec, FrontendsSpec, PoolSpec

LOAD_S = 2.0


def make_spec(low: int = 2, high: int = 4, num_frontends: int = 1) -> FleetSpec:
    engines = EnginesSpec(min=low, max=high)
    frontends = FrontendsSpec(count=num_frontends)
    return FleetSpec("demo", [PoolSpec("p", "m", engines, frontends)], "/key")


@dataclass
class SimulatedProcess:
    pid: int
    started_at: float
    address: str


@dataclass
class SimulatedHost:
    name: str
    machine: str
    instance: str
    order: MemberOrder | None = None
    has_stopped: bool = False


@dataclass
class World:
    """Machines, hosts and frontends around a state; hosts obey at once, engines load a while."""

    state: FleetState
    now: float = 0.0
    machines: int = 3
    is_ray_up: bool = True
    hosts: dict[str, SimulatedHost] = field(default_factory=dict[str, SimulatedHost])
    processes: dict[tuple[str, str], SimulatedProcess] = field(
        default_factory=dict[tuple[str, str], SimulatedProcess]
    )
    in_use: set[str] = field(default_factory=set[str])
    """Engines that have requests."""
    needs: dict[str, FleetNeed] = field(default_factory=dict[str, FleetNeed])
    """Work of the frontends, by pool."""
    seen: int = 0
    num_made: int = 0
    most_engines: int = 0
    least_engines: int = 1000

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step()

    def settle(self, limit_s: float = 200.0) -> None:
        end = self.now + limit_s
        self.step()
        while not self.state.is_settled:
            self.step()
            assert self.now < end, self.state.members

    def step(self) -> None:
        self.now += 0.5
        self.state.tick(self.now)
        if self.is_ray_up:
            self._place()
        for host in list(self.hosts.values()):
            self._report(host)
        self._report_frontends()
        engines = len(self.state.engines_of("p"))
        self.most_engines = max(self.most_engines, engines)
        if engines:
            self.least_engines = min(self.least_engines, engines)

    def _place(self) -> None:
        names = {place.name for place in self.state.places}
        for name in self.hosts.keys() - names:
            del self.hosts[name]
        for name in sorted(names - self.hosts.keys()):
            self.start_host(name, f"m{self.num_made % self.machines}")

    def start_host(self, name: str, machine: str) -> None:
        self.num_made += 1
        self.hosts[name] = SimulatedHost(name, machine, f"i{self.num_made}")

    def _report(self, host: SimulatedHost) -> None:
        name = "" if host.order is None else host.order.name
        process = self.processes.get((host.machine, name))
        state = ProcessState.NONE
        if host.has_stopped:
            state = ProcessState.STOPPED
        elif process is not None:
            is_up = self.now - process.started_at >= LOAD_S
            state = ProcessState.READY if is_up else ProcessState.STARTING
        running = [
            RunningProcess(member, one.pid, one.address)
            for (machine, member), one in self.processes.items()
            if machine == host.machine
        ]
        orders = self.state.take_host(
            HostReport(
                MANAGER_VERSION, host.name, host.instance, host.machine, "", running, name, state
            ),
            self.now,
        )
        for leftover in orders.end:
            del self.processes[host.machine, leftover.member]
        self._obey(host, orders.member)

    def _obey(self, host: SimulatedHost, order: MemberOrder | None) -> None:
        if order is None:
            host.order = None
            return
        if host.order is None or host.order.name != order.name:
            host.has_stopped = False
        host.order = order
        key = host.machine, order.name
        if order.stop_s is not None:
            self.processes.pop(key, None)
            host.has_stopped = True
        elif key not in self.processes:
            self.num_made += 1
            address = f"tcp://{host.machine}:{7000 + self.num_made}"
            self.processes[key] = SimulatedProcess(self.num_made, self.now, address)

    def _report_frontends(self) -> None:
        for (_, name), process in list(self.processes.items()):
            if name.startswith("frontend") and self.now - process.started_at >= LOAD_S:
                pool = self.state.members[name].pool if name in self.state.members else "p"
                report = FrontendReport(
                    MANAGER_VERSION,
                    pool,
                    name,
                    f"f{process.pid}",
                    self.seen,
                    True,
                    sorted(self.in_use),
                    self.needs.get(pool, FleetNeed()),
                )
                self.state.take_frontend(report, self.now)
        self.seen = self.state.list_version

    def engines(self) -> list[Member]:
        return [one for one in self.state.members.values() if one.role is Role.ENGINE]

    def pids(self, role: str) -> set[int]:
        return {one.pid for (_, name), one in self.processes.items() if name.startswith(role)}


@pytest.fixture
def world() -> World:
    world = World(FleetState.of(make_spec()))
    world.settle()
    return world


def test_a_fleet_gets_its_engines_and_frontends(world: World) -> None:
    assert len(world.engines()) == 2
    assert len(world.pids("frontend")) == 1
    assert len(world.state.engines_of("p")) == 2
    assert {one.generation for one in world.state.members.values()} == {1}


def test_a_pool_that_may_be_empty_begins_with_one_engine() -> None:
    assert FleetState.of(make_spec(low=0)).targets == {"p": 1}


def test_scaling_goes_to_zero_and_back(world: World) -> None:
    for number in (4, 1, 0, 1):
        world.state.scale("p", number)
        world.settle()
        assert len(world.pids("engine")) == number
        assert len(world.state.engines_of("p")) == number
    assert len(world.pids("frontend")) == 1


@pytest.mark.parametrize(("number", "message"), [(5, "0 to 4"), (-1, "0 to 4")])
def test_scaling_beyond_the_bounds_is_refused(world: World, number: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        world.state.scale("p", number)
    with pytest.raises(ConfigError, match="has no pool 'x'; it has p"):
        world.state.scale("x", 1)


def test_a_drained_engine_has_ten_seconds_if_it_has_requests(world: World) -> None:
    engine = world.engines()[0]
    world.in_use = {engine.address}
    begun = world.now
    world.state.drain(engine.name, world.now)
    assert engine.address not in world.state.engines_of("p")
    while engine.phase is Phase.DRAINING:
        world.step()
    assert DRAIN_S <= world.now - begun <= DRAIN_S + 1.0
    world.settle()
    assert engine.name not in world.state.members
    assert len(world.engines()) == 2


def test_a_drained_engine_without_requests_goes_once_frontends_know(world: World) -> None:
    engine, begun = world.engines()[0], world.now
    world.state.drain(engine.name, world.now)
    while engine.name in world.state.members:
        world.step()
    assert world.now - begun < 4.0


def test_only_engines_are_drained(world: World) -> None:
    with pytest.raises(ConfigError, match="engines: engine-"):
        world.state.drain("frontend-3", world.now)


def test_an_upgrade_replaces_all_one_by_one_engines_first(world: World) -> None:
    world.state.scale("p", 3)
    world.settle()
    before_engines, before_frontends = world.pids("engine"), world.pids("frontend")
    world.most_engines, world.least_engines = 0, 1000
    world.state.upgrade(make_spec())
    while before_engines & world.pids("engine"):
        assert world.pids("frontend") == before_frontends, "engines go first"
        world.step()
    world.settle()
    assert not before_frontends & world.pids("frontend")
    assert world.least_engines >= 3, "there were never fewer engines"
    assert world.most_engines == 4, "and one more at most"
    assert len(world.pids("engine")) == 3
    assert len(world.pids("frontend")) == 1


def test_a_new_frontend_is_ready_before_the_old_one_stops(world: World) -> None:
    world.state.upgrade(make_spec())
    old = world.pids("frontend")
    while old & world.pids("frontend"):
        ready = [
            one
            for one in world.state.members.values()
            if one.role is Role.FRONTEND and one.phase is Phase.READY
        ]
        assert ready
        world.step()


def test_an_upgrade_cannot_change_what_streams_need(world: World) -> None:
    spec = make_spec()
    pool = msgspec.structs.replace(spec.pools[0], model="other")
    with pytest.raises(ConfigError, match="cannot change the model"):
        world.state.upgrade(msgspec.structs.replace(spec, pools=[pool]))
    with pytest.raises(ConfigError, match="cluster key"):
        world.state.upgrade(msgspec.structs.replace(spec, cluster_key_file="/other"))
    with pytest.raises(ConfigError, match="name"):
        world.state.upgrade(msgspec.structs.replace(spec, name="other"))
    assert world.state.generation == 1


def test_an_end_stops_frontends_before_engines(world: World) -> None:
    world.state.end()
    while not world.state.is_over:
        if world.pids("frontend"):
            assert len(world.pids("engine")) == 2
        world.step()
    assert not world.processes
    world.step()
    assert not world.hosts


def test_a_host_that_comes_back_keeps_its_process(world: World) -> None:
    before = world.pids("")
    for name, host in list(world.hosts.items()):
        world.start_host(name, host.machine)
    world.run(10.0)
    assert world.pids("") == before


def test_hosts_that_come_back_elsewhere_adopt_what_runs_there(world: World) -> None:
    """The Ray cluster was lost as a whole; its hosts are placed anew, on other machines."""
    world.state.scale("p", 3)
    world.settle()
    before = world.pids("engine")
    names = [one.host for one in world.engines()]
    machines = [world.hosts[name].machine for name in names]
    world.hosts.clear()
    world.is_ray_up = False
    world.run(20.0)
    assert world.pids("engine") == before, "engines do not need their hosts"
    for name, machine in zip(names, [*machines[1:], machines[0]], strict=True):
        world.start_host(name, machine)
    world.is_ray_up = True
    world.run(1.0)
    world.settle()
    assert before == world.pids("engine"), "none was replaced"
    assert sorted(world.state.engines_of("p")) == sorted(
        one.address for (_, name), one in world.processes.items() if name.startswith("engine")
    )


def test_an_engine_is_named_until_its_successor_elsewhere_is_ready(world: World) -> None:
    engine = world.engines()[0]
    old = engine.address
    host = world.hosts.pop(engine.host)
    world.start_host(host.name, "m9")
    world.step()
    world.step()
    assert (old in world.state.engines_of("p")) and world.processes["m9", engine.name]
    world.run(5.0)
    assert engine.address.startswith("tcp://m9:")
    assert old not in world.state.engines_of("p")
    world.is_ray_up = False
    world.start_host("stray", host.machine)
    world.run(2.0)
    assert (host.machine, engine.name) not in world.processes, "the old process was ended"


def test_a_member_to_stop_whose_host_is_gone_is_left_to_its_lease(world: World) -> None:
    engine = world.engines()[0]
    del world.hosts[engine.host]
    world.is_ray_up = False
    world.state.scale("p", 1)
    world.state.drain(engine.name, world.now)
    world.run(GIVE_UP_S + DRAIN_S + 2.0)
    assert engine.name not in world.state.members


def test_a_forced_end_gives_up_members_without_hosts_soon(world: World) -> None:
    members = set(world.state.members)
    lost = world.engines()[0]
    del world.hosts[lost.host]
    world.is_ray_up = False
    world.state.end(is_forced=True)
    world.run(GIVE_UP_S / 2)
    assert world.state.is_over and len(members) > 1
    assert world.state.abandoned.keys() == {lost.name}, "others were stopped by their hosts"


def test_a_manager_that_is_started_again_goes_on(world: World) -> None:
    before = world.pids("")
    saved = msgspec.json.encode(world.state.save())
    world.state = FleetState.load(msgspec.json.decode(saved, type=SavedFleet), world.now)
    assert len(world.state.engines_of("p")) == 2, "frontends get the same list at once"
    world.settle()
    assert world.pids("") == before


def test_pools_have_engines_and_lists_of_their_own() -> None:
    pools = [
        PoolSpec("p", "m", EnginesSpec(), FrontendsSpec(port=1)),
        PoolSpec("q", "n", EnginesSpec(min=2), FrontendsSpec(port=2)),
    ]
    world = World(FleetState.of(FleetSpec("demo", pools, "/key")))
    world.run(10.0)
    assert len(world.state.engines_of("p")) == 1
    assert len(world.state.engines_of("q")) == 2
    assert not set(world.state.engines_of("p")) & set(world.state.engines_of("q"))
    with pytest.raises(ConfigError, match="no pool"):
        report = FrontendReport(MANAGER_VERSION, "r", "", "i", 0, True)
        world.state.take_frontend(report, world.now)


def make_two_pools(max_engines: int | None) -> FleetSpec:
    engines = EnginesSpec(min=1, max=4)
    pools = [PoolSpec(name, f"m-{name}", engines, FrontendsSpec(count=1)) for name in ("a", "b")]
    return FleetSpec("demo", pools, "/key", max_engines=max_engines)


def test_engines_move_to_the_pool_that_needs_them_and_back() -> None:
    """Four engines for two pools; an engine starts when one that leaves is gone."""
    world, scaler = World(FleetState.of(make_two_pools(max_engines=4))), FleetScaler(["a", "b"])
    most_at_once = 0

    def run(need_a: float, need_b: float, seconds: float) -> tuple[int, int]:
        nonlocal most_at_once
        world.needs = {"a": FleetNeed(work_rate=need_a), "b": FleetNeed(work_rate=need_b)}
        end = world.now + seconds
        while world.now < end:
            scaler.set_targets(world.state, world.now)
            world.step()
            most_at_once = max(most_at_once, len(world.pids("engine")))
        counts = [len(world.state.engines_of(pool)) for pool in ("a", "b")]
        return counts[0], counts[1]

    assert run(0.5, 0.5, 20.0) == (1, 1)
    assert run(3.0, 0.5, 30.0) == (3, 1)
    assert run(0.2, 3.0, 30.0) == (1, 3)
    assert run(3.0, 3.0, 30.0) == (2, 2)
    assert most_at_once == 4


def test_without_a_limit_every_pool_has_what_it_needs() -> None:
    world, scaler = World(FleetState.of(make_two_pools(max_engines=None))), FleetScaler(["a", "b"])
    world.settle()
    world.needs = {"a": FleetNeed(work_rate=3.0), "b": FleetNeed(work_rate=3.0)}
    for _ in range(60):
        scaler.set_targets(world.state, world.now)
        world.step()
    assert world.state.targets == {"a": 4, "b": 4}


def test_scaling_beyond_the_engines_of_the_fleet_is_refused() -> None:
    state = FleetState.of(make_two_pools(max_engines=4))
    state.scale("a", 3)
    with pytest.raises(ConfigError, match="pool b may have 1, got 2"):
        state.scale("b", 2)
