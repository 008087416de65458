"""Fleets with a manager, on this machine or placed by Ray, with the fake engine or a model."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import yaml

from benchmarks.support.fake_engine import Settings
from benchmarks.support.ray_cluster import RayCluster
from benchmarks.support.servers import ServerFailed, free_port
from headway.errors import ConfigError
from headway.fleet.manage.control import ControlRequest, FleetClient, FleetStatus, MemberStatus
from headway.fleet.manage.spec import FleetSpec, read_spec

FAKE_PROGRAM = (sys.executable, "-m", "benchmarks.support.fake_headway")
MODEL_SETTINGS = {"kv_cache_memory_bytes": "64M"}


@dataclass
class ManagedFleet:
    """A fleet of one pool, its file and its manager."""

    folder: Path
    model: Path
    is_fake: bool = True
    ray: RayCluster | None = None
    name: str = "battery"
    num_engines: int = 2
    max_engines: int = 4
    num_frontends: int = 1
    cpus: float = 1.0
    lease_s: float = 600.0
    fake: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings of the fake engine."""
    frontend: dict[str, Any] = field(default_factory=dict[str, Any])
    port: int = field(default_factory=free_port)

    @property
    def path(self) -> Path:
        return self.folder / "fleet.yaml"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> FleetClient:
        return FleetClient(self.name)

    def write(self, **engine_settings: object) -> FleetSpec:
        """Write the file of the fleet, and read it."""
        if self.is_fake:
            settings = msgspec.json.encode(Settings(**self.fake))
            self.model.with_suffix(".json").write_bytes(settings)
        engines: dict[str, Any] = {
            "min": self.num_engines,
            "max": self.max_engines,
            "cpus": self.cpus,
            "lease_s": self.lease_s,
            "settings": {**({} if self.is_fake else MODEL_SETTINGS), **engine_settings},
        }
        ledger = {} if self.is_fake else {"ledger_url": "none", "max_queue_age_s": 300}
        frontends: dict[str, Any] = {
            "count": self.num_frontends,
            "port": self.port,
            "settings": {"routing": "least-loaded", **ledger, **self.frontend},
        }
        pool = {"name": "one", "model": str(self.model), "engines": engines, "frontends": frontends}
        content: dict[str, Any] = {
            "name": self.name,
            "cluster_key_file": "cluster.key",
            "pools": [pool],
        }
        if self.ray is not None:
            content["ray"] = {"address": self.ray.address}
        self.path.write_text(yaml.safe_dump(content, sort_keys=False))
        return read_spec(self.path)

    def up(self, timeout_s: float = 120.0) -> FleetStatus:
        """Start the fleet, with numbers set by hand, and wait until it is ready."""
        self.client.start(self.write(), FAKE_PROGRAM if self.is_fake else ())
        self.scale(self.num_engines, waits=False)
        return self.settle(timeout_s)

    def resume(self) -> FleetStatus:
        """Start a manager after the one before it was lost."""
        self.client.start(self.write(), FAKE_PROGRAM if self.is_fake else ())
        return self.settle()

    def status(self) -> FleetStatus:
        return self.client.status()

    def settle(self, timeout_s: float = 120.0) -> FleetStatus:
        """Wait until every member is ready and no other is left."""
        deadline = time.monotonic() + timeout_s
        while not (status := self.status()).is_settled:
            if time.monotonic() > deadline:
                raise ServerFailed(f"the fleet is not ready in time: {status}")
            time.sleep(0.1)
        return status

    def settle_or_raise(self) -> FleetStatus:
        """Wait as `headway fleet up` does; raise ConfigError if Ray cannot be joined."""
        while not (status := self.status()).is_settled:
            if "cannot be joined" in status.problem:
                raise ConfigError(status.problem)
            time.sleep(0.1)
        return status

    def wait_hosts(self, timeout_s: float = 120.0) -> None:
        """Wait until every member is ready and has its host."""
        deadline = time.monotonic() + timeout_s
        while any(one.problem for one in self.settle(timeout_s).members):
            if time.monotonic() > deadline:
                raise ServerFailed(f"hosts are not back: {self.status()}")
            time.sleep(0.1)

    def scale(self, number: int, waits: bool = True, timeout_s: float = 120.0) -> None:
        self.client.ask(ControlRequest("scale", number=number))
        if waits:
            self.settle(timeout_s)

    def drain(self, member: str) -> None:
        self.client.ask(ControlRequest("drain", member=member))
        self.settle()

    def upgrade(self, timeout_s: float = 300.0) -> None:
        self.client.ask(ControlRequest("upgrade", spec=self.write()))
        self.settle(timeout_s)

    def down(self, is_forced: bool = False) -> None:
        self.client.down(lambda _status: None, is_forced)

    def members(self, role: str) -> list[MemberStatus]:
        return [one for one in self.status().members if one.role == role]

    def pids(self, role: str) -> set[int]:
        return {one.pid for one in self.members(role)}

    def http(self, max_idle: int | None = None) -> httpx.AsyncClient:
        """Return a client that keeps so many idle connections; None: all of them.

        A frontend that leaves waits for idle connections to end, at most 75 s.
        """
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=max_idle)
        return httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits)

    def processes(self) -> Sequence[str]:
        """Return every process of this fleet: each has its folder or its key in its command."""
        marks = (str(self.client.folder.root), str(self.folder))
        found: list[str] = []
        for process in psutil.process_iter(["cmdline", "pid"]):
            words = process.info["cmdline"] or []
            is_other = any(
                one in " ".join(words) for one in ("fleet_ray", "fleet_models", "pytest", "raylet")
            )
            if not is_other and any(mark in word for word in words for mark in marks):
                found.append(f"{process.pid} {' '.join(words)[:200]}")
        return found

    def check_down(self) -> None:
        """Check that no process, pid file or state is left."""
        left = self.processes()
        if left:
            raise ServerFailed(f"processes are left: {left}")
        files = [str(one) for one in self.client.folder.root.rglob("*.json")]
        if files:
            raise ServerFailed(f"files are left: {files}")
