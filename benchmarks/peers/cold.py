"""Measures the time from process start to the first token of a 64-token prompt.

For the peers and for Headway as a library, the process is the runner. For Headway as a server, it
is `headway serve`, and the token arrives over HTTP. Files are in the page cache after the first
round, and every engine keeps what it compiled.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.catalog import ROOT
from benchmarks.peers.compare import log_of, outcome_of, rotated, say
from benchmarks.peers.contenders import Variant
from benchmarks.peers.host import (
    Launch,
    RunnerError,
    RunnerProcess,
    clean_environment,
    last_lines,
)
from benchmarks.peers.results import Result
from benchmarks.peers.runner import GREEDY
from benchmarks.peers.workloads import COLD
from headway.bench.steal import StealMeter, steal_plain

POLL_S = 0.02
STOP_TIMEOUT_S = 30.0
LIBRARY = "(library)"


@dataclass(frozen=True, slots=True)
class Starter:
    """One contender, and the function that measures one start."""

    name: str
    measure: Callable[[], dict[str, Any]]
    unavailable: str | None = None


def run_cold(starters: Sequence[Starter], rounds: int, record: Callable[[Result], None]) -> None:
    """Measure all starts in interleaved rounds; the order rotates by one per round."""
    started = time.strftime("%Y-%m-%dT%H:%M:%S")
    failed: dict[str, str] = {}
    for number in range(1, rounds + 1):
        for starter in rotated(starters, number - 1):
            figures: dict[str, Any] = {}
            reason = starter.unavailable or failed.get(starter.name)
            if reason is None:
                say(f"round {number}, {COLD}: {starter.name}")
                meter = StealMeter()
                try:
                    figures = {**starter.measure(), "steal": steal_plain(meter.read())}
                except (RunnerError, OSError) as error:
                    reason = failed[starter.name] = str(error)
            result = Result(number, COLD, starter.name, figures, reason, started)
            say(f"  {starter.name}: {outcome_of(result)}")
            record(result)


def library_starter(launch: Launch, name: str, logs: Path, timeout_s: float) -> Starter:
    def measure() -> dict[str, Any]:
        process = RunnerProcess(launch, ROOT, log_of(logs, f"cold-{name}"))
        try:
            ready = process.wait_ready(timeout_s)
            ready_at = time.monotonic()
            process.ask(COLD, GREEDY, timeout_s)
            figures = _figures(process.started_at, ready_at, time.monotonic())
            return {**figures, "details": ready["details"]}
        finally:
            process.close()

    return Starter(name, measure, launch.unavailable)


def server_starter(
    variant: Variant, model: Path, prompt: Sequence[int], logs: Path, timeout_s: float
) -> Starter:
    def measure() -> dict[str, Any]:
        port = _free_port()
        command = [sys.executable, "-m", "headway", "serve", str(model)]
        command += ["--port", str(port), "--admin-port", "none"]
        log = log_of(logs, f"cold-{variant.name}-serve")
        started_at = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**clean_environment(), **dict(variant.variables)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            until = started_at + timeout_s
            ready_at = _wait_ready(process, port, log, until)
            return _figures(started_at, ready_at, _first_token_at(port, prompt, until))
        finally:
            _stop(process)

    return Starter(f"{variant.name} serve", measure)


def _figures(started_at: float, ready_at: float, first_token_at: float) -> dict[str, Any]:
    return {"load_s": ready_at - started_at, "first_token_s": first_token_at - started_at}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path, until: float) -> float:
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RunnerError(f"it ended (exit code {process.returncode}): {last_lines(log)}")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health/ready")
            status = connection.getresponse().status
            connection.close()
        except OSError:
            status = 0
        if status == 200:
            return time.monotonic()
        time.sleep(POLL_S)
    raise RunnerError(f"not ready in time: {last_lines(log)}")


def _first_token_at(port: int, prompt: Sequence[int], until: float) -> float:
    timeout_s = max(1.0, until - time.monotonic())
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    body = {
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise RunnerError(f"HTTP {response.status}: {response.read(500)!r}")
    while line := response.readline():
        if line.startswith(b"data:"):
            at = time.monotonic()
            connection.close()
            return at
    raise RunnerError("the stream ended without a token")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
