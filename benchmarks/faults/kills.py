"""Kills the engine under streams of the real model; measures the longest gap of each kill.

    python -m benchmarks.faults.kills MODEL [--streams 16 128] [--kills 50] [--standby]
        [--damage] [--json FILE]

Each kill is a SIGKILL at a random moment under streams that have all begun. Every answer must equal
the answer of the same request without a kill. The gap of a kill is the longest time between two
tokens of any stream after it. `recomputed` is the number of tokens that the next engine computed
again per stream, from the ledger. With --damage, the engine is stopped first and bytes of recorded
KV blocks, of their entries or of the header are changed: bits, garbage, zeros.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sqlite3
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.support.servers import RunningServer, start_model_server
from headway.bench.steal import Steal, StealMeter, steal_text
from headway.percentiles import percentile

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
}
MAX_TOKENS = 48
MIN_TOKENS_BEFORE_KILL = 4
WORDS = Path(__file__).parents[2] / "LICENSE"
HEADER_BYTES, ENTRY_BYTES, LARGE_PAGE = 64, 128, 2 * 1024**2
NUM_DAMAGES = 20
"""Blocks that a damage hits, of those with an entry."""


@dataclass
class Answer:
    """Text of one stream, and the time of each of its events."""

    text: str = ""
    times: list[float] = field(default_factory=list[float])


@dataclass
class Result:
    """Figures of the kills under one number of streams with one sampling."""

    sampling: str
    num_streams: int
    gaps_s: list[float] = field(default_factory=list[float])
    num_wrong: int = 0
    num_recomputed: float = 0.0
    steal: Steal | None = None

    def line(self) -> str:
        worst = percentile(self.gaps_s, 99)
        return (
            f"{self.num_streams:4d} streams, {self.sampling}: {len(self.gaps_s)} kills, "
            f"{self.num_wrong} answers wrong, longest gap p50 {median(self.gaps_s):.2f} s, "
            f"p99 {worst:.2f} s, recomputed {self.num_recomputed:.1f} tokens per stream, "
            f"{steal_text(self.steal)}"
        )


def engine_pid(server: RunningServer) -> int:
    """Return the process of the engine that serves now."""
    return int(re.findall(r"engine process (\d+) is ready", server.log)[-1])


def kv_memory(server: RunningServer) -> Path:
    """Return a path that opens the memory of the KV blocks."""
    for path in Path(f"/proc/{server.process.pid}/fd").iterdir():
        if "memfd:headway-kv" in os.readlink(path):
            return path
    raise LookupError("the server holds no KV memory")


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The memory of the KV blocks as headway.executors.cpu.shared_kv lays it out."""

    file: FileIO
    num_layers: int
    num_blocks: int
    block_bytes: int
    used_ids: Sequence[int]
    """Blocks with an entry."""

    @classmethod
    def read(cls, file: FileIO) -> KVMemory:
        file.seek(0)
        shape = struct.unpack_from("<32xQQQ", file.read(HEADER_BYTES))
        entries = file.read(ENTRY_BYTES * shape[1])
        used = [i for i in range(shape[1]) if any(entries[i * ENTRY_BYTES :][:ENTRY_BYTES])]
        return cls(file, *shape, used)

    def entry_at(self, block_id: int) -> int:
        return HEADER_BYTES + block_id * ENTRY_BYTES

    def block_at(self, layer: int, block_id: int) -> int:
        record_end = self.entry_at(self.num_blocks)
        first = -(-record_end // LARGE_PAGE) * LARGE_PAGE
        return first + (layer * self.num_blocks + block_id) * self.block_bytes

    def write(self, at: int, data: bytes) -> None:
        self.file.seek(at)
        self.file.write(data)

    def flip_bit(self, at: int, bit: int) -> None:
        self.file.seek(at)
        self.write(at, bytes([self.file.read(1)[0] ^ 1 << bit]))


def damage(path: Path, draw: random.Random) -> str:
    """Change bytes of recorded KV blocks or of their record; return what was done."""
    with path.open("r+b", buffering=0) as file:
        memory = KVMemory.read(file)
        kind = draw.choice(("bits of blocks", "bits of the record", "garbage", "zeros", "header"))
        for _ in range(1 if kind == "header" else NUM_DAMAGES):
            block_id = draw.choice(memory.used_ids)
            block_at = memory.block_at(draw.randrange(memory.num_layers), block_id)
            entry_at = memory.entry_at(block_id)
            if kind == "garbage":
                memory.write(block_at, draw.randbytes(memory.block_bytes))
            elif kind == "zeros":
                memory.write(entry_at, bytes(draw.randrange(1, ENTRY_BYTES)))
            elif kind == "header":
                memory.write(draw.randrange(48), draw.randbytes(1))
            elif kind == "bits of blocks":
                memory.flip_bit(block_at + draw.randrange(memory.block_bytes), draw.randrange(8))
            else:
                memory.flip_bit(entry_at + draw.randrange(ENTRY_BYTES), draw.randrange(8))
    return kind


def bodies(num_streams: int, sampling: dict[str, Any]) -> list[dict[str, Any]]:
    words = WORDS.read_text().split()
    draw = random.Random(num_streams)
    every = []
    for number in range(num_streams):
        start = draw.randrange(len(words) - 60)
        prompt = " ".join(words[start : start + draw.randint(5, 60)])
        options = {"seed": number, "max_tokens": MAX_TOKENS, "ignore_eos": True, **sampling}
        every.append({"prompt": prompt, "stream": True, **options})
    return every


async def read(client: httpx.AsyncClient, body: dict[str, Any], answer: Answer) -> None:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError((await response.aread()).decode())
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                answer.text += event["choices"][0]["text"] if "choices" in event else str(event)
                answer.times.append(time.monotonic())


async def run_streams(
    server: RunningServer, every: list[dict[str, Any]], kill: Callable[[], None] | None
) -> tuple[list[Answer], float]:
    """Stream all bodies, with a kill if there is one; return answers and the time of the kill."""
    answers = [Answer() for _ in every]
    limits = httpx.Limits(max_connections=None)
    killed_at = 0.0
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for body, answer in zip(every, answers, strict=True):
            group.create_task(read(client, body, answer))
        if kill is not None:
            while min(len(answer.times) for answer in answers) < MIN_TOKENS_BEFORE_KILL:
                await asyncio.sleep(0.01)
            await asyncio.sleep(random.random() * 0.3)
            killed_at = time.monotonic()
            kill()
    return answers, killed_at


def longest_gap(answers: list[Answer], killed_at: float) -> float:
    gaps = [
        after - before
        for answer in answers
        for before, after in zip(answer.times, answer.times[1:], strict=False)
        if after > killed_at
    ]
    return max(gaps, default=0.0)


def num_recomputed(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        query = "SELECT coalesce(sum(recomputed_tokens), 0) FROM headway_requests"
        return connection.execute(query).fetchone()[0]


async def measure(
    server: RunningServer, num_streams: int, sampling: str, args: argparse.Namespace
) -> Result:
    """Run the kills under one number of streams."""
    result = Result(sampling, num_streams)
    every = bodies(num_streams, SAMPLINGS[sampling])
    expected, _ = await run_streams(server, every, None)
    folder, draw = server.log_path.parent, random.Random(args.seed)
    before, meter = num_recomputed(folder), StealMeter()
    for number in range(args.kills):

        def kill() -> None:
            pid = engine_pid(server)
            if args.damage:
                os.kill(pid, signal.SIGSTOP)
                damage(kv_memory(server), draw)
            os.kill(pid, signal.SIGKILL)

        answers, killed_at = await run_streams(server, every, kill)
        result.gaps_s.append(longest_gap(answers, killed_at))
        wrong = [a for a, b in zip(answers, expected, strict=True) if a.text != b.text]
        result.num_wrong += len(wrong)
        print(f"\r{number + 1} of {args.kills} kills", end="", file=sys.stderr, flush=True)
    print("\r", end="", file=sys.stderr)
    await asyncio.sleep(1.0)  # the ledger writes its rows in the background
    result.num_recomputed = (num_recomputed(folder) - before) / (args.kills * num_streams)
    result.steal = meter.read()
    return result


def start_server(model: Path, folder: Path, num_streams: int, *flags: str) -> RunningServer:
    """Start a server that takes as many streams at once and restarts as often as needed."""
    limits = ("--max-num-seqs", str(num_streams), "--max-engine-restarts", "100000")
    waits = ("--max-queue-age-s", "600", "--max-queue-wait-s", "600")
    return start_model_server(model, folder / "server.log", *limits, *waits, *flags)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--standby", action="store_true", help="with a standby process")
    parser.add_argument("--damage", action="store_true", help="change the KV memory before kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    flags = ("--standby",) if args.standby else ()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as name:
        server = start_server(args.model, Path(name), max(args.streams), *flags)
        try:
            server.wait_ready()
            for num_streams in args.streams:
                for sampling in SAMPLINGS:
                    results.append(asyncio.run(measure(server, num_streams, sampling, args)))
                    print(results[-1].line(), flush=True)
        finally:
            server.stop()
    if args.json:
        record = {"standby": args.standby, "damage": args.damage, "results": results}
        args.json.write_text(json.dumps(record, default=asdict, indent=1))
    num_wrong = sum(result.num_wrong for result in results)
    if num_wrong:
        print(f"{num_wrong} answers are wrong", file=sys.stderr)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
