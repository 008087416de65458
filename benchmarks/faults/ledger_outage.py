"""Checks that the ledger has each request once, after database outages and engine failures.

    python -m benchmarks.faults.ledger_outage MODEL [--down 30] [--kills 20] [--json FILE]

A server with the real model writes its ledger to a private PostgreSQL server. Clients stream
without a break, some with several samples, some disconnecting halfway, with so few KV blocks that
requests are preempted. Meanwhile the script kills the engine again and again. After a third of the
kills it stops PostgreSQL as by a crash, and starts it after 30 s. At the end it compares each
complete answer with its row, and the sum of all rows with the tokens that the server counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg

from benchmarks.support import proc_stats
from benchmarks.support.postgres import PostgresServer, find_binaries
from benchmarks.support.servers import RunningServer
from benchmarks.support.streamed import StreamedAnswer, ask

SETTINGS: dict[str, object] = {
    "kv_cache_memory_bytes": "12M",
    "max_model_len": 384,
    "max_engine_restarts": 1000,
    "max_queue_age_s": 600,
    "max_queue_wait_s": 600,
    "dtype": "bf16",
}
RESTARTS = "headway_engine_restarts_total"
TIMEOUT_S = 120.0
COLUMNS = ("request_id", "prompt_tokens", "cached_tokens", "output_tokens", "recomputed_tokens")


@dataclass
class StreamClients:
    """Clients that stream until `is_over`; one in three disconnects from each second answer."""

    client: httpx.AsyncClient
    num_clients: int
    answers: list[StreamedAnswer] = field(default_factory=list)
    disconnected: list[StreamedAnswer] = field(default_factory=list)
    is_over: bool = False

    def start(self) -> list[asyncio.Task[None]]:
        return [
            asyncio.create_task(self._stream_answers(number)) for number in range(self.num_clients)
        ]

    async def _stream_answers(self, number: int) -> None:
        draw = random.Random(number)
        while not self.is_over:
            prompt = " ".join(str(draw.randrange(1000)) for _ in range(draw.randint(4, 24)))
            fields = {"prompt": prompt, "max_tokens": draw.randint(20, 120), "ignore_eos": True}
            fields |= {"n": 3 if number % 4 == 1 else 1, "seed": draw.randrange(1000)}
            self.answers.append(await ask(self.client, fields))
            if number % 3 == 0:
                self.disconnected.append(await ask(self.client, fields, draw.randint(10, 60)))


async def run(
    server: RunningServer, postgres: PostgresServer, down_s: float, num_kills: int
) -> dict[str, Any]:
    """Run the outage and the kills; return the report, with the server idle."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        clients = StreamClients(client, 12)
        tasks = clients.start()
        outage: asyncio.Task[float] | None = None
        for number in range(num_kills):
            if number == num_kills // 3:
                outage = asyncio.create_task(_stop_postgres(server, postgres, down_s))
            await _wait_progress(server, tasks)
            (engine,) = psutil.Process(server.process.pid).children()
            os.kill(engine.pid, signal.SIGKILL)
            await _until(partial(_has_restarted, server, number), server, tasks)
            print(f"{number + 1}/{num_kills} kills, {len(clients.answers)} answers", flush=True)
        num_spooled = await outage if outage is not None else 0.0
        await _wait_progress(server, tasks)
        clients.is_over = True
        await asyncio.gather(*tasks)
    idle = ("vllm:num_requests_running", "headway_ledger_rows_pending")
    await _until(lambda: not any(server.metric(name) for name in idle), server)
    return report_of(server, clients, rows_in(postgres), down_s, num_spooled)


def _has_restarted(server: RunningServer, num_before: int) -> bool:
    return server.metric(RESTARTS) > num_before


async def _stop_postgres(server: RunningServer, postgres: PostgresServer, down_s: float) -> float:
    """Stop PostgreSQL for a while; return the rows that waited for it."""
    await asyncio.to_thread(postgres.stop, signal.SIGQUIT)
    await asyncio.sleep(down_s)
    num_spooled = await asyncio.to_thread(server.metric, "headway_ledger_rows_pending")
    await asyncio.to_thread(postgres.start)
    return num_spooled


async def _wait_progress(server: RunningServer, tasks: list[asyncio.Task[None]]) -> None:
    """Wait for 300 more tokens, so that no request is a suspect at the next kill."""
    name = "vllm:generation_tokens_total"
    await _until(lambda: server.metric("vllm:num_requests_running") > 0, server, tasks)
    before = await asyncio.to_thread(server.metric, name)
    await _until(lambda: server.metric(name) > before + 300, server, tasks)


async def _until(is_so: Any, server: RunningServer, tasks: Any = ()) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not await asyncio.to_thread(is_so):
        for task in tasks:
            if task.done():
                task.result()
        if time.monotonic() > deadline or server.process.poll() is not None:
            raise TimeoutError(f"no progress:\n{server.log[-3000:]}")
        await asyncio.sleep(0.05)


def rows_in(postgres: PostgresServer) -> list[dict[str, Any]]:
    with psycopg.connect(postgres.url) as connection:
        found = connection.execute(f"SELECT {', '.join(COLUMNS)} FROM headway_requests").fetchall()
    return [dict(zip(COLUMNS, row, strict=True)) for row in found]


def report_of(
    server: RunningServer,
    clients: StreamClients,
    rows: list[dict[str, Any]],
    down_s: float,
    num_spooled: float,
) -> dict[str, Any]:
    by_id = {row["request_id"]: row for row in rows}
    different = [one.id for one in clients.answers if not is_same(one, by_id.get(one.id))]
    return {
        "answers_read_to_the_end": len(clients.answers),
        "answers_left_halfway": len(clients.disconnected),
        "answers_that_differ_from_their_row": different,
        "left_without_a_row": [one.id for one in clients.disconnected if one.id not in by_id],
        "rows": len(rows),
        "rows_of_the_same_id": len(rows) - len(by_id),
        "output_tokens_in_rows": sum(row["output_tokens"] for row in rows),
        "output_tokens_counted": server.metric("vllm:generation_tokens_total"),
        "recomputed_tokens_in_rows": sum(row["recomputed_tokens"] for row in rows),
        "preemptions": server.metric("vllm:num_preemptions_total"),
        "engine_restarts": server.metric(RESTARTS),
        "postgres_away_s": down_s,
        "rows_that_waited_for_it": num_spooled,
        "rows_dropped": server.metric("headway_ledger_rows_dropped"),
    }


def is_same(answer: StreamedAnswer, row: dict[str, Any] | None) -> bool:
    usage = answer.usage
    return row is not None and (
        row["output_tokens"] == usage["completion_tokens"]
        and row["prompt_tokens"] == usage["prompt_tokens"]
        and row["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    )


def failures_in(report: dict[str, Any]) -> list[str]:
    """Return the failures that a report shows."""
    failures: list[str] = []
    if report["answers_that_differ_from_their_row"] or report["left_without_a_row"]:
        failures.append("answers are missing from the ledger, or differ")
    num_requests = report["answers_read_to_the_end"] + report["answers_left_halfway"]
    if report["rows_of_the_same_id"] or report["rows"] != num_requests:
        failures.append(f"{report['rows']} rows for {num_requests} requests")
    if report["output_tokens_in_rows"] != report["output_tokens_counted"]:
        failures.append("the rows do not add up to the tokens that were made")
    if report["rows_dropped"] or report["exit_code"]:
        failures.append("rows were dropped, or the server did not end cleanly")
    return failures


def main() -> int:
    parser = proc_stats.battery_parser(__doc__, can_fake=False)
    parser.add_argument("--down", type=float, default=30.0, help="seconds without PostgreSQL")
    parser.add_argument("--kills", type=int, default=20, help="engines killed")
    args = proc_stats.arguments(parser)
    binaries = find_binaries()
    if binaries is None:
        parser.error("no PostgreSQL server here: install Debian's package postgresql")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "postgres").mkdir()
        postgres = PostgresServer(folder / "postgres", binaries)
        postgres.start()
        try:
            settings = {**SETTINGS, "ledger_url": postgres.url}
            with proc_stats.started(args.model, folder, settings) as server:
                report = asyncio.run(run(server, postgres, args.down, args.kills))
                report["exit_code"] = server.stop()
        finally:
            postgres.stop()
    print(json.dumps(report, indent=2))
    return proc_stats.conclude(report, failures_in(report), args)


if __name__ == "__main__":
    sys.exit(main())
