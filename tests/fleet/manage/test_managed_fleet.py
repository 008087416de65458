"""A fleet with a manager, on this machine: real processes, sockets and signals."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from benchmarks.support.fleet_loads import NUM_KINDS, bodies, check, record_all, until_all_run
from benchmarks.support.history import History
from benchmarks.support.managed_fleets import ManagedFleet
from headway.errors import ConfigError
from headway.fleet.manage.control import ControlRequest, FleetClient
from headway.fleet.manage.members import SavedFleet
from headway.fleet.manage.processes import find_alive, read_record, wait_end
from headway.fleet.manage.spec import RaySpec
from headway.fleet.network.cluster_key import ClusterKey, secure_frontend
from tests.fleet.manage.conftest import MakeFleet


async def run_streams(
    fleet: ManagedFleet,
    requests: Sequence[dict[str, Any]],
    fault: Callable[[], Awaitable[None]] | None = None,
) -> list[History]:
    histories = [History() for _ in requests]
    async with fleet.http(max_idle=0) as http:
        running = asyncio.create_task(record_all(http, requests, histories))
        if fault is not None:
            await asyncio.wait_for(until_all_run(histories), 30)
            await fault()
        await running
    return histories


async def test_streams_outlive_hosts_the_manager_and_an_upgrade(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(num_engines=1)
    await asyncio.to_thread(fleet.up)
    requests = bodies(150, NUM_KINDS)
    references = await run_streams(fleet, requests)
    assert not any(one.errors for one in references), references[0].errors
    before = fleet.pids("engine") | fleet.pids("frontend")

    async def kill_hosts_and_manager() -> None:
        """Every host and the manager are lost; the members are not, and are adopted."""
        kill_above_members(fleet)
        with pytest.raises(ConfigError, match="its members go on"):
            fleet.status()
        await asyncio.to_thread(fleet.resume)

    check(await run_streams(fleet, requests, kill_hosts_and_manager), references)
    assert fleet.pids("engine") | fleet.pids("frontend") == before

    async def upgrade() -> None:
        await asyncio.to_thread(fleet.upgrade)

    old = fleet.pids("engine") | fleet.pids("frontend")
    check(await run_streams(fleet, requests, upgrade), references)
    assert not old & (fleet.pids("engine") | fleet.pids("frontend"))
    await asyncio.to_thread(fleet.down)
    fleet.check_down()
    with pytest.raises(ConfigError, match="is not up; start it with: headway fleet up"):
        fleet.down()


def test_down_without_ray_says_what_to_do(make_fleet: MakeFleet) -> None:
    """Ray is gone, and all hosts with it; the members go on."""
    fleet = make_fleet(num_engines=1, num_frontends=0)
    fleet.up()
    before = fleet.pids("engine")
    kill_above_members(fleet)
    shutil.rmtree(fleet.client.folder.machine / "hosts")
    state = fleet.client.folder.state
    saved = msgspec.json.decode(state.read_bytes(), type=SavedFleet)
    spec = msgspec.structs.replace(saved.spec, ray=RaySpec("127.0.0.1:1"))
    state.write_bytes(msgspec.json.encode(msgspec.structs.replace(saved, spec=spec)))
    began_at = time.monotonic()
    with pytest.raises(ConfigError, match=r"no Ray .* start Ray there again .* battery --force"):
        fleet.down()
    assert time.monotonic() - began_at < 15.0
    assert all(psutil.pid_exists(pid) for pid in before) and not fleet.status().is_ending
    run = subprocess.run(
        [sys.executable, "-m", "headway", "fleet", "down", "--force"],
        capture_output=True,
        text=True,
        timeout=25,
        check=False,
    )
    assert run.returncode == 0 and "fleet battery is down" in run.stderr, run.stderr
    assert "out of reach" not in run.stderr, "all of it was on this machine"
    fleet.check_down()


def kill_above_members(fleet: ManagedFleet) -> None:
    """Kill the manager and every host."""
    hosts = fleet.client.folder.machine / "hosts"
    for path in [fleet.client.folder.manager, *hosts.glob("*.json")]:
        record = find_alive(path)
        assert record is not None
        record.send(signal.SIGKILL)
        assert wait_end(record, 5.0)


@pytest.mark.full
async def test_a_frontend_that_has_seen_no_engine_has_requests_wait(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(num_engines=1)
    await asyncio.to_thread(fleet.up)
    requests = bodies(150, NUM_KINDS)
    references = await run_streams(fleet, requests)

    async def go_to_zero_and_back() -> None:
        await asyncio.to_thread(fleet.scale, 0)
        await asyncio.to_thread(fleet.scale, 1)

    check(await run_streams(fleet, requests, go_to_zero_and_back), references)
    await asyncio.to_thread(fleet.scale, 0)
    (frontend,) = fleet.pids("frontend")
    os.kill(frontend, signal.SIGKILL)
    while frontend in fleet.pids("frontend"):
        await asyncio.sleep(0.1)
    await asyncio.to_thread(fleet.settle)
    waiting = asyncio.create_task(run_streams(fleet, requests))
    await asyncio.sleep(0.5)
    await asyncio.to_thread(fleet.scale, 1)
    check(await waiting, references)


@pytest.mark.full
async def test_requests_that_wait_bring_an_engine_back(make_fleet: MakeFleet) -> None:
    """Autoscaling, from none: nobody sets a number."""
    fleet = make_fleet(num_engines=1, max_engines=2)
    await asyncio.to_thread(fleet.up)
    requests = bodies(50, NUM_KINDS)
    references = await run_streams(fleet, requests)
    fleet.num_engines = 0
    await asyncio.to_thread(fleet.upgrade)
    await asyncio.to_thread(fleet.scale, 0)
    fleet.client.ask(ControlRequest("scale"))  # back to autoscaling
    assert not fleet.status().pools[0].is_fixed
    check(await run_streams(fleet, requests), references)
    assert fleet.pids("engine")


@pytest.mark.full
async def test_an_engine_is_started_again_and_ends_with_its_lease(make_fleet: MakeFleet) -> None:
    fleet = make_fleet(num_engines=1, num_frontends=0, lease_s=2.0)
    await asyncio.to_thread(fleet.up)
    (engine,) = fleet.members("engine")
    os.kill(engine.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30.0
    while (again := fleet.members("engine")[0]).pid == engine.pid or again.phase != "ready":
        assert time.monotonic() < deadline, again
        await asyncio.sleep(0.1)
    assert again.address == engine.address
    status = fleet.status()
    send_nonsense(status.manager, fleet.folder / "cluster.key")
    await asyncio.sleep(3.0)
    assert fleet.settle().members == status.members, "its host renews the lease"
    record = read_record(fleet.client.folder.pid_file(again.name))
    assert record is not None and record.is_alive
    kill_above_members(fleet)
    assert await asyncio.to_thread(wait_end, record, 20.0)


def send_nonsense(manager: str, key_file: Path) -> None:
    """Send frames that are no reports, with and without the cluster key."""
    with zmq.Context() as context:
        for key in (None, ClusterKey.read(key_file)):
            stranger = context.socket(zmq.DEALER)
            stranger.linger = 0
            if key is not None:
                secure_frontend(stranger, key)
            stranger.connect(manager)
            for frame in (b"", b"\xc1", b"\x80" * 1000, os.urandom(500)):
                stranger.send(frame)
            assert not stranger.poll(200), "nothing that is no report is answered"
            stranger.close()


def test_the_commands_say_what_to_do(
    make_fleet: MakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make_fleet()
    spec = fleet.write()
    client = FleetClient("battery")
    with pytest.raises(ConfigError, match="not up; start it with"):
        client.status()
    fleet.ray = type("Ray", (), {"address": "127.0.0.1:1"})()  # pyright: ignore
    with pytest.raises(ConfigError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        client.start(fleet.write())
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda _name: None)
        with pytest.raises(ConfigError, match=r"pip install 'headway\[ray\]'"):
            client.start(fleet.write())
    fleet.ray = None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"cannot listen .*`manager:` in the file"):
            client.start(msgspec.structs.replace(spec, manager=address))
    assert not client.has_state
    key = tmp_path / "open.key"
    key.write_text("x" * 40)
    key.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        client.start(msgspec.structs.replace(spec, cluster_key_file=str(key)))
    run = subprocess.run(
        [sys.executable, "-m", "headway", "fleet", "up", str(tmp_path / "none.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert run.stderr.startswith("headway: error: cannot read") and run.stderr.count("\n") == 1
