"""Fleets that Ray has placed: real nodes, real actors, and their loss."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.support.fleet_loads import NUM_KINDS, bodies, check
from benchmarks.support.managed_fleets import ManagedFleet
from benchmarks.support.ray_cluster import RayCluster
from headway.errors import ConfigError
from tests.fleet.manage.conftest import FAKE
from tests.fleet.manage.test_managed_fleet import run_streams

ROOT = Path(__file__).parents[3]


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    cluster = RayCluster(num_nodes=1)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, cluster.environment[name])
    try:
        yield cluster.start()
    finally:
        cluster.close()


@pytest.mark.full
async def test_streams_do_not_notice_the_loss_of_a_host(
    ray: RayCluster, tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copy(tokenizer_path, tmp_path / "tokenizer.gguf"))
    fleet = ManagedFleet(tmp_path, model, ray=ray, num_engines=1, max_engines=1, fake=FAKE)
    with monkeypatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", "another")
        fleet.client.start(fleet.write())
        with pytest.raises(ConfigError, match="cannot be joined"):
            await asyncio.to_thread(fleet.settle_or_raise)
        fleet.client.abandon()
    await asyncio.to_thread(fleet.up)
    assert len(ray.pids("HostActor")) == 2
    requests = bodies(150, NUM_KINDS)
    references = await run_streams(fleet, requests)
    before = fleet.pids("engine") | fleet.pids("frontend")

    async def kill_hosts() -> None:
        while pids := ray.pids("HostActor"):
            ray.kill_host()
            while ray.pids("HostActor") == pids:
                await asyncio.sleep(0.05)
            if not ray.pids("HostActor"):
                break

    try:
        check(await run_streams(fleet, requests, kill_hosts), references)
        await asyncio.to_thread(fleet.wait_hosts)
        assert fleet.pids("engine") | fleet.pids("frontend") == before
    finally:
        await asyncio.to_thread(fleet.down)
    fleet.check_down()
    assert not ray.pids("HostActor")


@pytest.mark.full
@pytest.mark.model
def test_the_battery_with_the_model(model_path: Path) -> None:
    counts = ["--upgrades=1", "--scales=1", "--hosts=1", "--raylets=1", "--heads=0"]
    command = [sys.executable, "-m", "benchmarks.faults.fleet_ray", str(model_path)]
    run = subprocess.run(
        [*command, *counts, "--streams=8"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.full
def test_the_battery_with_the_fake_engine() -> None:
    command = [sys.executable, "-m", "benchmarks.faults.fleet_ray"]
    counts = ["--upgrades=1", "--scales=1", "--hosts=2", "--raylets=1", "--heads=1"]
    run = subprocess.run([*command, *counts], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
