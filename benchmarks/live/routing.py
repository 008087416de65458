"""Compares rules of the router with engines in real processes, over HTTP.

    python -m benchmarks.live.routing [--loads chat hot ...] [--engines 8] [--share 0.85]
        [--rules ttft least-loaded ...] [--slowness 4] [--seconds 40] [--seeds 3] [--json FILE]
        [--record FOLDER] [--overhead-from FOLDER] [--served FILE] [--simulations 5]
    python -m benchmarks.live.routing --loads mooncake --trace FILE

The loads are those of benchmarks/sim/routing_load.py. Engines compute letters, and their steps take
as long as those of SmolLM2-135M, times `--slowness`, so that eight of them fit two cores.
Everything else is real: engine hosts, scheduler, sockets, frontend, router, API. Each run has a
fleet of its own, and rules take turns. The rate is `--share` of what the rule `ttft` carries in the
simulation, divided by the slowness. Times are in seconds of the real engine, divided by the
slowness. Beside them are those of simulations of the same requests behind the same router: the
median of some with other noise of the steps, and the range of their p99. With `--record` every
decision of the frontend's router is recorded, for `headway replay FOLDER`. `--overhead-from` takes
recordings of an earlier call with the same slowness: simulated engines then need the time between
two steps that real ones were seen to need, per step and per request in it; else they need none.
`--served` takes the JSON file of an earlier call with the same options, and simulates its requests
again instead of serving them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import Any

import httpx

from benchmarks.sim.routing import Outcome as SimulatedOutcome
from benchmarks.sim.routing import Run
from benchmarks.sim.routing import measure as simulate
from benchmarks.sim.routing_load import (
    HOT_TOKENS,
    MAX_TOKENS,
    MOONCAKE_BLOCK,
    Conversation,
    Load,
    check_trace,
    drawn_conversations,
    drawn_prompts,
    traced_requests,
)
from benchmarks.support.arguments import at_least_one
from benchmarks.support.arguments import run as run_benchmark
from benchmarks.support.fleet_loads import client_of
from benchmarks.support.fleets import Fleet
from benchmarks.support.servers import RunningServer
from benchmarks.support.tiny_tokenizers import write_byte_level
from headway.bench.steal import StealMeter, steal_plain, steal_text
from headway.errors import RecordingError
from headway.percentiles import percentile
from headway.record.kinds import ROUTER
from headway.record.reader import RecordingReader, find_recordings
from headway.record.router.entries import SteppedEntry
from headway.routing import RULES, Router
from headway.sim import SMOLLM2_135M, StepProfile

NAMES = ("ttft", "cache-aware", "least-loaded", "round-robin")
NUM_BLOCKS = 2000
CARRIED_RATES = {
    "chat": 42.0 / 8,
    "hot": 69.0 / 8,
    "unique": 58.5 / 8,
    "slow": 34.0 / 8,
    "mooncake": 15.0 / 8,
}
"""Requests per second and engine that `ttft` carries in the simulation, with 8 engines."""
LETTERS = "abcdefgjklmnopqrstuvwxyz"
MERGES = ["1 2"]
"""None of letters, so that an answer is the same tokens again in the next prompt."""
MAX_MISSING = 0.05
"""Difference between served and simulated requests; late turns of conversations may be missing."""
HITS, QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


def _text(name: str, length: int) -> str:
    """Return letters that differ from those of other names."""
    return "".join(random.Random(name).choices(LETTERS, k=length))


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
    simulated_p50_s: float = 0.0
    simulated_p99_s: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Least, median and largest of the simulations."""

    def beside(self, simulated: Sequence[SimulatedOutcome]) -> Outcome:
        """Return this with what simulations of the same requests had."""
        p99s = sorted(one.p99_s for one in simulated)
        return replace(
            self,
            simulated_p50_s=median(one.p50_s for one in simulated),
            simulated_p99_s=(p99s[0], median(p99s), p99s[-1]),
        )


class Clients:
    """Sends the requests of a load, and reads their streams."""

    def __init__(self, client: httpx.AsyncClient, load: Load) -> None:
        self._client = client
        self._load = load
        self._began = 0.0
        self.ttfts_s: list[float] = []
        self.num_failed = 0

    async def run(self) -> None:
        self._began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for at, work in self._work():
                await asyncio.sleep(max(0.0, self._began + at - time.monotonic()))
                group.create_task(work)

    def _work(self) -> Iterator[tuple[float, Coroutine[Any, Any, object]]]:
        """Yield what the requests of the load bring, at their times; tokens are letters."""
        load = self._load
        if load.is_chat:
            for talk in drawn_conversations(load):
                yield talk.at, self._talk(talk)
        elif load.name == "mooncake":
            for one in traced_requests(load):
                text = "".join(_text(f"block {block}", MOONCAKE_BLOCK) for block in one.blocks)
                yield one.at, self._ask(text[: one.num_prompt] or LETTERS[0], one.num_output)
        else:
            hot = _text("hot", HOT_TOKENS)
            for number, one in enumerate(drawn_prompts(load)):
                own = _text(f"prompt {number}", one.num_own)
                yield one.at, self._ask(hot + own if one.is_hot else own, one.num_output)

    async def _talk(self, talk: Conversation) -> None:
        context = _text(f"system {talk.system}", talk.num_system)
        for number, turn in enumerate(talk.turns):
            context += _text(f"{talk.name}.{number}", turn.num_said)
            if len(context) + turn.num_output > MAX_TOKENS:
                return
            context += await self._ask(context, turn.num_output)
            if time.monotonic() + turn.think_s >= self._began + self._load.until_s:
                return
            if not turn.is_last:
                await asyncio.sleep(turn.think_s)

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


def profile_with_overhead(folder: Path, slowness: float) -> StepProfile:
    """Return the step profile with the time between two steps that recorded routers saw."""
    sizes: list[int] = []
    gaps_s: list[float] = []
    for path in find_recordings([folder]):
        before: dict[int, SteppedEntry] = {}
        for entry in RecordingReader.open(path, ROUTER).entries():
            if isinstance(entry, SteppedEntry):
                last = before.get(entry.engine)
                if last is not None and last.num_known:  # else the engine was idle
                    sizes.append(entry.num_scheduled)
                    gaps_s.append(entry.now - last.now - entry.elapsed_s)
                before[entry.engine] = entry
    if len(set(sizes)) < 2:
        raise RecordingError(f"{folder} has too few steps of busy engines")
    per_request_s, constant_s = linear_regression(sizes, gaps_s)
    text = f"between steps: {1e3 * constant_s:.1f} ms, and {1e3 * per_request_s:.2f} ms a request"
    print(f"{text} ({len(sizes)} steps of {folder})", file=sys.stderr)
    return replace(
        SMOLLM2_135M,
        overhead_s=max(0.0, constant_s) / slowness,
        overhead_per_request_s=max(0.0, per_request_s) / slowness,
    )


def _simulate(load: Load, rule: str, args: Any) -> list[SimulatedOutcome]:
    """Return what the same requests see in simulations with the frontend's router."""
    fast = replace(load, rate=load.rate * load.slowness, slowness=1.0, profile=args.profile)
    run = Run(rule, fast, args.engines, NUM_BLOCKS)
    return [simulate(run, Router(RULES[rule]()), seed) for seed in range(args.simulations)]


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
    simulated = _simulate(load, rule, args)
    if args.served is None:
        return _serve(load, rule, args).beside(simulated)
    served = _served_before(args.served, load, rule)
    if abs(served.num_requests / simulated[0].num_requests - 1.0) > MAX_MISSING:
        raise SystemExit(
            f"{name} by {rule} had {served.num_requests} requests, and has "
            f"{simulated[0].num_requests} here: give the --seconds of the earlier call"
        )
    return served.beside(simulated)


def _served_before(path: Path, load: Load, rule: str) -> Outcome:
    """Return what an earlier call measured of the same requests."""
    outcomes = [Outcome(**one) for one in json.loads(path.read_text())["outcomes"]]
    key = load.name, rule, load.seed, load.rate
    for one in outcomes:
        if (one.load, one.rule, one.seed, one.rate) == key:
            return one
    raise SystemExit(f"{path} has no run of {load.name} by {rule} with this seed and rate")


def _serve(load: Load, rule: str, args: Any) -> Outcome:
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        tokenizer = write_byte_level(folder / "tokenizer.gguf", pre="gpt-2", merges=MERGES)
        with contextlib.closing(Fleet(folder, tokenizer)) as fleet:
            for slowness in load.slownesses(args.engines):
                fleet.start_engine(
                    slowness=slowness,
                    num_blocks=NUM_BLOCKS,
                    max_model_len=4096,
                    scheduling_policy="fair",
                )
            limits: dict[str, Any] = {"max_queue_age_s": 600.0, "max_queue_wait_s": 600.0}
            limits |= {"max_num_queued_reqs": 100_000, "max_num_queued_tokens": 100_000_000}
            if args.record is not None:
                limits["record"] = str(args.record.absolute())
            server = fleet.start_frontend(routing=rule, **limits)
            server.wait_ready()
            while server.log.count(" is up: ") < args.engines:
                time.sleep(0.1)
            return asyncio.run(measure(server, load, rule))


def print_table(outcomes: Sequence[Outcome]) -> None:
    """Print means over the seeds, one row per load and rule."""
    print("| load | rule | requests | TTFT p50 / p99, s | simulated | hit rate | goodput |")
    print("|---|---|---|---|---|---|---|")
    for load, rule in dict.fromkeys((one.load, one.rule) for one in outcomes):
        found = [one for one in outcomes if (one.load, one.rule) == (load, rule)]
        p50, p99 = fmean(one.p50_s for one in found), fmean(one.p99_s for one in found)
        low, middle, high = (
            fmean(times) for times in zip(*(one.simulated_p99_s for one in found), strict=True)
        )
        simulated = (
            f"{fmean(one.simulated_p50_s for one in found):.2f} / "
            f"{middle:.2f} ({low:.2f} - {high:.2f})"
        )
        hits, good = fmean(one.hit_rate for one in found), fmean(one.goodput for one in found)
        num_requests = sum(one.num_requests for one in found)
        times = f"{p50:.2f} / {p99:.2f}"
        print(
            f"| {load} | {rule} | {num_requests} | {times} | {simulated} | {hits:.2f} | "
            f"{good:.3f} |"
        )


def write(path: Path | None, outcomes: Sequence[Outcome], meter: StealMeter) -> None:
    """Write what was measured so far."""
    if path is not None:
        steal = steal_plain(meter.read())
        record = {"outcomes": [asdict(one) for one in outcomes], "steal": steal}
        path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = list(CARRIED_RATES)
    parser.add_argument("--loads", nargs="+", choices=names, default=names[:4])
    parser.add_argument("--trace", type=Path, help="trace file of the load mooncake")
    parser.add_argument("--engines", type=at_least_one, default=8)
    parser.add_argument("--share", type=float, default=0.85, help="of the rate that is carried")
    parser.add_argument("--rules", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--slowness", type=float, default=4.0)
    parser.add_argument(
        "--seconds", type=float, default=40.0, help="of the engine's time, after the warm-up"
    )
    parser.add_argument("--seeds", type=at_least_one, default=3)
    parser.add_argument("--simulations", type=at_least_one, default=5, help="of each run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", type=Path, help="folder for recordings of the routers")
    parser.add_argument("--overhead-from", type=Path, help="folder of earlier recordings")
    parser.add_argument("--served", type=Path, help="JSON file of an earlier call")
    args = parser.parse_args()
    check_trace(parser, args.loads, args.trace)
    if args.served is not None and not args.served.is_file():
        parser.error(f"{args.served} is not a file")
    args.profile = SMOLLM2_135M
    if args.overhead_from is not None:
        try:
            args.profile = profile_with_overhead(args.overhead_from, args.slowness)
        except RecordingError as error:
            parser.error(str(error))
    # Leave by an exception, so that a fleet ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    meter = StealMeter()
    outcomes: list[Outcome] = []
    cases: list[tuple[str, str]] = list(product(args.loads, args.rules))
    for seed, (name, rule) in product(range(args.seeds), cases):
        one = run(name, rule, seed, args)
        outcomes.append(one)
        write(args.json, outcomes, meter)
        text = (
            f"seed {seed}, {name}, {rule}: p50 {one.p50_s:.2f} s, p99 {one.p99_s:.2f} s; "
            f"simulated {one.simulated_p50_s:.2f}, {one.simulated_p99_s[1]:.2f} s "
            f"({one.simulated_p99_s[0]:.2f} - {one.simulated_p99_s[2]:.2f})"
        )
        print(f"{text}, {one.num_failed} failed", file=sys.stderr, flush=True)
    print_table(outcomes)
    print(steal_text(meter.read()))
    return 1 if any(one.num_failed for one in outcomes) else 0


if __name__ == "__main__":
    run_benchmark(main)
