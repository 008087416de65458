"""The commands of `headway fleet`: start a manager, and talk to its control socket."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from headway.errors import ConfigError
from headway.fleet.manage.folders import FleetFolder, write_atomically
from headway.fleet.manage.members import FleetState
from headway.fleet.manage.processes import (
    ProcessRecord,
    end_process,
    find_alive,
    last_line,
    start_daemon,
    wait_end,
)
from headway.fleet.manage.spec import FleetSpec
from headway.fleet.network.cluster_key import ClusterKey, write_cluster_key

MANAGER = "headway.fleet.manage.manager"
CONNECT_TIMEOUT_S = 20.0
ANSWER_TIMEOUT_S = 10.0
POLL_S = 0.3
RAY_TIMEOUT_S = 3.0
HOST_WAIT_S = 3.0
"""Time for every host to report, which each does twice a second."""


class ControlRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One command to a manager."""

    command: str
    pool: str = ""
    number: int | None = None
    member: str = ""
    spec: FleetSpec | None = None
    is_forced: bool = False
    """Of down: whether members whose hosts are silent are given up soon."""


class MemberStatus(msgspec.Struct, frozen=True):
    """One engine or frontend, for people and scripts."""

    name: str
    role: str
    pool: str
    phase: str
    generation: int
    node: str = ""
    address: str = ""
    admin: str = ""
    pid: int = 0
    problem: str = ""
    host_age_s: float | None = None
    """Seconds since its host reported; None if the manager has no report."""


class PoolStatus(msgspec.Struct, frozen=True):
    """One pool: its target, and what it is based on."""

    name: str
    model: str
    target: int
    is_fixed: bool
    """Whether the number is set, not scaled."""
    need: float
    bounds: list[int]


class FleetStatus(msgspec.Struct, frozen=True):
    """All that a manager knows; the answer to every command."""

    name: str
    manager: str
    ray: str
    generation: int
    is_settled: bool
    is_ending: bool
    problem: str = ""
    pools: list[PoolStatus] = []
    members: list[MemberStatus] = []
    abandoned: list[str] = []
    """Members that could not be reached to be stopped."""
    error: str = ""


class FleetClient:
    """Talks to the manager of one fleet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = FleetFolder.of(name)

    @property
    def is_up(self) -> bool:
        return find_alive(self.folder.manager) is not None

    @property
    def has_state(self) -> bool:
        """Whether the fleet was not brought down, manager or not."""
        return self.folder.state.exists()

    def ask(self, request: ControlRequest) -> FleetStatus:
        """Return the answer to a command; raise ConfigError if it is refused."""
        record = find_alive(self.folder.manager)
        if record is None:
            raise ConfigError(self._absent())
        self._wait_control(record)
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(ANSWER_TIMEOUT_S)
                connection.connect(record.address)
                connection.sendall(msgspec.json.encode(request) + b"\n")
                with connection.makefile("rb") as file:
                    answer = msgspec.json.decode(file.readline(), type=FleetStatus)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"the manager of fleet {self.name} does not answer ({error}); its log: "
                f"{self.folder.manager_log}"
            ) from error
        if answer.error:
            raise ConfigError(answer.error)
        return answer

    def _absent(self) -> str:
        if self.has_state:
            return (
                f"the manager of fleet {self.name} is gone, its members go on: start it again with "
                "headway fleet up FILE, or end the fleet with headway fleet down"
            )
        return f"fleet {self.name} is not up; start it with: headway fleet up FILE"

    def status(self) -> FleetStatus:
        return self.ask(ControlRequest("status"))

    def start(self, spec: FleetSpec, program: tuple[str, ...] = ()) -> None:
        """Start a manager; raise ConfigError if there is one, or if it does not start."""
        if self.is_up:
            raise ConfigError(
                f"fleet {spec.name} is up already; change it with headway fleet upgrade FILE, or "
                f"end it with headway fleet down {spec.name}"
            )
        check_ray(spec)
        make_key(Path(spec.cluster_key_file))
        self.folder.make()
        is_new = not self.has_state
        if is_new:
            saved = msgspec.json.encode(FleetState.of(spec).save())
            write_atomically(self.folder.state, saved)
        try:
            self._start_manager(program)
        except ConfigError:
            if is_new:
                self.folder.remove_state()
            raise

    def _start_manager(self, program: tuple[str, ...] = ()) -> None:
        control = Path(tempfile.mkdtemp(prefix="headway-fleet-")) / "control"
        log = self.folder.manager_log
        command = [sys.executable, "-m", MANAGER, str(self.folder.root), str(control), *program]
        record = start_daemon(command, self.folder.manager, log, str(control))
        if not self._wait_control(record):
            record.send(signal.SIGTERM)
            raise ConfigError(f"the manager did not start: {last_line(log)}")

    def _wait_control(self, record: ProcessRecord) -> bool:
        """Wait until a manager that starts has its control socket; return whether it has."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while not Path(record.address).exists():
            if not record.is_alive or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def wait(
        self, is_done: Callable[[FleetStatus], bool], note: Callable[[FleetStatus], None]
    ) -> FleetStatus:
        """Wait until the status passes a test; `note` gets every status."""
        while True:
            status = self.status()
            note(status)
            if is_done(status):
                return status
            time.sleep(POLL_S)

    def down(self, note: Callable[[FleetStatus], None], is_forced: bool = False) -> None:
        """End the fleet and wait until nothing of it is left.

        Raise ConfigError if it is not up. Without Ray, members of silent hosts can only be given
        up; raise ConfigError unless that is forced.
        """
        if not self.has_state:
            raise ConfigError(self._absent())
        if not self.is_up:
            self._start_manager()
        record = find_alive(self.folder.manager)
        if not is_forced:
            self._check_hosts()
        self.ask(ControlRequest("down", is_forced=is_forced))
        while record is not None and record.is_alive:
            try:
                note(self.status())
            except ConfigError:
                wait_end(record, 1.0)
            time.sleep(POLL_S)

    def _check_hosts(self) -> None:
        """Raise ConfigError if Ray is out of reach, and hosts of members with it."""
        address = self.status().ray
        problem = find_ray_problem(address) if address else ""
        began_at = time.monotonic()
        while problem:
            silent = _silent_since(self.status(), time.monotonic() - began_at)
            if not silent:
                return
            if time.monotonic() - began_at > HOST_WAIT_S:
                raise ConfigError(
                    f"no Ray cluster at {address} ({problem}), and no host to stop "
                    f"{', '.join(silent)}: start Ray there again and repeat headway fleet down "
                    f"{self.name}; or headway fleet down {self.name} --force ends what runs on "
                    "this machine, and leaves the rest"
                )
            time.sleep(POLL_S)

    def abandon(self) -> None:
        """End a manager whose fleet has not begun, and forget the fleet."""
        record = find_alive(self.folder.manager)
        if record is not None:
            end_process(record, 5.0)
        self.folder.remove_state()


def check_ray(spec: FleetSpec) -> None:
    """Raise ConfigError if a spec needs Ray and there is none, or no cluster at its address."""
    if spec.ray is None:
        return
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "this fleet is placed by Ray, which is not installed: pip install 'headway[ray]'"
        )
    address = spec.ray.address
    if problem := find_ray_problem(address):
        port = address.rpartition(":")[2]
        raise ConfigError(
            f"no Ray cluster at {address} ({problem}): start one with RAY_AUTH_MODE=token ray "
            f"start --head --port={port}, or leave out `ray:` to run on this machine alone"
        )


def find_ray_problem(address: str) -> str:
    """Return why nobody listens at the address of a Ray head; empty if somebody does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), RAY_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _silent_since(status: FleetStatus, seconds: float) -> list[str]:
    """Return the members whose hosts have not reported for so many seconds."""
    return [
        one.name for one in status.members if one.host_age_s is None or one.host_age_s > seconds
    ]


def make_key(path: Path) -> None:
    """Make a cluster key if there is none; raise ConfigError if it cannot be used."""
    if not path.exists():
        write_cluster_key(path)
    ClusterKey.read(path)
    if os.stat(path).st_mode & 0o077:
        raise ConfigError(f"other users can read {path}: chmod 600 {path}")
