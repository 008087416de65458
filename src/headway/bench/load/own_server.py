"""A server of this installation in a process of its own, to be measured."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from headway.bench.load.http import Origin, parse_url
from headway.errors import ConfigError

READY_S = 600.0
"""Longest time to load a model."""
STOP_S = 30.0
NUM_LOG_LINES = 12


@dataclass(slots=True)
class OwnServer:
    """`headway serve` on free ports of this machine."""

    process: subprocess.Popen[bytes]
    origin: Origin
    log_path: Path
    start_s: float = 0.0
    """Seconds from the start of the process until it was ready."""

    @staticmethod
    def start(model: str, folder: Path, flags: Sequence[str]) -> OwnServer:
        """Start a server with its log in `folder`; wait until it is ready."""
        port, log_path = _free_port(), folder / "server.log"
        command = [sys.executable, "-m", "headway", "serve", model, "--port", str(port)]
        command += ["--admin-port", "none", "--ledger-url", f"sqlite://{folder}/ledger.db", *flags]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        server = OwnServer(process, parse_url(f"http://127.0.0.1:{port}"), log_path)
        try:
            server._wait_ready()
        except BaseException:
            server.stop()
            raise
        return server

    def stop(self) -> None:
        """Stop the server, and wait until it has written all it records."""
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _wait_ready(self) -> None:
        began_at = time.monotonic()
        while time.monotonic() - began_at < READY_S:
            if self.process.poll() is not None:
                raise ConfigError(f"the server did not start:\n{self._last_lines()}")
            try:
                with urlopen(f"{self.origin.url}/health/ready", timeout=5.0) as answer:
                    if answer.status == 200:
                        self.start_s = time.monotonic() - began_at
                        return
            except (URLError, OSError):
                pass
            time.sleep(0.02)
        raise ConfigError(f"the server was not ready in {READY_S:.0f} s:\n{self._last_lines()}")

    def _last_lines(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-NUM_LOG_LINES:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
