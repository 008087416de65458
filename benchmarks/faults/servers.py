"""Starts or finds the server under test: running, with a model, or fake."""

from __future__ import annotations

import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks.faults.cases import Target
from benchmarks.support.servers import Launcher, RunningServer, start_model_server
from benchmarks.support.tiny_tokenizers import write_byte_level
from headway.config import ServerConfig

RESTARTS = "headway_engine_restarts_total"
DEFAULT_MAX_BODY_BYTES = ServerConfig().max_body_bytes
FAKE_MAX_BODY_BYTES = 100_000
MODEL_FLAGS = ("--prefill-cap", "128", "--kv-cache-memory-bytes", "256M")
"""Small prefill chunks, so that a long prompt delays streams little."""


@dataclass(frozen=True, slots=True)
class Health:
    """Signs that the server or its engine was replaced; None means unknown."""

    is_alive: bool
    engine_pids: tuple[int, ...] | None
    num_restarts: float | None
    num_tracebacks: int | None

    def problems_since(self, before: Health) -> list[str]:
        problems = [] if self.is_alive else ["the server has ended"]
        if self.engine_pids != before.engine_pids:
            problems.append(f"engine processes {before.engine_pids} became {self.engine_pids}")
        if self.num_restarts != before.num_restarts:
            problems.append(f"{RESTARTS} went from {before.num_restarts} to {self.num_restarts}")
        if self.num_tracebacks != before.num_tracebacks:
            problems.append(f"{self.num_tracebacks} tracebacks in the log")
        return problems


@dataclass(frozen=True, slots=True)
class Subject:
    """The server under test; `running` is None if the script did not start it."""

    target: Target
    admin_url: str | None
    running: RunningServer | None = None

    def health(self) -> Health:
        restarts = self._num_restarts()
        if self.running is None:
            return Health(_answers(f"{self.target.url}/health/live"), None, restarts, None)
        process = self.running.process
        if process.poll() is not None:
            return Health(False, (), restarts, self.running.log.count("Traceback"))
        children = psutil.Process(process.pid).children(recursive=True)
        engines = tuple(sorted(child.pid for child in children))
        return Health(True, engines, restarts, self.running.log.count("Traceback"))

    def _num_restarts(self) -> float | None:
        if self.admin_url is None:
            return None
        try:
            with urllib.request.urlopen(f"{self.admin_url}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return None
        # Each reason has a series, from its first restart on.
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(RESTARTS))


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


@contextmanager
def subject(url: str | None, admin_url: str | None, model: str | None) -> Iterator[Subject]:
    """Yield the server at the URL, one with the model, or the fake one; then stop it."""
    if url is not None:
        parts = urlsplit(url)
        target = Target(parts.hostname or "", parts.port or 80, DEFAULT_MAX_BODY_BYTES)
        yield Subject(target, admin_url)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        limit = FAKE_MAX_BODY_BYTES if model is None else DEFAULT_MAX_BODY_BYTES
        running = _start(folder, model)
        try:
            running.wait_ready()
            target = Target("127.0.0.1", running.port, limit)
            yield Subject(target, running.admin_url, running)
        finally:
            if running.process.poll() is None:
                running.stop()
            else:
                print(running.log[-5000:], file=sys.stderr)


def _start(folder: Path, model: str | None) -> RunningServer:
    if model is not None:
        return start_model_server(Path(model), folder / "server.log", *MODEL_FLAGS)
    return Launcher(folder, write_byte_level(folder / "tokenizer.gguf", pre="gpt-2"))()
