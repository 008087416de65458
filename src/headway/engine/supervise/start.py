"""Starts engine processes. Needs the standard library alone, so that one can start early.

An engine process imports its modules, then reads its settings. `headway serve` starts the first
one before it reads its own settings and imports its own modules, which takes as long.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headway.errors import EngineError

logger = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "headway.engine_main")
STACKS_SIGNAL = signal.SIGUSR1
"""On this signal the engine writes the stacks of its threads to standard error."""


class EngineMemory:
    """Memory for the KV blocks of engine processes; it outlives each of them.

    No mount limits it, such as the small /dev/shm of a container. Only processes that inherit the
    descriptor can reach it.
    """

    def __init__(self) -> None:
        """Raises OSError if the system has no such memory."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd")
        self.descriptor = os.memfd_create("headway-kv")

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class EngineStart:
    """An engine process that waits for its settings, and the folder of its sockets."""

    def __init__(
        self,
        command: Sequence[str] = ENGINE_COMMAND,
        memory: EngineMemory | None = None,
        is_standby: bool = False,
    ) -> None:
        """Start the process. A standby process loads its weights, then waits for a line."""
        arguments = [] if memory is None else [f"--kv-descriptor={memory.descriptor}"]
        if is_standby:
            arguments.append("--standby")
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="headway-"))  # mode 0700
            self.address = f"ipc://{self.folder}/engine"
            self.process = subprocess.Popen(
                [*command, self.address, *arguments],
                stdin=subprocess.PIPE,
                pass_fds=() if memory is None else (memory.descriptor,),
                # Ctrl-C in a terminal reaches the whole foreground group. Only the API process
                # may act on it, or streams would be cut instead of drained.
                start_new_session=True,
            )
        except OSError as error:
            if hasattr(self, "folder"):
                shutil.rmtree(self.folder, ignore_errors=True)
            raise EngineError(f"the engine process cannot be started: {error}") from error
        self.memory = memory

    def close(self) -> None:
        """Kill the process if it is alive; remove its folder."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def make_memory() -> EngineMemory | None:
    """Return memory that outlives engines; None if it cannot be had."""
    try:
        return EngineMemory()
    except OSError as error:
        logger.warning("KV blocks will not outlive the engine process: %s", error)
        return None
