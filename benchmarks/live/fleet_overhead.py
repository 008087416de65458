"""What a fleet of one engine costs: its tokens/s against `headway serve`, and CPU per token.

    python -m benchmarks.live.fleet_overhead MODEL [--streams 64] [--tokens 64] [--rounds 5]

`headway serve`, and a frontend with one engine on TCP. Both run all the time and take turns, each
round in the other order. Every stream has its own prompt. `ratio` is that of the rounds' tokens/s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.support.fleet_loads import client_of, read_to_end
from benchmarks.support.fleets import Fleet
from benchmarks.support.records import write_record
from benchmarks.support.servers import RunningServer, start_model_server
from headway.bench.steal import StealMeter

WORDS = Path(__file__).parents[2] / "LICENSE"
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}


@dataclass
class Contender:
    """A server, the processes that are not its engine, and its figures by round."""

    name: str
    server: RunningServer
    pids: Sequence[int]
    tokens_per_s: list[float] = field(default_factory=list[float])
    cpu_us: list[float] = field(default_factory=list[float])

    def cpu_s(self) -> float:
        times = [psutil.Process(pid).cpu_times() for pid in self.pids]
        return sum(one.user + one.system for one in times)


async def run_streams(server: RunningServer, bodies: Sequence[dict[str, Any]]) -> None:
    async with client_of(server) as client, asyncio.TaskGroup() as group:
        for body in bodies:
            group.create_task(read_to_end(client, body))


def make_bodies(sampling: str, number: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the requests of a round; no prompt begins as another did."""
    words, draw = WORDS.read_text().split(), random.Random(number)
    options = {"max_tokens": args.tokens, "ignore_eos": True, "stream": True}
    bodies: list[dict[str, Any]] = []
    for stream in range(args.streams):
        at = draw.randrange(len(words) - 60)
        prompt = f"{number} {stream} " + " ".join(words[at : at + draw.randint(5, 60)])
        bodies.append({"prompt": prompt, "seed": stream, **options, **SAMPLINGS[sampling]})
    return bodies


def run_round(one: Contender, bodies: Sequence[dict[str, Any]], num_tokens: int) -> None:
    cpu_s, began_at = one.cpu_s(), time.perf_counter()
    asyncio.run(run_streams(one.server, bodies))
    one.tokens_per_s.append(num_tokens / (time.perf_counter() - began_at))
    one.cpu_us.append(1e6 * (one.cpu_s() - cpu_s) / num_tokens)


def compare(sampling: str, contenders: Sequence[Contender], args: argparse.Namespace) -> None:
    """Run the rounds of one sampling; the first warms up."""
    for number in range(args.rounds + 1):
        bodies = make_bodies(sampling, number, args)
        for one in contenders if number % 2 else reversed(contenders):
            run_round(one, bodies, args.streams * args.tokens)
        print(f"\r{sampling}: {number} of {args.rounds} rounds", end="", file=sys.stderr)
    print("\r", end="", file=sys.stderr)
    for one in contenders:
        del one.tokens_per_s[0], one.cpu_us[0]


def report(sampling: str, contenders: Sequence[Contender]) -> dict[str, Any]:
    serve, fleet = contenders
    ratios = [b / a for a, b in zip(serve.tokens_per_s, fleet.tokens_per_s, strict=True)]
    for one in contenders:
        rates = one.tokens_per_s
        print(
            f"{sampling}, {one.name}: {median(rates):.0f} tokens/s "
            f"({min(rates):.0f} - {max(rates):.0f}), "
            f"{median(one.cpu_us):.0f} us of CPU per token outside of the engine process"
        )
    spread = f"{min(ratios):.3f} - {max(ratios):.3f}"
    print(f"{sampling}: ratio {median(ratios):.3f} ({spread})", flush=True)
    names = ("name", "tokens_per_s", "cpu_us")
    figures = [{name: getattr(one, name) for name in names} for one in contenders]
    return {"sampling": sampling, "ratios": ratios, "contenders": figures}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    limits = ("--max-num-seqs", str(args.streams), "--kv-cache-memory-bytes", "1G")
    results: list[dict[str, Any]] = []
    meter = StealMeter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        serve = start_model_server(args.model, folder / "serve.log", *limits)
        with contextlib.closing(Fleet(folder, args.model)) as fleet:
            try:
                host = fleet.start_model_engine(args.model, *limits).wait_ready()
                frontend = fleet.start_model_frontend(args.model).wait_ready()
                serve.wait_ready()
                for sampling in SAMPLINGS:
                    contenders = (
                        Contender("serve", serve, [serve.process.pid]),
                        Contender("fleet", frontend, [frontend.process.pid, host.process.pid]),
                    )
                    compare(sampling, contenders, args)
                    results.append(report(sampling, contenders))
            finally:
                serve.stop()
    write_record({"streams": args.streams, "results": results}, meter, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
