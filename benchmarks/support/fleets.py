"""Starts fleets: engine hosts and frontends in processes of their own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.support.fake_engine import Settings
from benchmarks.support.servers import (
    ROOT,
    RunningServer,
    ServerFailed,
    free_port,
    start_process,
)


@dataclass
class RunningEngine:
    """An engine host, its engine process and its log."""

    process: subprocess.Popen[str]
    address: str
    log_path: Path
    command: list[str]

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def engine_pid(self) -> int:
        """Process id of the engine process that serves now."""
        return int(re.findall(r"engine process (\d+) is ready", self.log)[-1])

    def wait_ready(self, timeout_s: float = 60.0) -> RunningEngine:
        deadline = time.monotonic() + timeout_s
        while "the engine is ready" not in self.log:
            if self.process.poll() is not None:
                raise ServerFailed(f"the engine ended with {self.process.returncode}:\n{self.log}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"the engine was not ready in time:\n{self.log}")
            time.sleep(0.02)
        return self

    def kill_host(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait(20)

    def kill_engine(self, number: int = signal.SIGKILL, timeout_s: float = 30.0) -> None:
        """Send a signal to the engine process; to the next one, if it is being replaced."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return os.kill(self.engine_pid, number)
            except ProcessLookupError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def restart(self) -> None:
        """Start the host again after it was killed, on the same address."""
        self.process.wait(20)
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, text=True, cwd=ROOT
            )

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


class RunningRouter:
    """A router process and its log."""

    def __init__(self, command: list[str], address: str, log_path: Path) -> None:
        self.command = command
        self.address = address
        self.log_path = log_path
        self.start()

    def start(self) -> None:
        """Start it, or start it again after it was killed."""
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, text=True, cwd=ROOT
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.wait(20)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


class Fleet:
    """Starts fake engines and their frontends; `close` ends those that still run."""

    def __init__(self, folder: Path, tokenizer_path: Path) -> None:
        self._folder = folder
        self._tokenizer_path = tokenizer_path
        self.engines: list[RunningEngine] = []
        self.frontends: list[RunningServer] = []
        self.routers: list[RunningRouter] = []

    def start_engine(
        self, host: dict[str, object] | None = None, **settings: object
    ) -> RunningEngine:
        """Start an engine host with the fake engine process."""
        address = f"tcp://127.0.0.1:{free_port()}"
        encoded = msgspec.json.encode(Settings(**settings)).decode()  # pyright: ignore
        for_host = msgspec.json.encode(host or {}).decode()
        command = [sys.executable, "-m", "benchmarks.support.fake_host", address, encoded]
        return self._start_engine([*command, for_host, str(self._tokenizer_path)], address)

    def start_model_engine(self, model_path: Path, *flags: str) -> RunningEngine:
        """Start `headway engine` with a model."""
        address = f"tcp://127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "headway", "engine", str(model_path)]
        return self._start_engine([*command, "--listen", address, *flags], address)

    def _start_engine(self, command: list[str], address: str) -> RunningEngine:
        log_path = self._folder / f"engine-{len(self.engines)}.log"
        with log_path.open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, text=True, cwd=ROOT)
        self.engines.append(RunningEngine(process, address, log_path, command))
        return self.engines[-1]

    def start_frontend(self, **server: object) -> RunningServer:
        """Start a frontend of all engines, with the fake tokenizer."""
        port, admin_port = free_port(), free_port()
        given: dict[str, object] = {"admin_port": admin_port, "max_queue_age_s": 60.0}
        if "discover" not in server and "engine" not in server:
            given["engine"] = [engine.address for engine in self.engines]
        settings = msgspec.json.encode({**given, **server}).decode()
        command = [sys.executable, "-m", "benchmarks.support.fake_server", str(port), "{}"]
        return self._add(
            start_process(
                [*command, settings, str(self._tokenizer_path)], port, self._log(), admin_port
            )
        )

    def start_model_frontend(self, model_path: Path, *flags: str) -> RunningServer:
        """Start `headway frontend`, of all engines unless the flags name some."""
        port, admin_port = free_port(), free_port()
        command = [sys.executable, "-m", "headway", "frontend", str(model_path)]
        command += ["--port", str(port), "--admin-port", str(admin_port)]
        command += ["--ledger-url", f"sqlite://{self._folder}/ledger.db"]
        if "--engine" not in flags:
            command += [flag for engine in self.engines for flag in ("--engine", engine.address)]
        return self._add(start_process([*command, *flags], port, self._log(), admin_port))

    def start_router(self, *flags: str) -> RunningRouter:
        """Start `headway router`; frontends that are started later must name it."""
        address = f"tcp://127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "headway", "router", "--listen", address, *flags]
        router = RunningRouter(command, address, self._folder / f"router-{len(self.routers)}.log")
        self.routers.append(router)
        return router

    def _log(self) -> Path:
        return self._folder / f"frontend-{len(self.frontends)}.log"

    def _add(self, frontend: RunningServer) -> RunningServer:
        self.frontends.append(frontend)
        return frontend

    def close(self) -> None:
        for process in (*self.frontends, *self.engines, *self.routers):
            if process.process.poll() is None:
                os.kill(process.process.pid, signal.SIGCONT)
                process.stop()
