"""The program between a host and a process without a parent.

    python -m headway.fleet.manage.daemon PID_FILE LOG_FILE ADDRESS ADMIN COMMAND...

Ends when a child of it, which has no parent then, has written its pid file and runs the command;
prints the content of the pid file, which the command may remove at once.
Ray ends the children of its workers, and all workers a minute after the head is lost; a process
without a parent goes on.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from headway.fleet.manage.folders import write_atomically
from headway.fleet.manage.processes import ProcessRecord, start_ticks


def main() -> int:
    """Run the command of the arguments in a process without a parent; return the exit code."""
    pid_file, log_file, address, admin, *command = sys.argv[1:]
    os.setsid()
    reader, writer = os.pipe()  # closed when the command runs
    if not os.fork():
        try:
            _become(Path(pid_file), log_file, (address, admin), command)
        except OSError as error:
            os.write(writer, str(error).encode())
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader, "rb") as errors:
        problem = errors.read().decode()
    sys.stderr.write(problem)
    return 1 if problem else 0


def _become(
    pid_file: Path, log_file: str, addresses: tuple[str, str], command: Sequence[str]
) -> NoReturn:
    """Make this process the one of the command."""
    with contextlib.suppress(PermissionError):  # only root may go below the niceness it has
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    pid = os.getpid()
    record = msgspec.json.encode(ProcessRecord(pid, start_ticks(pid) or 0, *addresses))
    write_atomically(pid_file, record)
    os.write(1, record)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    sys.exit(main())
