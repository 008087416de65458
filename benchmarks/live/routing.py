"""Compares rules of the router with engines in real processes, over HTTP.

    python -m benchmarks.live.routing [--loads chat hot ...] [--engines 8] [--share 0.85]
        [--rules ttft least-loaded ...] [--slowness 4] [--seconds 40] [--seeds 3] [--json FILE]
    python -m benchmarks.live.routing --loads mooncake --trace FILE

The loads are those of benchmarks/sim/routing_load.py. Engines compute letters, and their steps take
as long as those of SmolLM2-135M, times `--slowness`, so that eight of them fit two cores.
Everything else is real: engine hosts, scheduler, sockets, frontend, router, API. Each run has a
fleet of its own, and rules take turns. The rate is `--share` of what the rule `ttft` carries in the
simulation, divided by the slowness. Times are in seconds of the real engine, divided by the
slowness.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx

from benchmarks.sim.routing_load import (
    HOT_SHARES,
    MAX_TOKENS,
    MEAN_TURNS,
    MOONCAKE_BLOCK,
    NUM_SYSTEM_PROMPTS,
    THINK_S,
    Load,
    check_trace,
    draw_length,
    traced_requests,
)
from benchmarks.support.fleet_loads import client_of
from benchmarks.support.fleets import Fleet
from benchmarks.support.servers import RunningServer
from benchmarks.support.tiny_tokenizers import write_byte_level
from headway.bench.steal import StealMeter, steal_plain, steal_text
from headway.percentiles import percentile

RULES = ("ttft", "cache-aware", "least-loaded", "round-robin")
CARRIED_RATES = {
    "chat": 42.0 / 8,
    "hot": 69.0 / 8,
    "unique": 58.5 / 8,
    "slow": 34.0 / 8,
    "mooncake": 15.0 / 8,
}
"""Requests per second and engine that `ttft` carries in the simulation, with 8 engines."""
LETTERS = "abcdefgjklmnopqrstuvwxyz"
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


def _text(draw: random.Random, length: int) -> str:
    return "".join(draw.choices(LETTERS, k=length))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run measured, in seconds of a machine of slowness 1."""

    load: str
    rule: str
    seed: int
    rate: float
    num_requests: int
    p50_s: float
    p99_s: float
    hit_rate: float
    goodput: float
    """Share of requests with a TTFT of at most one second."""
    num_failed: int


class Clients:
    """Sends the requests of a load, and reads their streams."""

    def __init__(self, client: httpx.AsyncClient, load: Load) -> None:
        self._client = client
        self._load = load
        self._draw = random.Random(f"{load.name}/{load.seed}")
        self._hot = _text(self._draw, 1024)
        self._systems = [
            _text(self._draw, self._draw.randint(256, 1024)) for _ in range(NUM_SYSTEM_PROMPTS)
        ]
        self._weights = [1.0 / (1 + rank) for rank in range(NUM_SYSTEM_PROMPTS)]
        self._began = 0.0
        self.ttfts_s: list[float] = []
        self.num_failed = 0

    async def run(self) -> None:
        self._began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for at, work in self._traced() if self._load.name == "mooncake" else self._drawn():
                await asyncio.sleep(max(0.0, self._began + at - time.monotonic()))
                group.create_task(work)

    def _traced(self) -> Iterator[tuple[float, Coroutine[Any, Any, object]]]:
        """Yield the requests of a trace: prompts that share blocks share letters."""
        for one in traced_requests(self._load):
            text = "".join(_text(random.Random(block), MOONCAKE_BLOCK) for block in one.blocks)
            yield one.at, self._ask(text[: one.num_prompt] or LETTERS[0], one.num_output)

    def _drawn(self) -> Iterator[tuple[float, Coroutine[Any, Any, object]]]:
        """Yield conversations or prompts, at random times."""
        is_chat = self._load.is_chat
        rate = self._load.rate / MEAN_TURNS if is_chat else self._load.rate
        at = 0.0
        while (at := at + self._draw.expovariate(rate)) < self._load.until_s:
            (system,) = self._draw.choices(self._systems, self._weights)
            draw = random.Random(self._draw.random())
            yield at, self._talk(system, draw) if is_chat else self._ask_once(draw)

    async def _ask_once(self, draw: random.Random) -> None:
        is_hot = draw.random() < HOT_SHARES[self._load.name]
        own = _text(draw, draw_length(draw, 128 if self._load.name == "hot" else 256, 16, 2048))
        await self._ask(self._hot + own if is_hot else own, draw_length(draw, 48, 4, 256))

    async def _talk(self, context: str, draw: random.Random) -> None:
        while time.monotonic() < self._began + self._load.until_s:
            context += _text(draw, draw_length(draw, 128, 8, 512))
            num_output = draw_length(draw, 64, 4, 256)
            if len(context) + num_output > MAX_TOKENS:
                return
            context += await self._ask(context, num_output)
            if draw.random() < 1.0 / MEAN_TURNS:
                return
            think_s = draw.expovariate(1.0 / (self._load.slowness * THINK_S))
            if time.monotonic() + think_s >= self._began + self._load.until_s:
                return
            await asyncio.sleep(think_s)

    async def _ask(self, prompt: str, num_output: int) -> str:
        """Return the answer to a prompt, and note its time to the first token."""
        body = {"prompt": prompt, "max_tokens": num_output, "seed": 0, "stream": True}
        began, first_at, answer = time.monotonic(), 0.0, ""
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    first_at = first_at or time.monotonic()
                    event = json.loads(line.removeprefix("data: "))
                    answer += event["choices"][0]["text"] if "choices" in event else ""
        if response.status_code != 200 or not answer:
            self.num_failed += 1
        elif began >= self._began + self._load.warm_up_s:
            self.ttfts_s.append((first_at - began) / self._load.slowness)
        return answer


async def measure(server: RunningServer, load: Load, rule: str) -> Outcome:
    async with client_of(server) as client:
        clients = Clients(client, load)
        await clients.run()
    hits = await asyncio.to_thread(server.metric, HITS)
    queries = await asyncio.to_thread(server.metric, QUERIES)
    ttfts = sorted(clients.ttfts_s)
    return Outcome(
        load.name,
        rule,
        load.seed,
        load.rate,
        len(ttfts),
        percentile(ttfts, 50),
        percentile(ttfts, 99),
        hits / queries,
        sum(ttft <= 1.0 for ttft in ttfts) / len(ttfts),
        clients.num_failed,
    )


def run(name: str, rule: str, seed: int, args: Any) -> Outcome:
    """Measure one rule with a fleet of its own."""
    rate = args.share * CARRIED_RATES[name] * args.engines / args.slowness
    load = Load(name, rate, args.seconds, seed, args.trace, args.slowness)
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        tokenizer = write_byte_level(folder / "tokenizer.gguf", pre="gpt-2")
        with contextlib.closing(Fleet(folder, tokenizer)) as fleet:
            for slowness in load.slownesses(args.engines):
                fleet.start_engine(
                    slowness=slowness,
                    num_blocks=2000,
                    max_model_len=4096,
                    scheduling_policy="fair",
                )
            limits = {"max_queue_age_s": 600.0, "max_queue_wait_s": 600.0}
            limits |= {"max_num_queued_reqs": 100_000, "max_num_queued_tokens": 100_000_000}
            server = fleet.start_frontend(routing=rule, **limits)
            server.wait_ready()
            while server.log.count(" is up: ") < args.engines:
                time.sleep(0.1)
            return asyncio.run(measure(server, load, rule))


def print_table(outcomes: Sequence[Outcome]) -> None:
    """Print means over the seeds, one row per load and rule."""
    print("| load | rule | requests | TTFT p50 / p99, s | hit rate | goodput |")
    print("|---|---|---|---|---|---|")
    for load, rule in dict.fromkeys((one.load, one.rule) for one in outcomes):
        found = [one for one in outcomes if (one.load, one.rule) == (load, rule)]
        p50, p99 = fmean(one.p50_s for one in found), fmean(one.p99_s for one in found)
        hits, good = fmean(one.hit_rate for one in found), fmean(one.goodput for one in found)
        num_requests = sum(one.num_requests for one in found)
        times = f"{p50:.2f} / {p99:.2f}"
        print(f"| {load} | {rule} | {num_requests} | {times} | {hits:.2f} | {good:.3f} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = list(CARRIED_RATES)
    parser.add_argument("--loads", nargs="+", choices=names, default=names[:4])
    parser.add_argument("--trace", type=Path, help="trace file of the load mooncake")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.85, help="of the rate that is carried")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--slowness", type=float, default=4.0)
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="of the engine's time, after the warm-up"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    check_trace(parser, args.loads, args.trace)
    meter = StealMeter()
    outcomes: list[Outcome] = []
    cases: list[tuple[str, str]] = list(product(args.loads, args.rules))
    for seed, (name, rule) in product(range(args.seeds), cases):
        one = run(name, rule, seed, args)
        outcomes.append(one)
        text = f"seed {seed}, {name}, {rule}: p50 {one.p50_s:.2f} s, p99 {one.p99_s:.2f} s"
        print(f"{text}, {one.num_failed} failed", file=sys.stderr, flush=True)
    steal = meter.read()
    print_table(outcomes)
    print(steal_text(steal))
    if args.json is not None:
        record = {"outcomes": [asdict(one) for one in outcomes], "steal": steal_plain(steal)}
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if any(one.num_failed for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
