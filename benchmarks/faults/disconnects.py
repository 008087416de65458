"""Clients that disconnect at random points, and resources that leak.

    python -m benchmarks.faults.disconnects MODEL [--clients 5000] [--solo 100] [--json FILE]
    python -m benchmarks.faults.disconnects --fake --clients 500 --solo 30

The crowd: more clients at once than the server has seats, so that many leave while they wait.
Others leave in a long prefill, at their first token, in the middle of a stream, with two samples,
with three prompts, or while they wait for a whole answer. Half of them reset the connection, the
others close it (with unread input the kernel makes a reset of that too). Afterwards the server
must be empty and hold no more memory, descriptors or threads than after a crowd a tenth of the
size that went before.

The accounts, from the server's own metrics, which count prompts when they are let in. A client that
left before that is not in it and leaves no trace. Two prompts or three end separately, and a
request with n samples ends once if it ends before its first token and n times after it:
  ends = prompts accepted + forks, with 0 <= forks <= accepted requests with n = 2   (bounds)
  samples that got a first token = ends of samples that had got one                  (exact)
and between the second and the first, every sample has exactly one end.

Solo leavers: one request alone in the server, whose client closes after k tokens. Late tokens are
those the server counts beyond the k; late steps likewise. The step in which the close happens is
one of them and cannot be avoided; the close must also travel through two sockets and an event
loop. So at most 2 are allowed at the 99th percentile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.cases import COMPLETIONS
from benchmarks.support.proc_stats import (
    LETTERS,
    MODEL_SETTINGS,
    Scrape,
    arguments,
    battery_parser,
    both_usages,
    conclude,
    leaks_in,
    origin_of,
    remains_after,
    run_client,
    scrape,
    spread,
    started,
    until_quiet,
)
from benchmarks.support.servers import RunningServer
from headway.bench.load.http import Connection, HttpClient, HttpFailure, Origin
from headway.workload import Vocabulary

SETTINGS = {"max_num_queued_reqs": 100_000, "max_num_queued_tokens": 100_000_000}
SETTINGS |= {"max_queue_wait_s": 600, "max_queue_age_s": 600}
MAX_TOKENS = 150
MAX_TOKENS_OF_SEVERAL = 300
"""In another bucket of the server's histogram: that tells those with several prompts apart."""
NUM_SAMPLES = 2
NUM_PROMPTS = 3
LINGER_NOT = struct.pack("ii", 1, 0)
MAX_LATE_STEPS = 2
MAX_GROWTH_MIB = 24.0


@dataclass(frozen=True, slots=True)
class Leave:
    """When a client leaves, whichever comes first, and how; one without either stays."""

    after_s: float | None = None
    after_events: int | None = None
    is_reset: bool = False


@dataclass(slots=True)
class QuotaLease:
    """What a client saw before it was over."""

    status: int = 0
    num_events: int = 0
    num_tokens: int = 0
    """Only where log-probabilities were asked for: an event may hold several tokens."""
    has_left: bool = False
    is_complete: bool = False
    retry_after: str | None = None
    error: str = ""


async def visit(origin: Origin, body: dict[str, Any], leave: Leave) -> QuotaLease:
    """Send one request and read until the end, or until it is time to leave."""
    seen = QuotaLease()
    connection = None
    try:
        connection = await HttpClient(origin).connect()
        async with asyncio.timeout(leave.after_s):
            await _converse(connection, body, leave, seen)
    except TimeoutError:
        seen.has_left = True
    except (HttpFailure, OSError) as error:
        seen.error = f"connection: {error}"
    finally:
        if connection is not None:
            await hang_up(connection, leave.is_reset)
    return seen


async def _converse(
    connection: Connection, body: dict[str, Any], leave: Leave, seen: QuotaLease
) -> None:
    await connection.send(encode(body))
    seen.status = connection.status
    seen.retry_after = connection.headers.get("retry-after")
    if connection.status != 200:
        seen.error = (await connection.read_all()).decode("utf-8", "replace")[:1000]
    elif not body.get("stream"):
        seen.is_complete = bool(await connection.read_all())
    else:
        await _read_events(connection, leave, seen, body.get("logprobs") is not None)


async def _read_events(
    connection: Connection, leave: Leave, seen: QuotaLease, counts_tokens: bool
) -> None:
    rest = b""
    while piece := await connection.read():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line == b"data: [DONE]":
                seen.is_complete = not seen.error
            elif line.startswith(b'data: {"error"'):
                seen.error = line.decode("utf-8", "replace")[:1000]
            elif line.startswith(b"data: {"):
                seen.num_events += 1
                if counts_tokens:
                    for choice in json.loads(line[6:])["choices"]:
                        seen.num_tokens += len((choice["logprobs"] or {}).get("tokens", ()))
        if leave.after_events is not None and seen.num_events >= leave.after_events:
            seen.has_left = True
            return


def encode(body: dict[str, Any], path: str = COMPLETIONS) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def hang_up(connection: Connection, is_reset: bool) -> None:
    if is_reset:
        raw = connection.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
        connection.close()
    else:
        connection.writer.close()
    with contextlib.suppress(OSError):
        await connection.writer.wait_closed()


KINDS = (
    "queued", "prefill", "first token", "mid-stream", "n = 2", "three prompts", "not streamed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many leave, how many are there at once, and how patient they are."""

    num_clients: int
    concurrency: int
    patience_s: float
    vocabulary: Vocabulary
    long_prompt: int
    seed: int = 0

    def draw(self, number: int) -> tuple[str, dict[str, Any], Leave]:
        """The request of one client, and when it leaves."""
        draw = random.Random(f"{self.seed}/{number}")
        kind = KINDS[number % len(KINDS)]
        num_tokens = draw.randint(4, 60)
        if kind == "prefill":
            num_tokens = draw.randint(self.long_prompt // 2, self.long_prompt)
        prompt: Any = self.vocabulary.token_ids(draw, num_tokens)
        body: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0.0}
        body["stream"] = kind != "not streamed"
        if kind == "n = 2":
            body |= {"n": NUM_SAMPLES, "temperature": 0.8, "seed": number}
        if kind == "three prompts":
            prompt = [self.vocabulary.token_ids(draw, num_tokens) for _ in range(NUM_PROMPTS)]
            body["max_tokens"] = MAX_TOKENS_OF_SEVERAL
        after_events = {"queued": None, "not streamed": None, "first token": 1}.get(
            kind, draw.randint(2, 60)
        )
        after_s = None
        if kind in ("queued", "prefill", "not streamed"):
            after_s = draw.uniform(0.0, self.patience_s)
        is_reset = draw.random() < 0.5
        return kind, {**body, "prompt": prompt}, Leave(after_s, after_events, is_reset)


async def send_crowd(origin: Origin, crowd: Crowd) -> dict[str, Counter[str]]:
    """How the visits of each kind ended."""
    seats = asyncio.Semaphore(crowd.concurrency)
    ends = {kind: Counter[str]() for kind in KINDS}
    began_at = shown_at = time.monotonic()
    num_done = 0

    async def one(number: int) -> None:
        nonlocal num_done, shown_at
        async with seats:
            kind, body, leave = crowd.draw(number)
            ends[kind][_end_of(await visit(origin, body, leave))] += 1
        num_done += 1
        if time.monotonic() - shown_at > 10.0:
            shown_at = time.monotonic()
            print(f"{num_done}/{crowd.num_clients} left, {shown_at - began_at:.0f} s", flush=True)

    async with asyncio.TaskGroup() as group:
        for number in range(crowd.num_clients):
            group.create_task(one(number))
    return ends


def _end_of(seen: QuotaLease) -> str:
    if seen.has_left:
        return "left during the answer" if seen.status else "left before the answer"
    if seen.is_complete:
        return "complete before it could leave"
    return f"{seen.status} {seen.error}"


async def solo_leavers(
    server: RunningServer, count: int, vocabulary: Vocabulary
) -> dict[str, list[float]]:
    """How late each close took effect."""
    late: dict[str, list[float]] = {"tokens": [], "steps": []}
    draw = random.Random(3)
    for number in range(count):
        await until_quiet(server)
        before = await asyncio.to_thread(scrape, server)
        body = {"max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 0}
        body |= {"prompt": vocabulary.token_ids(draw, 12), "temperature": 0.0}
        leave = Leave(None, draw.randint(1, 30), is_reset=number % 2 == 0)
        seen = await visit(origin_of(server), body, leave)
        await until_quiet(server)
        after = await asyncio.to_thread(scrape, server)
        for name, metric in (
            ("tokens", "vllm:generation_tokens_total"),
            ("steps", "headway_steps_total"),
        ):
            late[name].append(after.total(metric) - before.total(metric) - seen.num_tokens)
    return late


def accounts(before: Scrape, after: Scrape) -> dict[str, float]:
    """Both sides of the identities; see the top of this module."""

    def gained(name: str) -> float:
        return after.total(name) - before.total(name)

    def gained_up_to(name: str, bound: float) -> float:
        return after.num_up_to(name, bound) - before.num_up_to(name, bound)

    requests = gained("vllm:request_params_n_count")
    return {
        "requests_accepted": requests,
        "of_them_with_samples": requests - gained_up_to("vllm:request_params_n", 1),
        "prompts_accepted": gained("headway_prompts_arrived_total"),
        "ends": gained("vllm:request_success_total"),
        "first_tokens": gained("vllm:time_to_first_token_seconds_count"),
        "ends_after_a_first_token": gained("vllm:request_decode_time_seconds_count"),
        "aborts": gained("headway_requests_aborted_total"),
        "refused": gained("headway_requests_refused_total"),
    }


def unbalanced(books: dict[str, float]) -> list[str]:
    """Where accounts do not come out."""
    found = []
    forks = books["ends"] - books["prompts_accepted"]
    if not 0 <= forks <= books["of_them_with_samples"] * (NUM_SAMPLES - 1):
        found.append(
            f"{books['prompts_accepted']:g} prompts, {books['of_them_with_samples']:g} of them "
            f"with {NUM_SAMPLES} samples, came to {books['ends']:g} ends"
        )
    if books["first_tokens"] != books["ends_after_a_first_token"]:
        found.append(
            f"{books['first_tokens']:g} samples began, "
            f"{books['ends_after_a_first_token']:g} of those ended"
        )
    return found


async def run(server: RunningServer, crowd: Crowd, num_solo: int) -> dict[str, Any]:
    origin = origin_of(server)
    warm_up = Crowd(
        max(crowd.num_clients // 10, 2 * crowd.concurrency), crowd.concurrency, crowd.patience_s,
        crowd.vocabulary, crowd.long_prompt, crowd.seed + 1,
    )  # fmt: skip
    await send_crowd(origin, warm_up)
    await remains_after(server, both_usages(server))
    usage, before = both_usages(server), await asyncio.to_thread(scrape, server)
    began_at = time.monotonic()
    ends = await send_crowd(origin, crowd)
    elapsed_s = time.monotonic() - began_at
    await until_quiet(server)
    after = await asyncio.to_thread(scrape, server)
    remains = await remains_after(server, usage)
    late = await solo_leavers(server, num_solo, crowd.vocabulary)
    restarts = (await asyncio.to_thread(scrape, server)).total("headway_engine_restarts_total")
    return {
        "clients": crowd.num_clients,
        "elapsed_s": elapsed_s,
        "ends_seen_by_clients": {kind: dict(counts) for kind, counts in ends.items()},
        "accounts": accounts(before, after),
        "remains": remains.as_json(),
        "engine_restarts": restarts,
        "late_tokens": {**spread(late["tokens"]), "counts": _counts(late["tokens"])},
        "late_steps": {**spread(late["steps"]), "counts": _counts(late["steps"])},
        "tracebacks": server.log.count("Traceback"),
    }


def _counts(values: Sequence[float]) -> dict[str, int]:
    return {f"{value:g}": count for value, count in sorted(Counter(values).items())}


def failures_in(report: dict[str, Any], max_late_steps: float = MAX_LATE_STEPS) -> list[str]:
    """What of a report must not be."""
    found = leaks_in(report["remains"], MAX_GROWTH_MIB, ("api", "engine"))
    found += unbalanced(report["accounts"])
    if report["engine_restarts"] or report["tracebacks"]:
        found.append(f"{report['engine_restarts']:g} restarts, {report['tracebacks']} tracebacks")
    strange = [
        end
        for counts in report["ends_seen_by_clients"].values()
        for end in counts
        if not end.startswith(("left", "complete"))
    ]
    if strange:
        found.append(f"unexpected answers: {strange[:3]}")
    late = report["late_steps"]
    if late["p99"] is not None and late["p99"] > max_late_steps:
        found.append(f"{late['p99']:.1f} steps after the client had left (p99)")
    return found


def main() -> int:
    parser = battery_parser(__doc__)
    parser.add_argument("--clients", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=96)
    parser.add_argument("--patience", type=float, help="seconds; default: 6, with --fake 0.3")
    parser.add_argument("--solo", type=int, default=100, help="leavers that are alone")
    args = arguments(parser)
    patience_s = args.patience or (0.3 if args.fake else 6.0)
    vocabulary = LETTERS if args.fake else Vocabulary()
    crowd = Crowd(args.clients, args.concurrency, patience_s, vocabulary, 1500)
    with (
        tempfile.TemporaryDirectory() as name,
        started(args.model, Path(name), SETTINGS, MODEL_SETTINGS, step_s=0.02) as server,
    ):
        report = run_client(run(server, crowd, args.solo))
    print(json.dumps(report, indent=2))
    return conclude(report, failures_in(report), args.json)


if __name__ == "__main__":
    sys.exit(main())
