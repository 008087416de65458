"""Injects engine faults under load; measures lost streams and recovery time.

    python -m benchmarks.faults.engine_faults MODEL [--each 20] [--streams 16] [--json FILE]

Each kind of fault is injected `--each` times, in random order and at random moments, under streams.
Every answer is compared with that of a run without faults. The exit code is 1 if a stream other
than a target failed, if a token differed, or if the server process died.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.faults.injection import FOLDER_VARIABLE, inject, is_pending
from benchmarks.faults.streams import StreamClients, expected_answers, make_jobs
from benchmarks.support import proc_stats
from benchmarks.support.servers import RunningServer, free_port, start_process

KINDS = {
    "SIGKILL": "replaces the engine",
    "SIGSTOP": "replaces the engine",
    "exception in the step": "replaces the engine",
    "MemoryError in the step": "replaces the engine",
    "corrupt report frame": "replaces the engine",
    "corrupt command frame": "replaces the engine",
    "NaN logits": "fails one request",
    "tokenizer error": "fails one request",
    "100x slow step": "delays",
}
INBOX = {
    "exception in the step": ("engine", "exception"),
    "MemoryError in the step": ("engine", "memory"),
    "corrupt report frame": ("engine", "garbage"),
    "corrupt command frame": ("api", "garbage"),
    "NaN logits": ("engine", "nan"),
    "tokenizer error": ("api", "tokenizer"),
    "100x slow step": ("engine", "slow"),
}
TIMEOUT_S = 60.0


@dataclass(slots=True)
class Result:
    """Measurements of the faults of one kind."""

    num_injected: int = 0
    num_victims: int = 0
    detected_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)


class Battery:
    """Injects faults into one server under streams."""

    def __init__(self, server: RunningServer, clients: StreamClients, folder: Path) -> None:
        self._server = server
        self._clients = clients
        self._folder = folder
        self.results = {kind: Result() for kind in KINDS}

    def _num_restarts(self) -> float:
        return self._server.metric("headway_engine_restarts_total")

    def _engine_pid(self) -> int:
        (engine,) = psutil.Process(self._server.process.pid).children()
        return engine.pid

    async def inject(self, kind: str) -> None:
        """Inject one fault; wait until every stream continues."""
        result = self.results[kind]
        num_restarts = await asyncio.to_thread(self._num_restarts)
        num_errors = len(self._clients.tally.errors)
        began_at = time.monotonic()
        if kind in INBOX:
            process, fault = INBOX[kind]
            inject(self._folder, process, fault)
            await self._until(lambda: not is_pending(self._folder, process))
            began_at = time.monotonic()
        else:
            os.kill(self._engine_pid(), signal.Signals[kind])
        result.num_injected += 1
        if KINDS[kind] == "replaces the engine":
            await self._until(lambda: self._num_restarts() > num_restarts)
            result.detected_s.append(time.monotonic() - began_at)
        elif KINDS[kind] == "fails one request":
            await self._until(lambda: len(self._clients.tally.errors) > num_errors)
        await self._clients.wait_all_received(time.monotonic())
        result.back_s.append(time.monotonic() - began_at)
        result.num_victims += len(self._clients.tally.errors) - num_errors

    async def _until(self, is_so: Any) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not await asyncio.to_thread(is_so):
            if time.monotonic() > deadline or self._server.process.poll() is not None:
                raise TimeoutError(f"the fault had no effect:\n{self._server.log[-3000:]}")
            await asyncio.sleep(0.02)


def start(model: Path, folder: Path, **settings: Any) -> RunningServer:
    port, admin_port = free_port(), free_port()
    given = {"port": port, "admin_port": admin_port, "deterministic": True, **settings}
    given["ledger_url"] = f"sqlite://{folder}/ledger.db"
    # Waits in the queue are not tested here.
    given |= {"kv_cache_memory_bytes": "512M", "max_engine_restarts": 10_000}
    given |= {"max_queue_age_s": 600, "max_queue_wait_s": 600}
    os.environ[FOLDER_VARIABLE] = str(folder)
    command = [
        sys.executable,
        "-m",
        "benchmarks.faults.faulty_server",
        str(model),
        json.dumps(given),
    ]
    return start_process(command, port, folder / "server.log", admin_port)


async def run(
    model: Path,
    each: int,
    num_streams: int,
    folder: Path,
    kinds: Collection[str] = tuple(KINDS),
    jobs: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    server = start(model, folder)
    try:
        await asyncio.to_thread(server.wait_ready)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            jobs = jobs or make_jobs(32)
            expected = await expected_answers(client, jobs)
            clients = StreamClients(client, jobs, expected, num_streams)
            battery = Battery(server, clients, folder)
            await _inject_all(battery, clients, [kind for kind in kinds for _ in range(each)])
            await clients.stop()
        server.wait_for("vllm:num_requests_running", 0)
        blocks = server.metric("headway_kv_blocks_used")
        return _report(battery, clients, blocks, server.stop(), server.log)
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


async def _inject_all(battery: Battery, clients: StreamClients, faults: list[str]) -> None:
    draw = random.Random(7)
    draw.shuffle(faults)
    began_at = time.monotonic()
    for number, kind in enumerate(faults, 1):
        await clients.wait_all_received(time.monotonic())
        await asyncio.sleep(draw.uniform(0.0, 2.0))
        await battery.inject(kind)
        tally = clients.tally
        print(
            f"{number}/{len(faults)} {time.monotonic() - began_at:.0f} s: {kind}; "
            f"{tally.num_same} answers the same, {len(tally.different)} different, "
            f"{len(tally.errors)} errors",
            flush=True,
        )


def _report(
    battery: Battery, clients: StreamClients, blocks: float, code: int, log: str
) -> dict[str, Any]:
    allowed = sum(r.num_injected for k, r in battery.results.items() if "one request" in KINDS[k])
    tally = clients.tally
    return {
        "kinds": {
            kind: {
                "injected": result.num_injected,
                "requests_failed": result.num_victims,
                "detected_s_median": _median(result.detected_s),
                "detected_s_worst": max(result.detected_s, default=None),
                "all_streams_back_s_median": _median(result.back_s),
                "all_streams_back_s_worst": max(result.back_s, default=None),
            }
            for kind, result in battery.results.items()
        },
        "answers_the_same": tally.num_same,
        "answers_different": tally.different,
        "tokens": tally.num_tokens,
        "errors": len(tally.errors),
        "errors_allowed": allowed,
        "error_texts": sorted(set(tally.errors))[:20],
        "blocks_used_at_the_end": blocks,
        "exit_code": code,
        "unexpected_tracebacks": log.count("cannot be supervised"),
    }


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def failures_in(report: dict[str, Any]) -> list[str]:
    """Return the failures that a report shows."""
    failures = []
    if report["answers_different"]:
        failures.append(f"{len(report['answers_different'])} answers differ")
    if report["errors"] > report["errors_allowed"]:
        failures.append(
            f"{report['errors']} streams failed; {report['errors_allowed']} were targets"
        )
    if report["blocks_used_at_the_end"] or report["exit_code"] or report["unexpected_tracebacks"]:
        failures.append("blocks were left, or the server did not end cleanly")
    kill = report["kinds"]["SIGKILL"]["detected_s_worst"]
    if kill is not None and kill > 1.0:
        failures.append(f"a kill took {kill:.2f} s to detect")
    return failures


def main() -> int:
    parser = proc_stats.battery_parser(__doc__, can_fake=False)
    parser.add_argument("--each", type=int, default=20, help="faults of each kind")
    parser.add_argument("--streams", type=int, default=16)
    args = proc_stats.arguments(parser)
    with tempfile.TemporaryDirectory() as name:
        report = asyncio.run(run(args.model, args.each, args.streams, Path(name)))
    print(json.dumps(report, indent=2))
    return proc_stats.conclude(report, failures_in(report), args)


if __name__ == "__main__":
    sys.exit(main())
