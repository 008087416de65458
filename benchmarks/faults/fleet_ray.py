"""Upgrades, scales and breaks a fleet that Ray has placed, under streams.

    python -m benchmarks.faults.fleet_ray [MODEL] [--upgrades 3] [--scales 3] [--hosts 10]
        [--raylets 3] [--heads 1] [--heads-back 0] [--streams 16] [--json FILE]

Three Ray nodes on this machine, two engines, one frontend, with the fake engine or with MODEL.
Clients stream all the time; each stream is compared with an undisturbed one: the same tokens, each
once, one end.

    upgrade    every engine, then the frontend, is replaced by a new one
    scale      2 engines, 4, 1, 0, 1, 2; without any engine, requests wait
    host       SIGKILL of the actor of a random host: Ray starts it again, and it adopts its process
    raylet     SIGKILL of a raylet: Ray loses the node, and starts its hosts on another
    head       SIGKILL of the head for two minutes, in which all of Ray ends; then a new cluster
               starts at the same address, and its hosts adopt the processes
    head_back  SIGKILL of the head, which is started again within a minute; its state is in Redis
               (needs redis-server), so that nodes and hosts stay

After host, raylet, head and head_back, engines and frontend must be the same processes as before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support.fleet_loads import PATIENT, bodies
from benchmarks.support.history import History, problems, record
from benchmarks.support.managed_fleets import ManagedFleet
from benchmarks.support.ray_cluster import RayCluster
from benchmarks.support.tiny_tokenizers import write_byte_level
from headway.fleet.manage.messages import MAX_SILENCE_S
from headway.percentiles import percentile

NUM_NODES = 3
HEAD_GONE_S = 120.0
MIN_BACK_S, MAX_BACK_S = 2.0, 40.0
"""Time after which a head with a store is started again; Ray gives up after 60 s."""
STEP_S = 0.01


@dataclass
class Outcome:
    """What one kind of disturbance did to the streams beside it."""

    kind: str
    num_times: int = 0
    num_streams: int = 0
    problems: list[str] = field(default_factory=list[str])
    gaps_s: list[float] = field(default_factory=list[float])
    """Longest gap of each stream."""
    seconds: list[float] = field(default_factory=list[float])
    """How long each disturbance took, until all members were ready."""


class Load:
    """Clients that stream one request after the other, and check each."""

    def __init__(self, fleet: ManagedFleet, requests: Sequence[dict[str, Any]]) -> None:
        self._fleet = fleet
        self._requests = requests
        self._references: list[History] = []

    async def record_references(self) -> None:
        async with self._fleet.http() as http:
            tasks = [asyncio.create_task(record(http, body)) for body in self._requests]
            self._references = list(await asyncio.gather(*tasks))
        errors = [error for one in self._references for error in one.errors]
        if errors:
            raise RuntimeError(errors[0])

    async def run(self, outcome: Outcome, disturb: Callable[[], Awaitable[None]]) -> None:
        """Stream until a disturbance is over; every stream that began must end well."""
        is_over = asyncio.Event()
        async with self._fleet.http() as http, asyncio.TaskGroup() as group:

            async def stream(number: int) -> None:
                while not is_over.is_set():
                    history = await record(http, self._requests[number])
                    found = problems(history, self._references[number])
                    outcome.num_streams += 1
                    outcome.problems += [f"request {number}: {problem}" for problem in found]
                    outcome.gaps_s.append(history.longest_gap_s(0.0))

            for number in range(len(self._requests)):
                group.create_task(stream(number))
            await asyncio.sleep(1.0)
            begun = time.monotonic()
            try:
                await disturb()
            finally:
                is_over.set()
            outcome.seconds.append(time.monotonic() - begun)
            outcome.num_times += 1


class Battery:
    """The disturbances of one fleet on one Ray cluster."""

    def __init__(self, fleet: ManagedFleet, ray: RayCluster, seed: int) -> None:
        self._fleet = fleet
        self._ray = ray
        self._draw = random.Random(seed)

    async def upgrade(self) -> None:
        before = self._fleet.pids("engine") | self._fleet.pids("frontend")
        await asyncio.to_thread(self._fleet.upgrade)
        after = self._fleet.pids("engine") | self._fleet.pids("frontend")
        if before & after:
            raise RuntimeError(f"processes were not replaced: {before & after}")

    async def scale(self) -> None:
        for number in (4, 1):
            await asyncio.to_thread(self._fleet.scale, number)
        # The streams wait: a new engine must be there before failover_s is over.
        await asyncio.to_thread(self._fleet.scale, 0, False)
        while self._fleet.members("engine"):
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        for number in (1, 2):
            await asyncio.to_thread(self._fleet.scale, number)

    async def host(self) -> None:
        number = self._draw.randrange(len(self._ray.pids("HostActor")))
        await self._keep(lambda: self._ray.kill_host(number))

    async def raylet(self) -> None:
        number = self._draw.randrange(NUM_NODES)

        def kill() -> None:
            self._ray.kill_raylet(number)
            self._ray.replace_node(number)

        await self._keep(kill)

    async def head(self) -> None:
        def kill() -> None:
            self._ray.kill_gcs()
            time.sleep(HEAD_GONE_S)
            if left := self._ray.pids("HostActor"):
                raise RuntimeError(f"hosts outlived the head: {left}")
            self._ray.stop()
            self._ray.start()

        await self._keep(kill)

    async def head_back(self) -> None:
        hosts = set(self._ray.pids("HostActor"))

        def kill() -> None:
            self._ray.kill_head()
            time.sleep(self._draw.uniform(MIN_BACK_S, MAX_BACK_S))
            self._ray.start_head()

        await self._keep(kill)
        if lost := hosts - set(self._ray.pids("HostActor")):
            raise RuntimeError(f"hosts were lost with the head: {lost}")

    async def _keep(self, kill: Callable[[], Any]) -> None:
        """Kill a part of Ray; check that all hosts come back, and no process was replaced."""
        before = self._fleet.pids("engine") | self._fleet.pids("frontend")
        await asyncio.to_thread(kill)
        await asyncio.sleep(MAX_SILENCE_S)  # until then the manager has not noticed
        await asyncio.to_thread(self._fleet.wait_hosts)
        after = self._fleet.pids("engine") | self._fleet.pids("frontend")
        if before != after:
            raise RuntimeError(f"processes were replaced: {before}, then {after}")


async def run(arguments: argparse.Namespace, fleet: ManagedFleet, ray: RayCluster) -> list[Outcome]:
    battery = Battery(fleet, ray, arguments.seed)
    max_tokens = 250 if fleet.is_fake else 60
    load = Load(fleet, bodies(max_tokens, arguments.streams))
    await load.record_references()
    outcomes: list[Outcome] = []
    for kind, count in (
        ("upgrade", arguments.upgrades),
        ("scale", arguments.scales),
        ("host", arguments.hosts),
        ("raylet", arguments.raylets),
        ("head_back", arguments.heads_back),
        ("head", arguments.heads),
    ):
        outcome = Outcome(kind)
        for _ in range(count):
            await load.run(outcome, getattr(battery, kind))
        if count:
            outcomes.append(outcome)
            print(describe(outcome), flush=True)
    return outcomes


def describe(outcome: Outcome) -> str:
    gaps = sorted(outcome.gaps_s)
    text = (
        f"{outcome.kind:8} x {outcome.num_times}: {outcome.num_streams} streams, "
        f"{len(outcome.problems)} problems, longest gap p50 {percentile(gaps, 50):.2f} s, "
        f"p99 {percentile(gaps, 99):.2f} s, took {max(outcome.seconds):.1f} s at most"
    )
    return "\n".join([text, *(f"  {one}" for one in outcome.problems[:5])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--upgrades", type=int, default=3)
    parser.add_argument("--scales", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=10)
    parser.add_argument("--raylets", type=int, default=3)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--heads-back", type=int, default=0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.heads_back and arguments.heads:
        parser.error("--heads-back keeps the state of Ray, --heads loses it: run them apart")
    if arguments.heads_back and shutil.which("redis-server") is None:
        parser.error("--heads-back needs redis-server")
    with tempfile.TemporaryDirectory(prefix="fleet-ray-") as name:
        folder = Path(name)
        ray = RayCluster(NUM_NODES, has_store=arguments.heads_back > 0).start()
        os.environ.update(ray.environment)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        model = arguments.model or write_byte_level(folder / "tokenizer.gguf", pre="gpt-2")
        fleet = ManagedFleet(folder, model, arguments.model is None, ray)
        fleet.fake = {"step_s": STEP_S, "num_blocks": 4096}
        fleet.frontend = {**PATIENT}
        try:
            fleet.up()
            outcomes = asyncio.run(run(arguments, fleet, ray))
        finally:
            if fleet.client.has_state:
                fleet.down()
            ray.close()
        fleet.check_down()
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=2))
    return 1 if any(one.problems for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
