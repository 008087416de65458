"""The manager of a fleet: sockets and clock around a FleetState.

    python -m headway.fleet.manage.manager FOLDER CONTROL_SOCKET [PROGRAM...]

Hosts and frontends report to its ZeroMQ socket, with the cluster key; `headway fleet` talks to its
control socket, which only this user can reach. If the manager is lost, members go on as they are;
the next one reads the state of this one, and the hosts report to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from pathlib import Path

import msgspec

from headway.clock import SystemClock
from headway.errors import ConfigError, HeadwayError, WireError
from headway.fleet.manage.control import ControlRequest, FleetStatus, MemberStatus, PoolStatus
from headway.fleet.manage.folders import FleetFolder, write_atomically
from headway.fleet.manage.host import (
    PROGRAM,
    HostArguments,
    end_leftover,
    find_running,
    take_lock,
)
from headway.fleet.manage.members import FleetState, SavedFleet
from headway.fleet.manage.messages import (
    MAX_FRAME_BYTES,
    Answer,
    EngineList,
    HostReport,
    Report,
    decode_manager_report,
    encode,
)
from headway.fleet.manage.placers import LocalPlacer, Placer, RayPlacer
from headway.fleet.manage.scaling import FleetScaler
from headway.fleet.network.cluster_key import ClusterKey
from headway.fleet.network.endpoints import Endpoint
from headway.fleet.network.server_socket import ServerSocket

logger = logging.getLogger(__name__)

TICK_S = 0.25
MAX_CONTROL_BYTES = 1024**2


class Manager:
    """Runs one fleet until it is down or a signal comes."""

    def __init__(self, folder: FleetFolder, control: Path, program: tuple[str, ...]) -> None:
        """Read the state of the fleet and bind the socket; raise ConfigError if that fails."""
        self._folder = folder
        self._control = control
        self._clock = SystemClock()
        saved = msgspec.json.decode(folder.state.read_bytes(), type=SavedFleet)
        self._state = FleetState.load(saved, self._clock.now())
        spec = self._state.spec
        key = ClusterKey.read(Path(spec.cluster_key_file))
        endpoint = Endpoint.parse(spec.manager, "manager", may_be_any=True)
        where = "`manager:` in the file of the fleet"
        self._socket = ServerSocket(endpoint, key, where, MAX_FRAME_BYTES)
        address = self._socket.address
        self._state.spec = msgspec.structs.replace(spec, manager=address)
        self._placer = self._make_placer(program)
        self._scaler = FleetScaler([pool.name for pool in spec.pools])
        self._saved = b""
        self._has_changed = asyncio.Event()

    def _make_placer(self, program: tuple[str, ...]) -> Placer:
        spec = self._state.spec
        node = Endpoint.parse(spec.manager, "manager").host
        key_file = spec.cluster_key_file
        root = str(self._folder.root)
        arguments = HostArguments(spec.name, "", spec.manager, key_file, node, root, program)
        if spec.ray is None:
            return LocalPlacer(self._folder, arguments)
        return RayPlacer(spec.ray.address, spec.ray.namespace, arguments)

    async def run(self) -> None:
        """Run until the fleet is down or until SIGTERM, which leaves the fleet as it is."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        server = await asyncio.start_unix_server(
            self._serve_control, self._control, limit=MAX_CONTROL_BYTES
        )
        work = [
            asyncio.create_task(one)
            for one in (self._receive_all(), self._tick_all(), self._place_all())
        ]
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait((*work, stopping), return_when=asyncio.FIRST_COMPLETED)
            for task in work:
                if task.done():
                    task.result()
        finally:
            for task in (*work, stopping):
                task.cancel()
            server.close()
            if self._state.is_over:
                await self._placer.place([])
            await self._placer.close()
            self._socket.close()
        if self._state.is_over:
            # Those whose hosts were lost before they could stop them.
            for process in find_running(self._folder):
                end_leftover(self._folder, process)
            self._folder.remove_state()
            logger.info("fleet %s is down", self._state.spec.name)

    # ------------------------------------------------------------------- reports

    async def _receive_all(self) -> None:
        while True:
            identity, *frames = await self._socket.receive()
            try:
                answer = self._answer(decode_manager_report(frames[0] if frames else b""))
            except WireError as error:
                logger.warning("a report cannot be read: %s", error)
                continue
            except ConfigError as error:
                answer = EngineList(0, [], str(error)[:500])
            except Exception:
                logger.exception("a report cannot be handled")
                continue
            await self._socket.send(identity, encode(answer))

    def _answer(self, report: Report) -> Answer:
        now = self._clock.now()
        if isinstance(report, HostReport):
            return self._state.take_host(report, now)
        addresses = self._state.take_frontend(report, now)
        facts = self._state.facts.get(report.pool, b"")
        return EngineList(self._state.list_version, list(addresses), facts=facts)

    # --------------------------------------------------------------------- ticks

    async def _tick_all(self) -> None:
        """Advance the state at intervals; return when the fleet is down."""
        while not self._state.is_over:
            self._tick()
            await asyncio.sleep(TICK_S)

    def _tick(self) -> None:
        now = self._clock.now()
        self._scaler.set_targets(self._state, now)
        self._state.tick(now)
        content = msgspec.json.encode(self._state.save())
        if content != self._saved:
            write_atomically(self._folder.state, content)
            self._saved = content
            self._has_changed.set()

    async def _place_all(self) -> None:
        while True:
            try:
                await self._placer.place(self._state.places)
            except Exception:
                logger.exception("hosts cannot be placed")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_changed.wait(), 1.0)
            self._has_changed.clear()

    # ------------------------------------------------------------------- control

    async def _serve_control(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer one command: a line of JSON for a line of JSON."""
        try:
            line = await asyncio.wait_for(reader.readline(), 10.0)
            request = msgspec.json.decode(line, type=ControlRequest)
            status = self._obey(request)
        except HeadwayError as error:
            status = msgspec.structs.replace(self._status(), error=str(error))
        except (msgspec.DecodeError, ValueError, TimeoutError, ConnectionError) as error:
            status = msgspec.structs.replace(self._status(), error=f"no command: {error}")
        with contextlib.suppress(ConnectionError):
            writer.write(msgspec.json.encode(status) + b"\n")
            await writer.drain()
        writer.close()

    def _obey(self, request: ControlRequest) -> FleetStatus:
        state, now = self._state, self._clock.now()
        if request.command == "scale":
            state.scale(self._pool_name(request.pool), request.number)
        elif request.command == "drain":
            state.drain(request.member, now)
        elif request.command == "upgrade" and request.spec is not None:
            state.upgrade(request.spec)
        elif request.command == "down":
            state.end(request.is_forced)
        elif request.command != "status":
            raise ConfigError(f"there is no command {request.command[:100]!r}")
        if request.command != "status":
            self._tick()
        return self._status()

    def _pool_name(self, given: str) -> str:
        pools = self._state.spec.pools
        if not given and len(pools) > 1:
            raise ConfigError(f"name a pool with --pool: {self._state.spec.pool_names}")
        return given or pools[0].name

    def _status(self) -> FleetStatus:
        state, now = self._state, self._clock.now()
        members = [
            MemberStatus(
                one.name,
                str(one.role),
                one.pool,
                str(one.phase),
                one.generation,
                one.node,
                one.address,
                one.admin,
                one.pid,
                self._problem_of(one.host, one.problem, now),
                state.host_age_s(one.host, now),
            )
            for one in state.members.values()
        ]
        pools = [
            PoolStatus(
                pool.name,
                pool.model,
                state.targets[pool.name],
                pool.name in state.fixed or pool.engines.most == pool.engines.min,
                self._scaler.need_of(pool.name),
                [pool.engines.min, pool.engines.most],
            )
            for pool in state.spec.pools
        ]
        ray = "" if state.spec.ray is None else state.spec.ray.address
        return FleetStatus(
            state.spec.name,
            state.spec.manager,
            ray,
            state.generation,
            state.is_settled,
            state.is_ending,
            self._placer.problem,
            pools,
            members,
            self._abandoned(),
        )

    def _abandoned(self) -> list[str]:
        """Return the members that nobody stops: those on this machine end with the manager."""
        here = {one.member for one in find_running(self._folder)} if self._state.abandoned else ()
        abandoned = self._state.abandoned.items()
        return [f"{member} on {node}" for member, node in abandoned if member not in here]

    def _problem_of(self, host: str, problem: str, now: float) -> str:
        if self._state.is_heard(host, now):
            return problem
        cpus = next((one.cpus for one in self._state.places if one.name == host), 0.0)
        if self._state.spec.ray is None:
            return "its host is not there"
        return f"Ray does not run its host now, which needs {cpus:g} CPUs"


def main() -> int:
    """Run the manager of a folder."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    root, control, *program = sys.argv[1:]
    folder = FleetFolder(Path(root))
    folder.make()
    lock = take_lock(folder.lock_file("manager"))
    if lock is None:
        logger.error("another manager has this fleet")
        return 1

    async def run() -> None:
        await Manager(folder, Path(control), tuple(program) or PROGRAM).run()

    try:
        asyncio.run(run())
    except (ConfigError, OSError, msgspec.DecodeError) as error:
        logger.error("%s", error)
        return 1
    finally:
        remove_control(Path(control))
        folder.manager.unlink(missing_ok=True)
    return 0


def remove_control(control: Path) -> None:
    """Remove a control socket and its folder."""
    control.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        control.parent.rmdir()


if __name__ == "__main__":
    sys.exit(main())
