"""Controls a runner process: starts it, runs workloads, stops it between turns."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.bench.steal import StealMeter, steal_plain

CLOSE_TIMEOUT_S = 10.0
SHOWN_LINES = 3


class RunnerError(Exception):
    """A runner ended, failed or exceeded its time limit."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Command and environment of one contender's process."""

    name: str
    about: str
    command: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    unavailable: str | None = None
    """Reason why the process cannot be started, if any."""


class RunnerProcess:
    """One process group that runs workloads and answers with lines of JSON.

    A stopped group (SIGSTOP) gets no CPU time, so that its spinning threads do not disturb the
    contender that runs.
    """

    def __init__(self, launch: Launch, cwd: Path, log: Path) -> None:
        self._name = launch.name
        self._log = log
        self._pending = b""
        self.started_at = time.monotonic()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                launch.command,
                cwd=cwd,
                env={**clean_environment(), **dict(launch.variables)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the first line, sent once the model is loaded."""
        return self._read("ready", timeout_s)

    def ask(self, workload: str, sampling: str, timeout_s: float) -> dict[str, Any]:
        """Run a workload; return its figures with the steal of the timed run."""
        stdin = self._process.stdin
        if stdin is None:
            raise RunnerError("it has no input")
        try:
            stdin.write(f"run {workload} {sampling}\n".encode())
            stdin.flush()
        except OSError as error:
            raise RunnerError(self._end_reason()) from error
        self._read("started", timeout_s)
        meter = StealMeter()
        figures = self._read("result", timeout_s)
        del figures["event"]
        return {**figures, "steal": steal_plain(meter.read())}

    def stop_group(self) -> None:
        self._signal(signal.SIGSTOP)

    def continue_group(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process and its children."""
        self.continue_group()
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
                self._process.wait(CLOSE_TIMEOUT_S)
            except (OSError, subprocess.TimeoutExpired):
                pass
        self._signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self, event: str, timeout_s: float) -> dict[str, Any]:
        answer = json.loads(self._read_line(time.monotonic() + timeout_s, timeout_s))
        if answer["event"] == "error":
            raise RunnerError(answer["message"])
        if answer["event"] != event:
            raise RunnerError(f"{answer['event']} where {event} was expected")
        return answer

    def _read_line(self, until: float, timeout_s: float) -> bytes:
        stdout = self._process.stdout
        if stdout is None:
            raise RunnerError("it has no output")
        while b"\n" not in self._pending:
            ready, _, _ = select.select([stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise RunnerError(f"no answer after {timeout_s:g} s")
            chunk = os.read(stdout.fileno(), 1 << 16)
            if not chunk:
                raise RunnerError(self._end_reason())
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _end_reason(self) -> str:
        try:
            code = self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it closed its output"
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return f"it ended ({how}): {last_lines(self._log)}"

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def last_lines(log: Path) -> str:
    """Return the last lines that a process printed."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return "nothing printed"
    words = [line.strip() for line in lines if line.strip()]
    return " | ".join(words[-SHOWN_LINES:]) or "nothing printed"


def clean_environment() -> dict[str, str]:
    """Return this environment without HEADWAY_* settings, Python paths and a ban on bytecode.

    Without bytecode, Python compiles every module anew at each start.
    """
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("HEADWAY_") and key not in dropped
    }
