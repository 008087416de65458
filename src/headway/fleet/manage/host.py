"""The host of one member: starts, adopts, watches and stops its process.

The process has no parent, so it outlives its host. A host that comes back finds the process by its
pid file, and goes on watching it. Without a manager, a host goes on with the member it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import zmq.asyncio

from headway.clock import SystemClock
from headway.errors import ConfigError, WireError
from headway.fleet.manage.folders import FleetFolder, machine_id
from headway.fleet.manage.link import ManagerAwayError, ManagerLink
from headway.fleet.manage.messages import (
    MANAGER_VERSION,
    MAX_FACTS_BYTES,
    REPORT_S,
    HostReport,
    MemberOrder,
    Orders,
    ProcessState,
    Role,
    RunningProcess,
)
from headway.fleet.manage.processes import (
    ProcessRecord,
    end_process,
    find_alive,
    last_line,
    read_record,
    start_daemon,
)
from headway.fleet.network.cluster_key import ClusterKey
from headway.fleet.network.connection import ConnectionLostError, PeerConnection, engine_dialect
from headway.fleet.network.endpoints import Endpoint
from headway.fleet.network.wire import EngineUp, encode

logger = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", "headway")
WATCH_S = 0.25
MIN_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
LONG_LIFE_S = 60.0
"""Life of a process after which its next end does not count as a failed start."""
PROBE_TIMEOUT_S = 8.0
MAX_FAILED_PROBES = 3
MAX_LOG_BYTES = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class HostArguments:
    """All that a host is given; plain text, so that any placer can pass it."""

    fleet: str
    host: str
    manager: str
    key_file: str
    node: str
    """Address of its machine, by which frontends reach engines."""
    folder: str
    """Folder of the fleet on the machine of the manager; used here too, if it can be made."""
    program: tuple[str, ...] = PROGRAM
    """What runs `engine` and `frontend`."""


class Host:
    """Keeps the process of one member running, and reports to the manager."""

    def __init__(self, arguments: HostArguments) -> None:
        """Raise ConfigError if the cluster key or the folder cannot be used."""
        self._arguments = arguments
        self._key = ClusterKey.read(Path(arguments.key_file))
        endpoint = Endpoint.parse(arguments.manager, "the manager's address")
        self._folder = _make_folder(arguments)
        self._link = ManagerLink(endpoint, self._key)
        self._instance = secrets.token_hex(8)
        self._keeper: MemberKeeper | None = None
        self._last_problem = ""

    async def run(self) -> None:
        """Report, and keep the process of the member running, until cancelled."""
        try:
            while True:
                await self._report()
                await asyncio.sleep(REPORT_S / 2)
        finally:
            if self._keeper is not None:
                self._keeper.close()
            self._link.close()

    async def _report(self) -> None:
        arguments, keeper = self._arguments, self._keeper
        report = HostReport(
            MANAGER_VERSION,
            arguments.host,
            self._instance,
            machine_id(),
            arguments.node,
            find_running(self._folder),
            "" if keeper is None else keeper.order.name,
            ProcessState.NONE if keeper is None else keeper.state,
            "" if keeper is None else keeper.problem[:500],
            b"" if keeper is None else keeper.facts,
        )
        problem = ""
        try:
            answer = await self._link.ask(report)
            if isinstance(answer, Orders):
                await self._follow(answer)
        except (ManagerAwayError, WireError) as error:
            problem = str(error)
        if problem and problem != self._last_problem:
            logger.warning("%s", problem)
        self._last_problem = problem

    async def _follow(self, orders: Orders) -> None:
        for process in orders.end:
            await asyncio.to_thread(end_leftover, self._folder, process)
        order = orders.member
        if self._keeper is not None and (order is None or order.name != self._keeper.order.name):
            self._keeper.close()
            self._keeper = None
        if order is None:
            return
        if self._keeper is None:
            self._keeper = MemberKeeper(order, self._arguments, self._key, self._folder)
        self._keeper.order = order


def _make_folder(arguments: HostArguments) -> FleetFolder:
    """Return the folder of the manager, or this user's own where there can be no such folder."""
    folder = FleetFolder(Path(arguments.folder))
    try:
        folder.make()
    except ConfigError:
        folder = FleetFolder.of(arguments.fleet)
        folder.make()
    return folder


def find_running(folder: FleetFolder) -> list[RunningProcess]:
    """Return the live processes of a fleet on this machine."""
    found: list[RunningProcess] = []
    for path in sorted(folder.machine.glob("*.json")):
        record = find_alive(path)
        if record is not None:
            found.append(RunningProcess(path.stem, record.pid, record.address, record.admin))
    return found


def end_leftover(folder: FleetFolder, process: RunningProcess) -> None:
    """End a process that its fleet does not have any more, unless another host keeps it."""
    record = find_alive(folder.pid_file(process.member))
    lock = take_lock(folder.lock_file(process.member))
    if lock is None:
        return
    try:
        if record is not None and record.pid == process.pid:
            logger.info("ending %s (%d): the fleet has it no more", process.member, record.pid)
            end_process(record, 10.0)
            folder.pid_file(process.member).unlink(missing_ok=True)
    finally:
        os.close(lock)


def take_lock(path: Path) -> int | None:
    """Return the descriptor of a lock that this process has now; None if another has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


class MemberKeeper:
    """Watches the process of one member, in a task of its own."""

    def __init__(
        self, order: MemberOrder, arguments: HostArguments, key: ClusterKey, folder: FleetFolder
    ) -> None:
        self.order = order
        self.state = ProcessState.NONE
        self.problem = ""
        self.facts = b""
        """What the engine has said of itself."""
        self._arguments = arguments
        self._key = key
        self._folder = folder
        self._context = zmq.asyncio.Context()
        self._record: ProcessRecord | None = None
        self._started_at = 0.0
        self._next_start_at = 0.0
        self._backoff_s = MIN_BACKOFF_S
        self._num_failed_probes = 0
        self._probed_at = 0.0
        self._lock: int | None = None
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        """Stop watching; the process goes on."""
        self._task.cancel()
        self._context.destroy(linger=0)
        if self._lock is not None:
            os.close(self._lock)

    async def _run(self) -> None:
        while True:
            try:
                await self._step()
            except (OSError, ConfigError) as error:
                self.problem = str(error)
                logger.warning("%s: %s", self.order.name, error)
            await asyncio.sleep(WATCH_S)

    async def _step(self) -> None:
        """Do what is due: take the lock, adopt or start the process, probe it, or stop it."""
        if self._lock is None:
            self._lock = take_lock(self._folder.lock_file(self.order.name))
            if self._lock is None:
                self.problem = "another host on this machine still has this member"
                return
            self._adopt()
        if self.order.stop_s is not None:
            await self._stop(self.order.stop_s)
        elif self._record is None or not self._record.is_alive:
            await self._start()
        elif self.order.role is Role.ENGINE:
            await self._probe(self._record)
        else:
            self.state = ProcessState.READY
            if time.monotonic() - self._started_at > MAX_BACKOFF_S:
                self.problem = ""

    def _adopt(self) -> None:
        """Go on with the process that a host before this one has started, if it is alive."""
        self._record = find_alive(self._folder.pid_file(self.order.name))
        if self._record is not None:
            self._started_at, self.state = time.monotonic(), ProcessState.STARTING
            logger.info("%s is adopted: process %d", self.order.name, self._record.pid)

    # ------------------------------------------------------------------- starting

    async def _start(self) -> None:
        now = time.monotonic()
        if self._record is not None:
            self._note_end(now)
        if now < self._next_start_at:
            return
        order, folder = self.order, self._folder
        address, admin, flags = self._addresses()
        command = [*self._arguments.program, str(order.role), order.model, *order.flags, *flags]
        log = folder.log_file(order.name)
        if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
            log.unlink()
        self.state, self._num_failed_probes = ProcessState.STARTING, 0
        self._record = await asyncio.to_thread(
            start_daemon, command, folder.pid_file(order.name), log, address, admin
        )
        self._started_at = time.monotonic()
        logger.info("%s is started: process %d", order.name, self._record.pid)

    def _note_end(self, now: float) -> None:
        """Record that the process has ended by itself, and when to start the next one."""
        self._record, self.state = None, ProcessState.STARTING
        if now - self._started_at > LONG_LIFE_S:
            self._backoff_s = MIN_BACKOFF_S
        self.problem = f"it ended: {last_line(self._folder.log_file(self.order.name))}"
        logger.warning("%s: %s", self.order.name, self.problem)
        self._next_start_at = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    def _addresses(self) -> tuple[str, str, list[str]]:
        """Return the address, the admin address and their flags for a new process."""
        node, order = self._arguments.node, self.order
        if order.role is Role.ENGINE:
            address = self._address_before() or f"tcp://{node}:{free_port(node)}"
            return address, "", ["--listen", address]
        given = {flag: value for flag, _, value in (one.partition("=") for one in order.flags)}
        host, port = given.get("--host", node), given.get("--port", "0")
        host = node if host in ("0.0.0.0", "::") else host
        admin_port = free_port("127.0.0.1")
        admin_flags = ["--admin-port", str(admin_port)]
        return f"http://{host}:{port}", f"http://127.0.0.1:{admin_port}", admin_flags

    def _address_before(self) -> str:
        """Return the address of the process before, which frontends know; empty if it is taken."""
        record = read_record(self._folder.pid_file(self.order.name))
        address = "" if record is None else record.address
        node = f"tcp://{self._arguments.node}:"
        port = address.removeprefix(node)
        is_free = address.startswith(node) and port.isdecimal() and is_port_free(node, int(port))
        return address if is_free else ""

    # -------------------------------------------------------------------- probing

    async def _probe(self, record: ProcessRecord) -> None:
        """Connect to the engine until it is up; then at intervals, which renews its lease."""
        now = time.monotonic()
        if self.state is ProcessState.READY and now - self._probed_at < self.order.renew_s:
            return
        self._probed_at = now
        try:
            await asyncio.wait_for(self._connect(record), PROBE_TIMEOUT_S)
        except (ConnectionLostError, TimeoutError) as error:
            if self.state is ProcessState.READY:
                self._note_silence(record, str(error))
            return
        if self.state is not ProcessState.READY:
            logger.info("%s is ready at %s", self.order.name, record.address)
        self.state, self.problem = ProcessState.READY, ""
        self._num_failed_probes = 0

    async def _connect(self, record: ProcessRecord) -> None:
        endpoint = Endpoint.parse(record.address, "the address of an engine")
        dialect = engine_dialect(f"host {self._arguments.host}")
        connection = PeerConnection(self._context, endpoint, self._key, dialect, SystemClock())
        try:
            while not isinstance(message := await connection.receive(), EngineUp):
                if self.state is ProcessState.READY:
                    return  # it answers; its engine process is being replaced
            facts = encode(message)
            self.facts = facts if len(facts) <= MAX_FACTS_BYTES else b""
        finally:
            await connection.close()

    def _note_silence(self, record: ProcessRecord, problem: str) -> None:
        """Kill an engine that was ready and does not answer any more."""
        self._num_failed_probes += 1
        self.problem, self._probed_at = f"it does not answer: {problem}", 0.0
        if self._num_failed_probes >= MAX_FAILED_PROBES:
            logger.warning("%s is killed: %s", self.order.name, self.problem)
            record.send(signal.SIGKILL)

    # ------------------------------------------------------------------- stopping

    async def _stop(self, stop_s: float) -> None:
        if self.state is ProcessState.STOPPED:
            return
        if self._record is not None:
            # Another stop may come meanwhile that gives less time.
            self._record.send(signal.SIGTERM)
            deadline = time.monotonic() + stop_s
            while self._record.is_alive and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
                if self.order.stop_s is not None and self.order.stop_s < stop_s:
                    stop_s = self.order.stop_s
                    deadline = min(deadline, time.monotonic() + stop_s)
            await asyncio.to_thread(end_process, self._record, 5.0)
        self._folder.pid_file(self.order.name).unlink(missing_ok=True)
        self._record, self.state, self.problem = None, ProcessState.STOPPED, ""


def free_port(host: str) -> int:
    """Return a port on this machine that nobody listens on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host.strip("[]"), 0))
        return probe.getsockname()[1]


def is_port_free(prefix: str, port: int) -> bool:
    """Return whether nobody listens on a port of `tcp://HOST:`."""
    host = prefix.removeprefix("tcp://").rstrip(":").strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError, OverflowError), socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return True
    return False
