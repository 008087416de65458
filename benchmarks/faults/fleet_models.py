"""Moves engines between two models of a fleet by demand, under streams.

    python -m benchmarks.faults.fleet_models [MODEL OTHER] [--moves 4] [--streams 32] [--json FILE]

A fleet of two pools with at most three engines in all, with fake engines of two numerics classes or
with two models. One pool gets many streams at a time, the other one stream, until the first has two
engines; then they change places. An engine that moves is drained, so its streams go on elsewhere.
Every stream is compared with an undisturbed one: the same tokens, each once, one end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import yaml

from benchmarks.support.fake_engine import Settings
from benchmarks.support.fleet_loads import PATIENT
from benchmarks.support.history import History, problems, record
from benchmarks.support.managed_fleets import FAKE_PROGRAM, MODEL_SETTINGS, ManagedFleet
from benchmarks.support.servers import free_port
from benchmarks.support.tiny_tokenizers import write_byte_level
from headway.fleet.manage.spec import FleetSpec, read_spec
from headway.percentiles import percentile

NAMES = ("first", "second")
MAX_ENGINES = 3
MAX_MOVE_S = 240.0
NUM_TOKENS, NUM_PROMPT = 60, 900
FAKE = {"slowness": 2.0, "num_blocks": 2048, "max_num_seqs": 16}


class TwoModels(ManagedFleet):
    """A fleet of two pools, scaled by demand, with one port each."""

    def __init__(self, folder: Path, models: Sequence[Path], is_fake: bool) -> None:
        super().__init__(folder, models[0], is_fake, name="models")
        self._models = models
        self._ports = [free_port() for _ in NAMES]

    def write(self, **engine_settings: object) -> FleetSpec:
        pools: list[dict[str, Any]] = []
        for name, model, port in zip(NAMES, self._models, self._ports, strict=True):
            if self.is_fake:
                settings = Settings(**FAKE, numerics=name)  # pyright: ignore
                model.with_suffix(".json").write_bytes(msgspec.json.encode(settings))
            engines = {"min": 1, "max": 2, "settings": {} if self.is_fake else MODEL_SETTINGS}
            of_frontends: dict[str, Any] = {**PATIENT}
            if not self.is_fake:
                of_frontends["ledger_url"] = "none"
            frontends = {"count": 1, "port": port, "settings": of_frontends}
            pool = {"name": name, "model": str(model), "engines": engines, "frontends": frontends}
            pools.append(pool)
        key = {"cluster_key_file": "cluster.key", "max_engines": MAX_ENGINES}
        self.path.write_text(yaml.safe_dump({"name": self.name, "pools": pools, **key}))
        return read_spec(self.path)

    def up(self, timeout_s: float = 120.0) -> Any:
        self.client.start(self.write(), FAKE_PROGRAM if self.is_fake else ())
        return self.settle(timeout_s)

    def http_of(self, number: int) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        url = f"http://127.0.0.1:{self._ports[number]}"
        return httpx.AsyncClient(base_url=url, timeout=300, limits=limits)

    def num_ready(self, number: int) -> int:
        engines = (one for one in self.members("engine") if one.pool == NAMES[number])
        return sum(one.phase == "ready" for one in engines)


@dataclass
class Moves:
    """What the moves did to the streams beside them."""

    num_moves: int = 0
    num_streams: int = 0
    problems: list[str] = field(default_factory=list[str])
    gaps_s: list[float] = field(default_factory=list[float])
    """Longest gap of each stream after its first token."""
    seconds: list[float] = field(default_factory=list[float])
    """From the change of the load until the engine of the other pool was ready."""


def make_requests(num_streams: int) -> list[dict[str, Any]]:
    """Streams of four kinds, with long prompts: they are work."""
    kinds: list[dict[str, Any]] = [{}, {"n": 2}, {"temperature": 0}, {"logprobs": 1, "top_p": 0.9}]
    return [
        {
            "prompt": f"{number} " + "abcdefgh " * (NUM_PROMPT // 9),
            "seed": number,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            **kinds[number % len(kinds)],
        }
        for number in range(num_streams)
    ]


class Battery:
    """Streams at both pools, and the moves so far."""

    def __init__(self, fleet: TwoModels, requests: Sequence[dict[str, Any]]) -> None:
        self._fleet = fleet
        self._requests = requests
        self._references: list[list[History]] = []
        self.moves = Moves()

    async def record_references(self) -> None:
        for number in range(len(NAMES)):
            async with self._fleet.http_of(number) as http:
                found = [await record(http, body) for body in self._requests[:4]]
                tasks = [record(http, body) for body in self._requests[4:]]
                found += await asyncio.gather(*tasks)
            if errors := [error for one in found for error in one.errors]:
                raise RuntimeError(errors[0])
            self._references.append(found)

    async def move(self, busy: int) -> None:
        """Load one pool until it has two engines."""
        is_over, moves = asyncio.Event(), self.moves

        async def stream(http: httpx.AsyncClient, pool: int, number: int) -> None:
            while not is_over.is_set():
                history = await record(http, self._requests[number])
                found = problems(history, self._references[pool][number])
                moves.num_streams += 1
                moves.problems += [f"{NAMES[pool]}, request {number}: {one}" for one in found]
                moves.gaps_s.append(history.longest_gap_s(0.0))

        begun = time.monotonic()
        async with (
            self._fleet.http_of(busy) as many,
            self._fleet.http_of(1 - busy) as few,
            asyncio.TaskGroup() as group,
        ):
            for number in range(len(self._requests)):
                group.create_task(stream(many, busy, number))
            group.create_task(stream(few, 1 - busy, 0))
            try:
                while self._fleet.num_ready(busy) < 2 or self._fleet.num_ready(1 - busy) != 1:
                    if time.monotonic() - begun > MAX_MOVE_S:
                        raise RuntimeError(f"no engine has moved: {self._fleet.status()}")
                    await asyncio.sleep(0.2)
                moves.seconds.append(time.monotonic() - begun)
                moves.num_moves += 1
                await asyncio.sleep(2.0)
            finally:
                is_over.set()


async def run(fleet: TwoModels, num_moves: int, requests: list[dict[str, Any]]) -> Moves:
    battery = Battery(fleet, requests)
    await battery.record_references()
    for number in range(num_moves):
        await battery.move(number % len(NAMES))
        moves = battery.moves
        text = f"move {number + 1} of {num_moves}: {moves.seconds[-1]:.1f} s"
        print(f"{text}, {len(moves.problems)} problems", file=sys.stderr, flush=True)
    return battery.moves


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", type=Path, metavar="MODEL")
    parser.add_argument("--moves", type=int, default=4)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if len(arguments.models) not in (0, len(NAMES)):
        parser.error("name two models, or none for the fake engine")
    with tempfile.TemporaryDirectory(prefix="fleet-models-") as name:
        folder = Path(name)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        models: list[Path] = arguments.models or [
            write_byte_level(folder / f"{one}.gguf", pre="gpt-2") for one in NAMES
        ]
        fleet = TwoModels(folder, models, not arguments.models)
        try:
            fleet.up()
            moves = asyncio.run(run(fleet, arguments.moves, make_requests(arguments.streams)))
        finally:
            if fleet.client.has_state:
                fleet.down()
        fleet.check_down()
    gaps = sorted(moves.gaps_s)
    print(
        f"{moves.num_moves} moves, {min(moves.seconds):.0f} - {max(moves.seconds):.0f} s each; "
        f"{moves.num_streams} streams, {len(moves.problems)} problems, longest gap p50 "
        f"{percentile(gaps, 50):.2f} s, p99 {percentile(gaps, 99):.2f} s"
    )
    for problem in moves.problems[:10]:
        print(f"  {problem[:500]}", file=sys.stderr)
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(moves), indent=1) + "\n")
    return 1 if moves.problems else 0


if __name__ == "__main__":
    sys.exit(main())
