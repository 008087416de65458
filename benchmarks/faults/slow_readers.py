"""Measures how much slow readers delay other clients.

    python -m benchmarks.faults.slow_readers MODEL [--slow 100] [--normal 16] [--rounds 3]
        [--json FILE]
    python -m benchmarks.faults.slow_readers --fake --slow 20 --normal 4 --tokens 64

A round has two phases. In the disturbed phase, 100 readers with tiny receive buffers read one byte
per second. A reader whose connection the server dropped sends a new request at once, so there are
always 100. In the baseline the same 100 readers read as fast as they can. A phase ends when 16
normal clients, which start at the same moment, have streamed two answers each. The figure compares
the gaps between the tokens of the normal clients.

Both phases cost the engine the same. It computes an answer whether or not the client reads it
(until a megabyte is unread, which these answers do not reach). The baseline runs after the
disturbed phase and sends its requests at the times when the slow readers sent theirs, with prompts
and outputs of the same lengths, none of them cached. Only the reading differs. One difference
favours the disturbed phase: on a shared machine it lacks the client's own cost of reading fast. So
fast readers discard the bytes, and the report shows the client's CPU share in both phases.

Answers carry log-probabilities to be larger than all socket buffers; smaller answers would fit into
the kernel's buffers, and no reader would be slow. A slow reader does not notice a dropped
connection before it has read the buffered bytes, so the script reads the kernel's connection table.
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
from headway.clock import SystemClock
from headway.percentiles import percentile
from headway.workload import Vocabulary, WorkItem

RECEIVE_BUFFER_BYTES = 4096
NUM_PROMPT_TOKENS = 16
NUM_PROMPT_WORDS = 8
NUM_LOGPROBS = 20
ANSWERS_PER_NORMAL = 2
WATCH_S = 0.5
ESTABLISHED = "01"
DROPPED_LOG = "a client was cut off"
MAX_RATIO = 1.3
MAX_BYTES_PER_READER = 2**20
"""The server's bound on unread output."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of slow and normal clients, output tokens, and rounds."""

    num_slow: int
    num_normal: int
    num_tokens: int
    num_rounds: int
    vocabulary: Vocabulary


@dataclass(slots=True)
class Phase:
    """Measurements of one phase."""

    gaps_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    sent_at: list[tuple[float, int]] = field(default_factory=list)
    """Seconds into the phase and number of the reader: the schedule of the next baseline."""
    dropped_after_s: list[float] = field(default_factory=list)
    """Lifetimes of the connections that the server dropped."""
    num_dropped: int = 0
    num_bytes: list[int] = field(default_factory=list)
    """Bytes of each whole answer, in the baseline."""
    memory_before: int = 0
    max_memory: int = 0
    elapsed_s: float = 0.0
    cpu_share: float = 0.0

    def summary(self, num_slow: int) -> dict[str, Any]:
        grown = self.max_memory - self.memory_before
        return {
            "gaps_s": spread(self.gaps_s),
            "failures": self.failures[:5],
            "requests_of_the_readers": len(self.sent_at),
            "connections_ended_by_the_server_after_s": spread(self.dropped_after_s),
            "cut_off_by_the_server": self.num_dropped,
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
    def _connect(self, is_slow: bool) -> Iterator[socket.socket]:
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
        """Read one byte per second; send a new request after each dropped connection."""
        loop, turn = asyncio.get_running_loop(), 0
        while True:
            with self._connect(is_slow=True) as connection:
                sent_at = time.monotonic()
                self.phase.sent_at.append((sent_at - self.began_at, number))
                await loop.sock_sendall(connection, self._body(number, turn))
                reading = asyncio.create_task(_read_slowly(connection))
                try:
                    await self.table.wait_closed(connection.getsockname()[1])
                finally:
                    reading.cancel()
                    await asyncio.gather(reading, return_exceptions=True)
                self.phase.dropped_after_s.append(time.monotonic() - sent_at)
            turn += 1

    async def read_all_slowly(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self.plan.num_slow):
                group.create_task(self.read_slowly(number))

    async def read_fast(self, number: int, turn: int, at: float) -> None:
        """Send one request at its time in the schedule, and read the answer fast."""
        await asyncio.sleep(max(0.0, self.began_at + at - time.monotonic()))
        self.phase.sent_at.append((time.monotonic() - self.began_at, number))
        loop, num_bytes = asyncio.get_running_loop(), 0
        with self._connect(is_slow=False) as connection:
            await loop.sock_sendall(connection, self._body(number, turn))
            tail = b""
            while not tail.endswith(b"0\r\n\r\n"):
                data = await loop.sock_recv(connection, 262_144)
                if not data:
                    self.phase.failures.append("the server dropped a fast reader")
                    return
                num_bytes += len(data)
                tail = (tail + data)[-5:]
        self.phase.num_bytes.append(num_bytes)

    async def read_all_fast(self, schedule: list[tuple[float, int]]) -> None:
        turns: dict[int, int] = {}
        async with asyncio.TaskGroup() as group:
            for at, number in schedule:
                turn = turns[number] = turns.get(number, -1) + 1
                group.create_task(self.read_fast(number, turn, at))


async def _read_slowly(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while await loop.sock_recv(connection, 1):
        await asyncio.sleep(1.0)
    await asyncio.Event().wait()


class ConnectionTable:
    """The kernel's table of connections, cached for a fraction of a second."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._read_at = 0.0
        self._open_ports: set[int] = set()

    async def wait_closed(self, client_port: int) -> None:
        """Wait until the server has closed its end of a connection."""
        is_open = True
        while is_open:
            await asyncio.sleep(WATCH_S)
            is_open = client_port in self._read_open_ports()

    def _read_open_ports(self) -> set[int]:
        if time.monotonic() - self._read_at > WATCH_S / 2:
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            ports = [(_port(row[1]), _port(row[2])) for row in rows if row[3] == ESTABLISHED]
            self._open_ports = {remote for local, remote in ports if local == self._server_port}
            self._read_at = time.monotonic()
        return self._open_ports


def _port(address: str) -> int:
    return int(address.split(":")[1], 16)


class Battery:
    """Runs phases on one server, one after another."""

    def __init__(self, server: RunningServer, plan: Plan, target: Target) -> None:
        self._server = server
        self._plan = plan
        self._target = target

    async def disturbed(self, seed: str) -> Phase:
        readers = Readers(self._server, self._plan, Phase(), seed)
        return await self._measure_beside(readers, asyncio.ensure_future(readers.read_all_slowly()))

    async def baseline(self, seed: str, schedule: list[tuple[float, int]]) -> Phase:
        readers = Readers(self._server, self._plan, Phase(), seed)
        return await self._measure_beside(
            readers, asyncio.ensure_future(readers.read_all_fast(schedule))
        )

    async def _measure_beside(self, readers: Readers, reading: asyncio.Future[Any]) -> Phase:
        """Measure the normal clients while the readers read, then stop the readers."""
        phase, pid = readers.phase, self._server.process.pid
        phase.memory_before = phase.max_memory = usage_of(pid).memory_bytes
        num_dropped = self._server.log.count(DROPPED_LOG)
        began_at, cpu_s = time.monotonic(), time.process_time()
        watching = asyncio.create_task(_watch_memory(pid, phase))
        try:
            await self._measure_normal_clients(phase, readers.seed)
        finally:
            phase.elapsed_s = time.monotonic() - began_at
            phase.cpu_share = (time.process_time() - cpu_s) / phase.elapsed_s
            for task in (watching, reading):
                task.cancel()
            ends = await asyncio.gather(watching, reading, return_exceptions=True)
        phase.failures += [repr(end) for end in ends if isinstance(end, Exception)]
        await until_quiet(self._server)
        phase.num_dropped = self._server.log.count(DROPPED_LOG) - num_dropped
        return phase

    async def _measure_normal_clients(self, phase: Phase, seed: str) -> None:
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
        phase.max_memory = max(phase.max_memory, usage_of(pid).memory_bytes)
        await asyncio.sleep(0.25)


async def run(server: RunningServer, plan: Plan) -> dict[str, Any]:
    battery = Battery(server, plan, await target_of(server))
    # First requests allocate memory, which must not count in a round.
    await battery.baseline("warm-up", [(0.0, number) for number in range(plan.num_slow)])
    rounds = []
    pooled: dict[str, list[float]] = {"disturbed": [], "baseline": []}
    for number in range(plan.num_rounds):
        disturbed = await battery.disturbed(f"{number}/disturbed")
        baseline = await battery.baseline(f"{number}/baseline", sorted(disturbed.sent_at))
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
            f"ratio {ratio:.2f}; {disturbed.num_dropped} dropped",
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
    """Return the failures that a report shows."""
    failures = []
    if report["p99_ratio_median"] > max_ratio:
        failures.append(f"gaps at p99 are {report['p99_ratio_median']:.2f} times the baseline's")
    for number, one in enumerate(report["rounds"], 1):
        failures += [
            f"round {number}, {name}: {one[name]['failures']}"
            for name in ("disturbed", "baseline")
            if one[name]["failures"]
        ]
        if not one["disturbed"]["cut_off_by_the_server"]:
            failures.append(f"round {number}: the server dropped no slow reader")
        if one["baseline"]["cut_off_by_the_server"]:
            failures.append(f"round {number}: the server dropped a fast reader")
        if one["disturbed"]["api_bytes_per_reader"] > MAX_BYTES_PER_READER:
            per_reader = one["disturbed"]["api_bytes_per_reader"] / 1024
            failures.append(f"round {number}: {per_reader:.0f} KiB for each slow reader")
    if report["exit_code"] or report["tracebacks"]:
        failures.append(f"exit code {report['exit_code']}, {report['tracebacks']} tracebacks")
    return failures


def main() -> int:
    parser = battery_parser(__doc__)
    parser.add_argument("--slow", type=int, default=100)
    parser.add_argument("--normal", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="output tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--timeout", type=float, default=10.0, help="slow_reader_timeout_s of the server"
    )
    args = arguments(parser)
    vocabulary = LETTERS if args.fake else Vocabulary()
    plan = Plan(args.slow, args.normal, args.tokens, args.rounds, vocabulary)
    # Waits in the queue are not tested here.
    settings = {"slow_reader_timeout_s": args.timeout, "max_queue_wait_s": 600}
    settings |= {"max_queue_age_s": 600}
    with (
        tempfile.TemporaryDirectory() as name,
        started(args.model, Path(name), settings, MODEL_SETTINGS, step_s=0.02) as server,
    ):
        report = run_client(run(server, plan))
    print(json.dumps(report, indent=2))
    return conclude(report, failures_in(report), args)


if __name__ == "__main__":
    sys.exit(main())
