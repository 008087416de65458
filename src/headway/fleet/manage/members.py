"""Which members a fleet should have, and who runs them.

Pure: the manager passes reports and the time, and does what the state says. A member is one engine
or frontend. Each has one host, which a placer starts somewhere. A host that comes back on another
machine may find another member running there; then the two members exchange their hosts, so that
running processes are adopted, not replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from headway.errors import ConfigError
from headway.fleet.manage.messages import (
    MAX_SILENCE_S,
    FrontendReport,
    HostReport,
    MemberOrder,
    Orders,
    ProcessState,
    Role,
    RunningProcess,
)
from headway.fleet.manage.spec import MAX_ENGINES, FleetSpec, PoolSpec, flags_of

DRAIN_S = 10.0
"""Seconds that the requests of a drained engine may go on there before they move."""
ENGINE_STOP_S = 10.0
FRONTEND_STOP_S = 600.0
"""Seconds that the streams of a frontend may take to end when it is replaced."""
DOWN_STOP_S = 10.0
"""The same when the whole fleet stops."""
MAX_RENEW_S = 60.0
GIVE_UP_S = 30.0
"""Seconds after which a member to stop is left to its lease, if its host is gone."""
FORCED_GIVE_UP_S = 2.0
"""The same when the end of the fleet is forced; hosts report twice a second."""


class Phase(StrEnum):
    """How far a member is."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"


@dataclass(slots=True)
class Member:
    """One engine or frontend of the fleet."""

    name: str
    role: Role
    pool: str
    generation: int
    host: str
    phase: Phase = Phase.STARTING
    address: str = ""
    """Where its process listens; stays while a new process starts elsewhere."""
    admin: str = ""
    node: str = ""
    pid: int = 0
    since: float = 0.0
    """When its phase began."""
    left_version: int = 0
    """Version of the list of engines that does not name it any more."""
    problem: str = ""

    @property
    def is_active(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.READY)


@dataclass(frozen=True, slots=True)
class HostPlace:
    """A host that a placer should have started, and what it needs."""

    name: str
    cpus: float


@dataclass(slots=True)
class _HostView:
    """What is known of a host."""

    instance: str
    machine: str
    heard_at: float
    running: dict[str, int]
    """Members with a process on its machine, and the pid of each."""
    stopped: str = ""
    """Member that it has stopped."""


@dataclass(slots=True)
class _FrontendView:
    heard_at: float
    report: FrontendReport


class SavedMember(msgspec.Struct, frozen=True):
    """A member in the file of the manager."""

    name: str
    role: Role
    pool: str
    generation: int
    host: str
    address: str = ""


class SavedFleet(msgspec.Struct, frozen=True):
    """The state that a manager begins with after the one before it was lost."""

    spec: FleetSpec
    targets: dict[str, int]
    fixed: list[str] = []
    generation: int = 1
    num_named: int = 0
    list_version: int = 0
    members: list[SavedMember] = []
    is_ending: bool = False
    facts: dict[str, bytes] = {}


@dataclass(slots=True)
class FleetState:
    """The members of a fleet, and what should become of them."""

    spec: FleetSpec
    targets: dict[str, int]
    """Engines that each pool should have."""
    fixed: set[str] = field(default_factory=set[str])
    """Pools whose number was set by hand: they are not scaled."""
    generation: int = 1
    """Counts upgrades; members of older generations are replaced."""
    members: dict[str, Member] = field(default_factory=dict[str, Member])
    list_version: int = 1
    """Counts changes of the lists of engines."""
    is_ending: bool = False
    facts: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """What an engine of each pool has said of itself, for frontends while there is none."""
    abandoned: dict[str, str] = field(default_factory=dict[str, str])
    """Members that should have stopped and whose hosts were out of reach; the machine of each."""
    is_forced: bool = False
    """Whether the fleet ends without those hosts, and soon."""
    _hosts: dict[str, _HostView] = field(default_factory=dict[str, _HostView])
    _frontends: dict[str, _FrontendView] = field(default_factory=dict[str, _FrontendView])
    _num_named: int = 0

    @classmethod
    def of(cls, spec: FleetSpec) -> FleetState:
        """Return the state of a new fleet.

        A pool that may be empty begins with one engine, by which its frontends learn the model.
        """
        return cls(spec, {pool.name: max(1, pool.engines.min) for pool in spec.pools})

    @classmethod
    def load(cls, saved: SavedFleet, now: float) -> FleetState:
        """Return the state that `save` has returned; hosts are yet to report."""
        state = cls(
            saved.spec,
            saved.targets,
            set(saved.fixed),
            saved.generation,
            list_version=saved.list_version + 1,
            is_ending=saved.is_ending,
            facts=dict(saved.facts),
        )
        state._num_named = saved.num_named
        for one in saved.members:
            member = Member(one.name, one.role, one.pool, one.generation, one.host, since=now)
            member.address = one.address
            state.members[one.name] = member
        return state

    def save(self) -> SavedFleet:
        members = [
            SavedMember(one.name, one.role, one.pool, one.generation, one.host, one.address)
            for one in self.members.values()
        ]
        return SavedFleet(
            self.spec,
            self.targets,
            sorted(self.fixed),
            self.generation,
            self._num_named,
            self.list_version,
            members,
            self.is_ending,
            self.facts,
        )

    # ----------------------------------------------------------------- commands

    def scale(self, pool_name: str, number: int | None) -> None:
        """Set the engines of a pool; None gives them back to autoscaling."""
        pool = self.spec.pool(pool_name)
        if number is None:
            if pool.engines.most == pool.engines.min:
                raise ConfigError(f"pool {pool_name} has no range to scale in: set min and max")
            self.fixed.discard(pool_name)
            return
        if not 0 <= number <= pool.engines.most:
            raise ConfigError(
                f"pool {pool_name} may have 0 to {pool.engines.most} engines (max), got {number}"
            )
        most, others = self.spec.max_engines, self._least_of_others(pool_name)
        if most is not None and number + others > most:
            raise ConfigError(
                f"the fleet may have {most} engines (max_engines); {others} are the least of other "
                f"pools, so that pool {pool_name} may have {most - others}, got {number}"
            )
        self.fixed.add(pool_name)
        self.targets[pool_name] = number

    def _least_of_others(self, pool_name: str) -> int:
        """Return how many engines the other pools have at least."""
        return sum(
            self.targets[pool.name] if pool.name in self.fixed else pool.engines.min
            for pool in self.spec.pools
            if pool.name != pool_name
        )

    def drain(self, name: str, now: float) -> None:
        """Have the requests of one engine move to others, and replace it."""
        member = self.members.get(name)
        if member is None or member.role is not Role.ENGINE:
            engines = ", ".join(one.name for one in self._of(Role.ENGINE)) or "none"
            raise ConfigError(f"{name[:100]!r} is no engine of this fleet; engines: {engines}")
        if member.is_active:
            self._drain(member, now)

    def upgrade(self, spec: FleetSpec) -> None:
        """Have every member replaced by one of this spec, one after the other."""
        before = {pool.name: pool for pool in self.spec.pools}
        if spec.name != self.spec.name or spec.ray != self.spec.ray:
            raise ConfigError("an upgrade cannot change the name of a fleet or its Ray cluster")
        if spec.cluster_key_file != self.spec.cluster_key_file:
            raise ConfigError("an upgrade cannot change the cluster key: members would not connect")
        if {pool.name for pool in spec.pools} != before.keys():
            raise ConfigError("an upgrade cannot add or remove pools; make a fleet of its own")
        for pool in spec.pools:
            if pool.model != before[pool.name].model:
                raise ConfigError(
                    f"an upgrade cannot change the model of pool {pool.name}: its streams could "
                    "not go on; make a fleet of its own"
                )
            bounds = pool.engines
            target = self.targets[pool.name]
            low = 0 if pool.name in self.fixed else bounds.min
            self.targets[pool.name] = min(max(target, low), bounds.most)
        self.spec = msgspec.structs.replace(spec, manager=self.spec.manager)
        self.generation += 1

    def end(self, is_forced: bool = False) -> None:
        """Have all members stop: frontends first, then engines."""
        self.is_ending = True
        self.is_forced = self.is_forced or is_forced

    @property
    def is_over(self) -> bool:
        return self.is_ending and not self.members

    @property
    def is_settled(self) -> bool:
        """Whether every member that should be there is ready, and no other is left."""
        if any(one.phase is not Phase.READY or not one.pid for one in self.members.values()):
            return False
        if any(one.generation != self.generation for one in self.members.values()):
            return False
        return not self.is_ending and all(
            len(self._of(role, pool.name)) == self._want(role, pool)
            for pool in self.spec.pools
            for role in Role
        )

    # ------------------------------------------------------------------ reports

    def take_host(self, report: HostReport, now: float) -> Orders:
        """Take over the report of a host; return what it is to do."""
        running = {one.member: one.pid for one in report.running}
        before = self._hosts.get(report.host)
        stopped = report.member if report.state is ProcessState.STOPPED else ""
        view = _HostView(report.instance, report.machine, now, running, stopped)
        self._hosts[report.host] = view
        member = self._member_of(report.host)
        if member is None:
            return Orders(end=self._leftovers(report, now))
        if before is None or before.instance != report.instance:
            member = self._reassign(member, view, now)
        if report.member == member.name:
            self._note_process(member, report, now)
        return Orders(self._order(member), self._leftovers(report, now))

    def take_frontend(self, report: FrontendReport, now: float) -> Sequence[str]:
        """Take over the report of a frontend; return the addresses of its engines."""
        self.spec.pool(report.pool)
        self._frontends[report.instance] = _FrontendView(now, report)
        member = self.members.get(report.member)
        if member is not None and member.role is Role.FRONTEND and report.is_ready:
            self._set_ready(member, now)
        return self.engines_of(report.pool)

    def engines_of(self, pool: str) -> list[str]:
        """Return the addresses that frontends of a pool should use."""
        engines = (one for one in self._of(Role.ENGINE, pool) if one.is_active)
        return [one.address for one in engines if one.address]

    def needs_of(self, pool: str, now: float) -> list[FrontendReport]:
        """Return the last reports of the frontends of a pool that are there."""
        return [one.report for one in self._heard(now) if one.report.pool == pool]

    def _heard(self, now: float) -> list[_FrontendView]:
        return [one for one in self._frontends.values() if now - one.heard_at < MAX_SILENCE_S]

    def is_heard(self, host: str, now: float) -> bool:
        """Return whether a host has reported lately."""
        age_s = self.host_age_s(host, now)
        return age_s is not None and age_s < MAX_SILENCE_S

    def host_age_s(self, host: str, now: float) -> float | None:
        """Return the seconds since a host reported; None if it has not."""
        view = self._hosts.get(host)
        return None if view is None else now - view.heard_at

    def _member_of(self, host: str) -> Member | None:
        return next((one for one in self.members.values() if one.host == host), None)

    def _reassign(self, member: Member, view: _HostView, now: float) -> Member:
        """Return the member of a host that is new on its machine.

        If the process of its member is not there but that of another one whose host is gone, the
        two members exchange their hosts.
        """
        if member.name in view.running:
            return member
        for other in self._of(member.role, member.pool):
            if other.name in view.running and not self.is_heard(other.host, now):
                member.host, other.host = other.host, member.host
                return other
        return member

    def _note_process(self, member: Member, report: HostReport, now: float) -> None:
        record = next((one for one in report.running if one.member == member.name), None)
        member.problem, member.node = report.problem, report.node
        is_ready = report.state is ProcessState.READY
        if member.role is Role.ENGINE and not is_ready:
            self._set_starting(member, now)
        if record is None:
            return
        if member.pid not in (0, record.pid):
            self._set_starting(member, now)
        member.pid = record.pid
        # Until a process that starts elsewhere is ready, the one before it may still be there.
        if is_ready or not member.address:
            if member.address != record.address and member.role is Role.ENGINE:
                self.list_version += 1
            member.address, member.admin = record.address, record.admin
        if is_ready and member.role is Role.ENGINE:
            self._set_ready(member, now)
            if report.facts:
                self.facts[member.pool] = report.facts

    def _set_ready(self, member: Member, now: float) -> None:
        if member.phase is Phase.STARTING:
            member.phase, member.since = Phase.READY, now

    def _set_starting(self, member: Member, now: float) -> None:
        if member.phase is Phase.READY:
            member.phase, member.since = Phase.STARTING, now

    def _leftovers(self, report: HostReport, now: float) -> list[RunningProcess]:
        """Return the processes on a host's machine that no member has any more."""
        found: list[RunningProcess] = []
        for process in report.running:
            member = self.members.get(process.member)
            view = None if member is None else self._hosts.get(member.host)
            is_elsewhere = (
                view is not None
                and now - view.heard_at < MAX_SILENCE_S
                and view.machine != report.machine
                and process.member in view.running
                and member is not None
                and member.phase is Phase.READY
            )
            if member is None or is_elsewhere:
                found.append(process)
        return found

    def _order(self, member: Member) -> MemberOrder:
        pool = self.spec.pool(member.pool)
        flags = ["--cluster-key-file", self.spec.cluster_key_file]
        stop_s = ENGINE_STOP_S
        if member.role is Role.ENGINE:
            flags += engine_flags(pool)
        else:
            stop_s = FRONTEND_STOP_S
            flags += frontend_flags(self.spec, pool, member.name)
        if self.is_ending:
            stop_s = DOWN_STOP_S
        should_stop = member.phase is Phase.STOPPING
        return MemberOrder(
            member.name,
            member.role,
            pool.model,
            flags,
            stop_s if should_stop else None,
            min(MAX_RENEW_S, pool.engines.lease_s / 4),
        )

    # --------------------------------------------------------------------- ticks

    def tick(self, now: float) -> None:
        """Add, drain and remove members, as far as that is due."""
        for instance in [
            name for name, one in self._frontends.items() if now - one.heard_at > GIVE_UP_S
        ]:
            del self._frontends[instance]
        heard = {one.report.member for one in self._heard(now)}
        for member in list(self.members.values()):
            if member.role is Role.FRONTEND and member.name not in heard:
                self._set_starting(member, now)
            self._advance(member, now)
        for pool in self.spec.pools:
            for role in Role:
                self._reconcile(pool, role, now)

    @property
    def places(self) -> list[HostPlace]:
        """The hosts that there should be."""
        found: list[HostPlace] = []
        for member in self.members.values():
            pool = self.spec.pool(member.pool)
            part = pool.engines if member.role is Role.ENGINE else pool.frontends
            found.append(HostPlace(member.host, part.cpus))
        return found

    def _advance(self, member: Member, now: float) -> None:
        """Move a member that is to go one phase on."""
        if member.phase is Phase.DRAINING and self._is_drained(member, now):
            self._stop(member, now)
        elif member.phase is Phase.STOPPING:
            view = self._hosts.get(member.host)
            has_stopped = view is not None and view.stopped == member.name
            give_up_s = FORCED_GIVE_UP_S if self.is_forced else GIVE_UP_S
            is_lost = now - member.since > give_up_s and not self.is_heard(member.host, now)
            if is_lost and member.pid:
                self.abandoned[member.name] = member.node or "an unknown machine"
            if has_stopped or is_lost:
                del self.members[member.name]
                self._hosts.pop(member.host, None)

    def _is_drained(self, member: Member, now: float) -> bool:
        if now - member.since >= DRAIN_S or not member.address:
            return True
        reports = [one.report for one in self._heard(now) if one.report.pool == member.pool]
        return all(
            one.seen >= member.left_version and member.address not in one.in_use for one in reports
        )

    def _reconcile(self, pool: PoolSpec, role: Role, now: float) -> None:
        members = self._of(role, pool.name)
        active = [one for one in members if one.is_active]
        old = [one for one in active if one.generation != self.generation]
        want = self._want(role, pool)
        is_upgrading = bool(old) and want > 0
        if role is Role.FRONTEND and self._has_old(Role.ENGINE, pool.name):
            is_upgrading, old = False, []  # engines go first
        is_leaving = len(members) > len(active)
        if len(active) < want:
            for _ in range(min(want - len(active), self._room(role))):
                self._add(pool, role, now)
        elif is_upgrading and len(active) == want and not is_leaving:
            self._add(pool, role, now)
        elif len(active) > want:
            new = [one for one in active if one not in old]
            if not is_upgrading or all(one.phase is Phase.READY for one in new):
                for member in self._victims(active, len(active) - want):
                    self._leave(member, now)

    def _room(self, role: Role) -> int:
        """Return how many members may be added: engines that leave count until they are gone."""
        most = self.spec.max_engines
        if role is not Role.ENGINE or most is None:
            return MAX_ENGINES
        return max(0, most - len(self._of(role)))

    def _victims(self, active: Iterable[Member], number: int) -> list[Member]:
        """Return the members to remove: old ones, then those not ready, then the newest."""
        ordered = sorted(
            active,
            key=lambda one: (one.generation, one.phase is Phase.READY, -number_of(one.name)),
        )
        return ordered[:number]

    def _want(self, role: Role, pool: PoolSpec) -> int:
        """Return how many members a pool should have; engines end after their frontends."""
        if self.is_ending:
            has_frontends = bool(self._of(Role.FRONTEND, pool.name))
            return len(self._of(role, pool.name)) if role is Role.ENGINE and has_frontends else 0
        return self.targets[pool.name] if role is Role.ENGINE else pool.frontends.count

    def _has_old(self, role: Role, pool: str) -> bool:
        return any(one.generation != self.generation for one in self._of(role, pool))

    def _of(self, role: Role, pool: str | None = None) -> list[Member]:
        members = self.members.values()
        return [one for one in members if one.role is role and pool in (None, one.pool)]

    def _add(self, pool: PoolSpec, role: Role, now: float) -> None:
        self._num_named += 1
        name = f"{role}-{self._num_named}"
        host = f"{self.spec.name}-host-{self._num_named}"
        self.members[name] = Member(name, role, pool.name, self.generation, host, since=now)

    def _leave(self, member: Member, now: float) -> None:
        if member.role is Role.ENGINE and not self.is_ending:
            self._drain(member, now)
        else:
            self._stop(member, now)

    def _drain(self, member: Member, now: float) -> None:
        self.list_version += 1
        member.phase, member.since, member.left_version = Phase.DRAINING, now, self.list_version

    def _stop(self, member: Member, now: float) -> None:
        member.phase, member.since = Phase.STOPPING, now


def number_of(name: str) -> int:
    """Return the number in the name of a member."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def engine_flags(pool: PoolSpec) -> list[str]:
    """Return the flags of `headway engine`; the host adds the address."""
    flags = [f"--lease-s={pool.engines.lease_s}"]
    given = {name.replace("-", "_") for name in pool.engines.settings}
    if "num_threads" not in given and pool.engines.cpus >= 1:
        flags.append(f"--num-threads={int(pool.engines.cpus)}")
    return flags + flags_of(pool.engines.settings)


def frontend_flags(spec: FleetSpec, pool: PoolSpec, member: str) -> list[str]:
    """Return the flags of `headway frontend`; the host adds the admin port."""
    frontends = pool.frontends
    flags = ["--discover", f"fleet:{spec.manager}/{pool.name}/{member}"]
    flags += [f"--host={frontends.host}", f"--port={frontends.port}", "--reuse-port"]
    given = {name.replace("-", "_") for name in frontends.settings}
    if "shutdown_timeout" not in given:
        flags.append(f"--shutdown-timeout={FRONTEND_STOP_S:.0f}")
    return flags + flags_of(frontends.settings)
