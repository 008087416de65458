"""Disconnects clients at random points and checks the server for leaks.

    python -m benchmarks.faults.disconnects MODEL [--clients 5000] [--solo 100] [--json FILE]
    python -m benchmarks.faults.disconnects --fake --clients 500 --solo 30

More clients connect at once than `max_num_seqs`, so many disconnect while their requests wait.
Others disconnect during a long prefill, at the first token, in mid-stream, with two samples, with
three prompts, or before a whole answer. Half of them reset the connection; the others close it
(with unread input the kernel turns that into a reset). Afterwards the server must be empty and use
no more memory, descriptors or threads than after a warm-up: prompts that write every KV block once
(the kernel gives memory at the first write), then a load of a tenth of the size.

The counts come from the server's metrics, which count prompts when they are accepted. A client that
disconnects before that is not counted. Prompts of one HTTP request end separately. A request with n
samples ends once if it ends before its first token, and n times after it:
  ends = prompts accepted + forks, with 0 <= forks <= accepted requests with n = 2   (bounds)
  samples that got a first token = ends of samples that had got one                  (exact)
Together these say that every sample has exactly one end.

Solo clients: one request alone in the server, whose client disconnects after k tokens. Late tokens
are those that the server counts beyond k; late steps likewise. The step that runs during the
disconnect is unavoidable, and the close passes through two sockets and an event loop. So at most 2
late steps are allowed at the 99th percentile.
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
"""In another bucket of the server's histogram, which separates requests with several prompts."""
NUM_SAMPLES = 2
NUM_PROMPTS = 3
NO_LINGER = struct.pack("ii", 1, 0)
MAX_LATE_STEPS = 2
MAX_GROWTH_MIB = 24.0


@dataclass(frozen=True, slots=True)
class Disconnect:
    """When a client disconnects, whichever comes first, and how; without either it stays."""

    after_s: float | None = None
    after_events: int | None = None
    is_reset: bool = False


@dataclass(slots=True)
class ClientOutcome:
    """Result of one request, as its client saw it."""

    status: int = 0
    num_events: int = 0
    num_tokens: int = 0
    """Counted with log-probabilities only: an event may have several tokens."""
    has_disconnected: bool = False
    is_complete: bool = False
    retry_after: str | None = None
    error: str = ""


async def send_request(
    origin: Origin, body: dict[str, Any], disconnect: Disconnect
) -> ClientOutcome:
    """Send one request and read its answer, until the end or the disconnect."""
    outcome = ClientOutcome()
    connection = None
    try:
        connection = await HttpClient(origin).connect()
        async with asyncio.timeout(disconnect.after_s):
            await _send_and_read(connection, body, disconnect, outcome)
    except TimeoutError:
        outcome.has_disconnected = True
    except (HttpFailure, OSError) as error:
        outcome.error = f"connection: {error}"
    finally:
        if connection is not None:
            await close_connection(connection, disconnect.is_reset)
    return outcome


async def _send_and_read(
    connection: Connection, body: dict[str, Any], disconnect: Disconnect, outcome: ClientOutcome
) -> None:
    await connection.send(encode(body))
    outcome.status = connection.status
    outcome.retry_after = connection.headers.get("retry-after")
    if connection.status != 200:
        outcome.error = (await connection.read_all()).decode("utf-8", "replace")[:1000]
    elif not body.get("stream"):
        outcome.is_complete = bool(await connection.read_all())
    else:
        await _read_events(connection, disconnect, outcome, body.get("logprobs") is not None)


async def _read_events(
    connection: Connection, disconnect: Disconnect, outcome: ClientOutcome, counts_tokens: bool
) -> None:
    rest = b""
    while piece := await connection.read():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line == b"data: [DONE]":
                outcome.is_complete = not outcome.error
            elif line.startswith(b'data: {"error"'):
                outcome.error = line.decode("utf-8", "replace")[:1000]
            elif line.startswith(b"data: {"):
                outcome.num_events += 1
                if counts_tokens:
                    for choice in json.loads(line[6:])["choices"]:
                        outcome.num_tokens += len((choice["logprobs"] or {}).get("tokens", ()))
        if disconnect.after_events is not None and outcome.num_events >= disconnect.after_events:
            outcome.has_disconnected = True
            return


def encode(body: dict[str, Any], path: str = COMPLETIONS) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def close_connection(connection: Connection, is_reset: bool) -> None:
    if is_reset:
        raw = connection.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        connection.close()
    else:
        connection.writer.close()
    with contextlib.suppress(OSError):
        await connection.writer.wait_closed()


KINDS = (
    "queued", "prefill", "first token", "mid-stream", "n = 2", "three prompts", "not streamed",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DisconnectLoad:
    """Number, concurrency and patience of the clients that disconnect."""

    num_clients: int
    concurrency: int
    patience_s: float
    vocabulary: Vocabulary
    long_prompt: int
    seed: int = 0

    def draw(self, number: int) -> tuple[str, dict[str, Any], Disconnect]:
        """Return kind and body of a client's request, and when the client disconnects."""
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
        return kind, {**body, "prompt": prompt}, Disconnect(after_s, after_events, is_reset)


async def send_load(origin: Origin, load: DisconnectLoad) -> dict[str, Counter[str]]:
    """Send the requests of all clients; count how those of each kind ended."""
    limit = asyncio.Semaphore(load.concurrency)
    ends = {kind: Counter[str]() for kind in KINDS}
    began_at = shown_at = time.monotonic()
    num_done = 0

    async def one(number: int) -> None:
        nonlocal num_done, shown_at
        async with limit:
            kind, body, disconnect = load.draw(number)
            ends[kind][_end_of(await send_request(origin, body, disconnect))] += 1
        num_done += 1
        if time.monotonic() - shown_at > 10.0:
            shown_at = time.monotonic()
            print(f"{num_done}/{load.num_clients} left, {shown_at - began_at:.0f} s", flush=True)

    async with asyncio.TaskGroup() as group:
        for number in range(load.num_clients):
            group.create_task(one(number))
    return ends


def _end_of(outcome: ClientOutcome) -> str:
    if outcome.has_disconnected:
        return "left during the answer" if outcome.status else "left before the answer"
    if outcome.is_complete:
        return "complete before it could leave"
    return f"{outcome.status} {outcome.error}"


async def measure_solo(
    server: RunningServer, count: int, vocabulary: Vocabulary
) -> dict[str, list[float]]:
    """Return the late tokens and late steps of each disconnect."""
    late: dict[str, list[float]] = {"tokens": [], "steps": []}
    draw = random.Random(3)
    for number in range(count):
        await until_quiet(server)
        before = await asyncio.to_thread(scrape, server)
        body = {"max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 0}
        body |= {"prompt": vocabulary.token_ids(draw, 12), "temperature": 0.0}
        disconnect = Disconnect(None, draw.randint(1, 30), is_reset=number % 2 == 0)
        outcome = await send_request(origin_of(server), body, disconnect)
        await until_quiet(server)
        after = await asyncio.to_thread(scrape, server)
        for name, metric in (
            ("tokens", "vllm:generation_tokens_total"),
            ("steps", "headway_steps_total"),
        ):
            late[name].append(after.total(metric) - before.total(metric) - outcome.num_tokens)
    return late


def count_ends(before: Scrape, after: Scrape) -> dict[str, float]:
    """Return both sides of the equations at the top of this module."""

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


def find_imbalances(counts: dict[str, float]) -> list[str]:
    """Return the equations that the counts break."""
    imbalances = []
    forks = counts["ends"] - counts["prompts_accepted"]
    if not 0 <= forks <= counts["of_them_with_samples"] * (NUM_SAMPLES - 1):
        imbalances.append(
            f"{counts['prompts_accepted']:g} prompts, {counts['of_them_with_samples']:g} of them "
            f"with {NUM_SAMPLES} samples, came to {counts['ends']:g} ends"
        )
    if counts["first_tokens"] != counts["ends_after_a_first_token"]:
        imbalances.append(
            f"{counts['first_tokens']:g} samples began, "
            f"{counts['ends_after_a_first_token']:g} of those ended"
        )
    return imbalances


async def fill_pool(server: RunningServer, load: DisconnectLoad) -> None:
    """Prefill prompts without a common prefix until every KV block has been written."""
    metrics, draw = await asyncio.to_thread(scrape, server), random.Random(load.seed)
    (block_size,) = metrics.by_label("vllm:cache_config_info", "block_size")
    num_tokens = metrics.total("headway_kv_blocks_total") * int(block_size)
    never = Disconnect(None, None, False)
    for _ in range(int(num_tokens / load.long_prompt) + 1):
        prompt = load.vocabulary.token_ids(draw, load.long_prompt)
        outcome = await send_request(origin_of(server), {"prompt": prompt, "max_tokens": 1}, never)
        assert outcome.is_complete, (outcome.status, outcome.error)


async def run(server: RunningServer, load: DisconnectLoad, num_solo: int) -> dict[str, Any]:
    origin = origin_of(server)
    await fill_pool(server, load)
    warm_up = DisconnectLoad(
        max(load.num_clients // 10, 2 * load.concurrency), load.concurrency, load.patience_s,
        load.vocabulary, load.long_prompt, load.seed + 1,
    )  # fmt: skip
    await send_load(origin, warm_up)
    await remains_after(server, both_usages(server))
    usage, before = both_usages(server), await asyncio.to_thread(scrape, server)
    began_at = time.monotonic()
    ends = await send_load(origin, load)
    elapsed_s = time.monotonic() - began_at
    await until_quiet(server)
    after = await asyncio.to_thread(scrape, server)
    remains = await remains_after(server, usage)
    late = await measure_solo(server, num_solo, load.vocabulary)
    restarts = (await asyncio.to_thread(scrape, server)).total("headway_engine_restarts_total")
    return {
        "clients": load.num_clients,
        "elapsed_s": elapsed_s,
        "ends_seen_by_clients": {kind: dict(counts) for kind, counts in ends.items()},
        "accounts": count_ends(before, after),
        "remains": remains.as_json(),
        "engine_restarts": restarts,
        "late_tokens": {**spread(late["tokens"]), "counts": _counts(late["tokens"])},
        "late_steps": {**spread(late["steps"]), "counts": _counts(late["steps"])},
        "tracebacks": server.log.count("Traceback"),
    }


def _counts(values: Sequence[float]) -> dict[str, int]:
    return {f"{value:g}": count for value, count in sorted(Counter(values).items())}


def failures_in(report: dict[str, Any], max_late_steps: float = MAX_LATE_STEPS) -> list[str]:
    """Return the failures that a report shows."""
    failures = leaks_in(report["remains"], MAX_GROWTH_MIB, ("api", "engine"))
    failures += find_imbalances(report["accounts"])
    if report["engine_restarts"] or report["tracebacks"]:
        failures.append(
            f"{report['engine_restarts']:g} restarts, {report['tracebacks']} tracebacks"
        )
    unexpected = [
        end
        for counts in report["ends_seen_by_clients"].values()
        for end in counts
        if not end.startswith(("left", "complete"))
    ]
    if unexpected:
        failures.append(f"unexpected answers: {unexpected[:3]}")
    late = report["late_steps"]
    if late["p99"] is not None and late["p99"] > max_late_steps:
        failures.append(f"{late['p99']:.1f} steps after the client had disconnected (p99)")
    return failures


def main() -> int:
    parser = battery_parser(__doc__)
    parser.add_argument("--clients", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=96)
    parser.add_argument(
        "--patience",
        type=float,
        help="most seconds before a disconnect; default: 6, with --fake 0.3",
    )
    parser.add_argument(
        "--solo", type=int, default=100, help="clients that disconnect alone in the server"
    )
    args = arguments(parser)
    patience_s = args.patience or (0.3 if args.fake else 6.0)
    vocabulary = LETTERS if args.fake else Vocabulary()
    load = DisconnectLoad(args.clients, args.concurrency, patience_s, vocabulary, 1500)
    with (
        tempfile.TemporaryDirectory() as name,
        started(args.model, Path(name), SETTINGS, MODEL_SETTINGS, step_s=0.02) as server,
    ):
        report = run_client(run(server, load, args.solo))
    print(json.dumps(report, indent=2))
    return conclude(report, failures_in(report), args)


if __name__ == "__main__":
    sys.exit(main())
