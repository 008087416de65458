"""A fleet with a manager, on this machine: real processes, sockets and signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from benchmarks.support.fleet_loads import NUM_KINDS, bodies, check, record_all, until_all_run
from benchmarks.support.history import History
from benchmarks.support.managed_fleets import ManagedFleet
from headway.errors import ConfigError
from headway.fleet.cluster_key import ClusterKey, secure_frontend
from headway.fleet.manage.control import FleetClient
from headway.fleet.manage.processes import find_alive, read_record, wait_end
from tests.fleet.manage.conftest import MakeFleet


async def run_streams(
    fleet: ManagedFleet,
    requests: Sequence[dict[str, Any]],
    fault: Callable[[], Awaitable[None]] | None = None,
) -> list[History]:
    histories = [History() for _ in requests]
    async with fleet.http() as http:
        running = asyncio.create_task(record_all(http, requests, histories))
        if fault is not None:
            await asyncio.wait_for(until_all_run(histories), 30)
            await fault()
        await running
    return histories


async def test_streams_outlive_scaling_hosts_and_an_upgrade(make_fleet: MakeFleet) -> None:
    fleet = make_fleet()
    await asyncio.to_thread(fleet.up)
    requests = bodies(150, NUM_KINDS)
    references = await run_streams(fleet, requests)
    assert not any(one.errors for one in references), references[0].errors
    before = fleet.pids("engine")

    async def kill_hosts_and_manager() -> None:
        """Every host and the manager are lost; the members are not, and are adopted."""
        hosts = fleet.client.folder.machine / "hosts"
        for path in [*hosts.glob("*.json"), fleet.client.folder.manager]:
            record = find_alive(path)
            assert record is not None
            record.send(signal.SIGKILL)
            assert wait_end(record, 5.0)
        with pytest.raises(ConfigError, match="its members go on"):
            fleet.status()
        await asyncio.to_thread(fleet.resume)

    check(await run_streams(fleet, requests, kill_hosts_and_manager), references)
    assert fleet.pids("engine") == before

    async def go_to_zero_and_back() -> None:
        await asyncio.to_thread(fleet.scale, 0)
        await asyncio.to_thread(fleet.scale, 1)

    check(await run_streams(fleet, requests, go_to_zero_and_back), references)

    async def upgrade() -> None:
        await asyncio.to_thread(fleet.upgrade)

    old = fleet.pids("engine") | fleet.pids("frontend")
    check(await run_streams(fleet, requests, upgrade), references)
    assert not old & (fleet.pids("engine") | fleet.pids("frontend"))
    await asyncio.to_thread(fleet.down)
    fleet.check_down()
    with pytest.raises(ConfigError, match="is not up; start it with: headway fleet up"):
        fleet.down()


async def test_a_process_that_ends_is_started_again_on_its_address(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(num_engines=1, num_frontends=0)
    await asyncio.to_thread(fleet.up)
    (engine,) = fleet.members("engine")
    os.kill(engine.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20.0
    while (again := fleet.members("engine")[0]).pid == engine.pid or again.phase != "ready":
        assert time.monotonic() < deadline, again
        await asyncio.sleep(0.1)
    assert again.address == engine.address
    # Nonsense and strangers at the socket of the manager change nothing.
    status = fleet.status()
    with zmq.Context() as context:
        for key in (None, ClusterKey.read(fleet.folder / "cluster.key")):
            socket = context.socket(zmq.DEALER)
            socket.linger = 0
            if key is not None:
                secure_frontend(socket, key)
            socket.connect(status.manager)
            for frame in (b"", b"\xc1", b"\x80" * 1000, os.urandom(500)):
                socket.send(frame)
            assert not socket.poll(200), "nothing that is no report is answered"
            socket.close()
    assert fleet.settle().members == status.members


def test_the_commands_say_what_to_do(make_fleet: MakeFleet, tmp_path: Path) -> None:
    fleet = make_fleet()
    spec = fleet.write()
    client = FleetClient("battery")
    with pytest.raises(ConfigError, match="not up; start it with"):
        client.status()
    fleet.ray = type("Ray", (), {"address": "127.0.0.1:1"})()  # pyright: ignore
    with pytest.raises(ConfigError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        client.start(fleet.write())
    assert not client.has_state
    key = tmp_path / "open.key"
    key.write_text("x" * 40)
    key.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        client.start(type(spec)(spec.name, spec.pools, str(key)))
    run = subprocess.run(
        [sys.executable, "-m", "headway", "fleet", "up", str(tmp_path / "none.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert run.stderr.startswith("headway: error: cannot read") and run.stderr.count("\n") == 1


async def test_an_engine_without_frontend_and_host_ends_with_its_lease(
    make_fleet: MakeFleet,
) -> None:
    fleet = make_fleet(num_engines=1, num_frontends=0, lease_s=2.0)
    await asyncio.to_thread(fleet.up)
    await asyncio.sleep(4.0)
    engine = read_record(fleet.client.folder.pid_file(fleet.members("engine")[0].name))
    assert engine is not None and engine.is_alive, "its host renews the lease"
    manager = find_alive(fleet.client.folder.manager)
    hosts = [find_alive(one) for one in fleet.client.folder.machine.glob("hosts/*.json")]
    for record in (manager, *hosts):
        assert record is not None
        record.send(signal.SIGKILL)
    deadline = time.monotonic() + 10.0
    while engine.is_alive:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
