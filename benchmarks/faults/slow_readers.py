"""Readers of one byte per second, and their effect on other clients.

    python -m benchmarks.faults.slow_readers MODEL [--slow 100] [--normal 16] [--rounds 3]
        [--json FILE]
    python -m benchmarks.faults.slow_readers --fake --slow 20 --normal 4 --tokens 64

A round has two phases. In the disturbed one, 100 readers with tiny receive buffers take one byte
per second; one whose connection the server ended asks again at once, so there are always 100. In
the baseline the same 100 read as fast as they can. The phase ends when 16 normal clients, who
start at the same moment, have streamed two answers each; the gaps between their tokens are what
is compared.

What makes it fair. The engine computes an answer whether or not it is read (until a megabyte is
unread, which these answers do not reach), so slow readers cost as many tokens as fast ones. They
come back at times that only the disturbed phase knows; the baseline after it sends its requests
at the very same times, with prompts of the same length and the same number of tokens, none of
them cached. What differs is reading alone. One thing favours the disturbed phase: on a shared
machine the client's own work of reading fast is missing from it. Fast readers therefore only throw
the bytes away; the client's processor share is shown for both.

Answers carry log-probabilities to be larger than all the buffers on their way; smaller ones would
end in the kernel, and nobody would ever be slow. A reader cannot see that it was cut off before it
has read what was sent; the kernel's table of connections is asked instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.cases import CHAT
from benchmarks.faults.disconnects import NO_LINGER, encode
from benchmarks.support.proc_stats import (
    LETTERS,
    MIB,
    MODEL_SETTINGS,
    arguments,
    battery_parser,
    conclude,
    run_client,
    spread,
    started,
    target_of,
    until_quiet,
    usage_of,
)
from benchmarks.support.servers import RunningServer
from headway.bench.load.http import HttpClient
from headway.bench.load.openai import WORDS, Target, ask
from headway.bench.load.records import LoadRecord, Outcome
from headway.bench.records import percentile
from headway.clock import SystemClock
from headway.workload import Vocabulary, WorkItem

RECEIVE_BUFFER_BYTES = 4096
NUM_PROMPT_TOKENS = 16
NUM_PROMPT_WORDS = 8
NUM_LOGPROBS = 20
ANSWERS_PER_NORMAL = 2
WATCH_S = 0.5
ESTABLISHED = "01"
CUT_OFF = "a client was cut off"
MAX_RATIO = 1.3
MAX_BYTES_PER_READER = 2**20
"""What the server says it lets a reader be behind by."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many of each, and how long their answers are."""

    num_slow: int
    num_normal: int
    num_tokens: int
    num_rounds: int
    vocabulary: Vocabulary


@dataclass(slots=True)
class Phase:
    """What happened in one phase."""

    gaps_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    asked_at: list[tuple[float, int]] = field(default_factory=list)
    """Seconds into the phase, and which reader: the schedule of the baseline that follows."""
    ended_after_s: list[float] = field(default_factory=list)
    """How long each connection lasted that the server ended."""
    num_cut_off: int = 0
    num_bytes: list[int] = field(default_factory=list)
    """Of each whole answer, in the baseline."""
    memory_before: int = 0
    memory_most: int = 0
    elapsed_s: float = 0.0
    cpu_share: float = 0.0

    def summary(self, num_slow: int) -> dict[str, Any]:
        grown = self.memory_most - self.memory_before
        return {
            "gaps_s": spread(self.gaps_s),
            "failures": self.failures[:5],
            "requests_of_the_readers": len(self.asked_at),
            "connections_ended_by_the_server_after_s": spread(self.ended_after_s),
            "cut_off_by_the_server": self.num_cut_off,
            "bytes_of_an_answer": statistics.median(self.num_bytes) if self.num_bytes else None,
            "api_memory_growth_mib": grown / MIB,
            "api_bytes_per_reader": grown / num_slow,
            "elapsed_s": self.elapsed_s,
            "client_cpu_share": self.cpu_share,
        }


@dataclass(slots=True)
class Readers:
    """The readers of one phase, slow or fast."""

    server: RunningServer
    plan: Plan
    phase: Phase
    seed: str
    began_at: float = field(default_factory=time.monotonic)
    table: ConnectionTable = field(init=False)

    def __post_init__(self) -> None:
        self.table = ConnectionTable(self.server.port)

    def _body(self, number: int, turn: int) -> bytes:
        draw = random.Random(f"{self.seed}/{number}/{turn}")
        text = " ".join(draw.choices(WORDS, k=NUM_PROMPT_WORDS))
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0.0}
        body |= {"max_tokens": self.plan.num_tokens, "ignore_eos": True, "stream": True}
        return encode({**body, "logprobs": True, "top_logprobs": NUM_LOGPROBS}, CHAT)

    @contextlib.contextmanager
    def _connected(self, is_slow: bool) -> Iterator[socket.socket]:
        connection = socket.socket()
        try:
            if is_slow:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            connection.connect(("127.0.0.1", self.server.port))
            connection.setblocking(False)
            yield connection
        finally:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            connection.close()

    async def read_slowly(self, number: int) -> None:
        """One byte per second, for ever; asks again whenever the server has had enough."""
        loop, turn = asyncio.get_running_loop(), 0
        while True:
            with self._connected(is_slow=True) as connection:
                asked_at = time.monotonic()
                self.phase.asked_at.append((asked_at - self.began_at, number))
                await loop.sock_sendall(connection, self._body(number, turn))
                reading = asyncio.create_task(_trickle(connection))
                try:
                    await self.table.until_ended(connection.getsockname()[1])
                finally:
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
                self.phase.ended_after_s.append(time.monotonic() - asked_at)
            turn += 1

    async def all_slowly(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self.plan.num_slow):
                group.create_task(self.read_slowly(number))

    async def read_fast(self, number: int, turn: int, at: float) -> None:
        """One answer, asked for at the time a slow reader asked for it."""
        await asyncio.sleep(max(0.0, self.began_at + at - time.monotonic()))
        self.phase.asked_at.append((time.monotonic() - self.began_at, number))
        loop, num_bytes = asyncio.get_running_loop(), 0
        with self._connected(is_slow=False) as connection:
            await loop.sock_sendall(connection, self._body(number, turn))
            tail = b""
            while not tail.endswith(b"0\r\n\r\n"):
                data = await loop.sock_recv(connection, 262_144)
                if not data:
                    self.phase.failures.append("a fast reader was cut off")
                    return
                num_bytes += len(data)
                tail = (tail + data)[-5:]
        self.phase.num_bytes.append(num_bytes)

    async def follow(self, schedule: list[tuple[float, int]]) -> None:
        turns: dict[int, int] = {}
        async with asyncio.TaskGroup() as group:
            for at, number in schedule:
                turn = turns[number] = turns.get(number, -1) + 1
                group.create_task(self.read_fast(number, turn, at))


async def _trickle(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while await loop.sock_recv(connection, 1):
        await asyncio.sleep(1.0)
    await asyncio.Event().wait()


class ConnectionTable:
    """The kernel's table of connections, read once for all who ask at about the same time."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._read_at = 0.0
        self._held: set[int] = set()

    async def until_ended(self, client_port: int) -> None:
        """Until the server has let go of its end of a connection."""
        is_held = True
        while is_held:
            await asyncio.sleep(WATCH_S)
            is_held = client_port in self._clients()

    def _clients(self) -> set[int]:
        if time.monotonic() - self._read_at > WATCH_S / 2:
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            ports = [(_port(row[1]), _port(row[2])) for row in rows if row[3] == ESTABLISHED]
            self._held = {remote for local, remote in ports if local == self._server_port}
            self._read_at = time.monotonic()
        return self._held


def _port(address: str) -> int:
    return int(address.split(":")[1], 16)


class Battery:
    """One server, phases in turn."""

    def __init__(self, server: RunningServer, plan: Plan, target: Target) -> None:
        self._server = server
        self._plan = plan
        self._target = target

    async def disturbed(self, seed: str) -> Phase:
        readers = Readers(self._server, self._plan, Phase(), seed)
        return await self._beside(readers, asyncio.ensure_future(readers.all_slowly()))

    async def baseline(self, seed: str, schedule: list[tuple[float, int]]) -> Phase:
        readers = Readers(self._server, self._plan, Phase(), seed)
        return await self._beside(readers, asyncio.ensure_future(readers.follow(schedule)))

    async def _beside(self, readers: Readers, reading: asyncio.Future[Any]) -> Phase:
        """Measure the normal clients while the readers read, then send the readers away."""
        phase, pid = readers.phase, self._server.process.pid
        phase.memory_before = phase.memory_most = usage_of(pid).memory_bytes
        num_cut_off = self._server.log.count(CUT_OFF)
        began_at, cpu_s = time.monotonic(), time.process_time()
        watching = asyncio.create_task(_watch_memory(pid, phase))
        try:
            await self._measure_normals(phase, readers.seed)
        finally:
            phase.elapsed_s = time.monotonic() - began_at
            phase.cpu_share = (time.process_time() - cpu_s) / phase.elapsed_s
            for task in (watching, reading):
                task.cancel()
            ends = await asyncio.gather(watching, reading, return_exceptions=True)
        phase.failures += [repr(end) for end in ends if isinstance(end, Exception)]
        await until_quiet(self._server)
        phase.num_cut_off = self._server.log.count(CUT_OFF) - num_cut_off
        return phase

    async def _measure_normals(self, phase: Phase, seed: str) -> None:
        client, clock = HttpClient(self._target.origin), SystemClock()

        async def one(number: int) -> None:
            for turn in range(ANSWERS_PER_NORMAL):
                draw = random.Random(f"{seed}/normal/{number}/{turn}")
                prompt = tuple(self._plan.vocabulary.token_ids(draw, NUM_PROMPT_TOKENS))
                item = WorkItem(prompt, self._plan.num_tokens)
                record = LoadRecord(number, None, clock.now(), len(prompt))
                await ask(client, self._target, item, record, clock)
                phase.gaps_s += record.gaps_s()
                if record.outcome is not Outcome.COMPLETED:
                    phase.failures.append(record.error or "unknown")

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self._plan.num_normal):
                    group.create_task(one(number))
        finally:
            client.close()


async def _watch_memory(pid: int, phase: Phase) -> None:
    while True:
        phase.memory_most = max(phase.memory_most, usage_of(pid).memory_bytes)
        await asyncio.sleep(0.25)


async def run(server: RunningServer, plan: Plan) -> dict[str, Any]:
    battery = Battery(server, plan, await target_of(server))
    # What the first of a kind costs, memory above all, must not be counted in a round.
    await battery.baseline("warm-up", [(0.0, number) for number in range(plan.num_slow)])
    rounds = []
    pooled: dict[str, list[float]] = {"disturbed": [], "baseline": []}
    for number in range(plan.num_rounds):
        disturbed = await battery.disturbed(f"{number}/disturbed")
        baseline = await battery.baseline(f"{number}/baseline", sorted(disturbed.asked_at))
        ratio = percentile(disturbed.gaps_s, 99) / percentile(baseline.gaps_s, 99)
        pooled["disturbed"] += disturbed.gaps_s
        pooled["baseline"] += baseline.gaps_s
        rounds.append(
            {
                "p99_ratio": ratio,
                "disturbed": disturbed.summary(plan.num_slow),
                "baseline": baseline.summary(plan.num_slow),
            }
        )
        print(
            f"round {number + 1}/{plan.num_rounds}: p99 gap {percentile(disturbed.gaps_s, 99):.3f} "
            f"s beside slow readers, {percentile(baseline.gaps_s, 99):.3f} s beside fast ones, "
            f"ratio {ratio:.2f}; {disturbed.num_cut_off} cut off",
            flush=True,
        )
    return {
        "rounds": rounds,
        "p99_ratio_median": statistics.median([one["p99_ratio"] for one in rounds]),
        "gaps_s": {name: spread(gaps) for name, gaps in pooled.items()},
        "exit_code": server.stop(),
        "tracebacks": server.log.count("Traceback"),
    }


def failures_in(report: dict[str, Any], max_ratio: float = MAX_RATIO) -> list[str]:
    """What of a report must not be."""
    found = []
    if report["p99_ratio_median"] > max_ratio:
        found.append(f"gaps at p99 are {report['p99_ratio_median']:.2f} times the baseline's")
    for number, one in enumerate(report["rounds"], 1):
        found += [
            f"round {number}, {name}: {one[name]['failures']}"
            for name in ("disturbed", "baseline")
            if one[name]["failures"]
        ]
        if not one["disturbed"]["cut_off_by_the_server"]:
            found.append(f"round {number}: no slow reader was cut off")
        if one["baseline"]["cut_off_by_the_server"]:
            found.append(f"round {number}: a fast reader was cut off")
        if one["disturbed"]["api_bytes_per_reader"] > MAX_BYTES_PER_READER:
            per_reader = one["disturbed"]["api_bytes_per_reader"] / 1024
            found.append(f"round {number}: {per_reader:.0f} KiB for each slow reader")
    if report["exit_code"] or report["tracebacks"]:
        found.append(f"exit code {report['exit_code']}, {report['tracebacks']} tracebacks")
    return found


def main() -> int:
    parser = battery_parser(__doc__)
    parser.add_argument("--slow", type=int, default=100)
    parser.add_argument("--normal", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=10.0, help="the server's, in seconds")
    args = arguments(parser)
    vocabulary = LETTERS if args.fake else Vocabulary()
    plan = Plan(args.slow, args.normal, args.tokens, args.rounds, vocabulary)
    # How long requests wait for a seat is not what is tested here.
    settings = {"slow_reader_timeout_s": args.timeout, "max_queue_wait_s": 600}
    settings |= {"max_queue_age_s": 600}
    with (
        tempfile.TemporaryDirectory() as name,
        started(args.model, Path(name), settings, MODEL_SETTINGS, step_s=0.02) as server,
    ):
        report = run_client(run(server, plan))
    print(json.dumps(report, indent=2))
    return conclude(report, failures_in(report), args.json)


if __name__ == "__main__":
    sys.exit(main())
