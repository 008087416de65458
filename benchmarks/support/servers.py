"""Starts servers in their own processes, with the fake engine or a model."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path

import httpx
import msgspec

from benchmarks.support.fake_engine import Settings

ROOT = Path(__file__).parents[2]


class ServerFailed(Exception):
    """A server ended, or an expected change did not occur in time."""


def free_port() -> int:
    """Return a port for a server, which no other process takes by chance.

    Processes that look for a free port at the same time would find the same one, and so would a
    client that connects. A bound socket keeps them away, but no server, until this process ends.
    """
    reserved = socket.socket()
    reserved.bind(("127.0.0.1", 0))
    # Servers set it too. Set before `bind`, it would let others be given the same port.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port = int(reserved.getsockname()[1])
    reserved.detach()  # stays open
    return port


def _get(url: str, headers: dict[str, str] | None = None) -> httpx.Response:
    """Send one GET without TLS.

    Without `verify=False`, httpx reads all CA certificates for each call: 0.1 s of CPU per poll.
    """
    return httpx.get(url, headers=headers, verify=False)


@dataclass
class RunningServer:
    process: subprocess.Popen[str]
    port: int
    log_path: Path
    admin_port: int = 0

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_ready(self, key: str = "", timeout_s: float = 180.0) -> RunningServer:
        deadline = time.monotonic() + timeout_s
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerFailed(f"the server ended with {self.process.returncode}:\n{self.log}")
            try:
                if _get(f"{self.url}/health/ready", headers).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise ServerFailed(f"the server was not ready in time:\n{self.log}")

    def metric(self, name: str) -> float:
        """Return the sum of all series of a metric."""
        lines = _get(f"{self.admin_url}/metrics").text.splitlines()
        values = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in values)

    def wait_for(self, name: str, value: float, timeout_s: float = 10.0) -> None:
        self._wait_in(name, value, value, timeout_s)

    def wait_at_least(self, name: str, value: float, timeout_s: float = 30.0) -> None:
        self._wait_in(name, value, inf, timeout_s)

    def _wait_in(self, name: str, least: float, most: float, timeout_s: float) -> None:
        """Wait until a metric is between two values."""
        deadline = time.monotonic() + timeout_s
        while not least <= (now := self.metric(name)) <= most:
            if time.monotonic() > deadline:
                raise ServerFailed(f"{name} is {now}, not {least} to {most}")
            time.sleep(0.02)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


def start_process(
    command: list[str], port: int, log_path: Path, admin_port: int = 0
) -> RunningServer:
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True, cwd=ROOT)
    return RunningServer(process, port, log_path, admin_port)


def start_model_server(model_path: Path, log_path: Path, *flags: str) -> RunningServer:
    """Start `headway serve` with a model and flags."""
    port, admin_port = free_port(), free_port()
    ports = ("--port", str(port), "--admin-port", str(admin_port))
    flags = ("--ledger-url", f"sqlite://{log_path.parent}/ledger.db", *flags)
    command = [sys.executable, "-m", "headway", "serve", str(model_path), *ports, *flags]
    return start_process(command, port, log_path, admin_port)


class Launcher:
    """Starts fake servers; `close` ends those that still run."""

    def __init__(self, folder: Path, tokenizer_path: Path) -> None:
        self._folder = folder
        self._tokenizer_path = tokenizer_path
        self._servers: list[RunningServer] = []

    def __call__(
        self,
        port: int | None = None,
        server: dict[str, object] | None = None,
        module: str = "benchmarks.support.fake_server",
        under: tuple[str, ...] = (),
        **settings: object,
    ) -> RunningServer:
        """Start a fake server; `under` is a command that takes the server as arguments."""
        port, admin_port = port or free_port(), free_port()
        encoded = msgspec.json.encode(Settings(**settings)).decode()  # pyright: ignore
        for_server = msgspec.json.encode({"admin_port": admin_port, **(server or {})}).decode()
        arguments = (str(port), encoded, for_server, str(self._tokenizer_path))
        log_path = self._folder / f"server-{len(self._servers)}.log"
        command = [*under, sys.executable, "-m", module, *arguments]
        self._servers.append(start_process(command, port, log_path, admin_port))
        return self._servers[-1]

    def close(self) -> None:
        for server in self._servers:
            if server.process.poll() is None:
                server.stop()
