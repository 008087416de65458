"""Processes without a parent, and the pid files by which they are found again.

A pid file has the start time of the process too: after the process has ended, its number may be
that of another process, which must not be taken for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.config import daemon_environment
from headway.errors import ConfigError

MAX_PID_FILE_BYTES = 8192
START_TIMEOUT_S = 20.0
LAST_TIMEOUT_S = 10.0
"""Time for a process to end after a second signal."""
DAEMON = "headway.fleet.manage.daemon"


class ProcessRecord(msgspec.Struct, frozen=True):
    """The content of a pid file."""

    pid: int
    started: int
    """Start time of the process in ticks since the machine started."""
    address: str = ""
    admin: str = ""

    @property
    def is_alive(self) -> bool:
        return start_ticks(self.pid) == self.started

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def start_ticks(pid: int) -> int | None:
    """Return when a process was started; None if there is none, or only what is left of one."""
    try:
        # The name, in parentheses, may contain spaces.
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in ("Z", "X") else int(numbers[18])


def read_record(path: Path) -> ProcessRecord | None:
    """Return the record of a pid file; None if there is none that can be read."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_PID_FILE_BYTES), type=ProcessRecord)
    except (OSError, msgspec.DecodeError, ValueError):
        return None


def find_alive(path: Path) -> ProcessRecord | None:
    """Return the record of a pid file whose process is alive."""
    record = read_record(path)
    return record if record is not None and record.is_alive else None


def start_daemon(
    command: Sequence[str], pid_file: Path, log_file: Path, address: str = "", admin: str = ""
) -> ProcessRecord:
    """Start a process that outlives this one; raise ConfigError if it does not start.

    It has no parent here, a session of its own and niceness 0, and writes its pid file before
    it runs the command.
    """
    pid_file.unlink(missing_ok=True)
    words = [str(pid_file), str(log_file), address, admin]
    run = subprocess.run(
        [sys.executable, "-m", DAEMON, *words, *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        env=daemon_environment(),
        check=False,
    )
    if run.returncode or not run.stdout:
        pid_file.unlink(missing_ok=True)
        raise ConfigError(f"{command[0]} cannot be started: {run.stderr.strip()[-300:]}")
    return msgspec.json.decode(run.stdout, type=ProcessRecord)


def end_process(record: ProcessRecord, timeout_s: float) -> None:
    """End a process: SIGTERM, a second one after the timeout, and SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        record.send(number)
        if wait_end(record, timeout_s):
            return
        timeout_s = LAST_TIMEOUT_S


def wait_end(record: ProcessRecord, timeout_s: float) -> bool:
    """Wait until a process has ended; return whether it has."""
    deadline = time.monotonic() + timeout_s
    while record.is_alive:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def last_line(path: Path, num_bytes: int = 2000) -> str:
    """Return the last line of a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            lines = file.read(num_bytes).decode("utf-8", "replace").strip().splitlines()
    except OSError:
        return "it has no log"
    return lines[-1][:300] if lines else "its log is empty"
