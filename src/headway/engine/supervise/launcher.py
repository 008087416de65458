"""Starting and stopping one engine process, and the two sockets that lead to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from headway.engine.process.journal import journal_path, read_journal
from headway.engine.process.messages import Command, Report, Shutdown, decode_report, encode
from headway.errors import EngineDeadError, EngineError

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
STACKS_TIMEOUT_S = 0.5
STACKS_SIGNAL = signal.SIGUSR1
"""The engine answers it by writing the stacks of its threads to standard error."""


class EngineProcess:
    """One engine process. Its sockets live in a directory only this user can enter."""

    def __init__(self, command: Sequence[str], settings: bytes) -> None:
        """`command` starts the process; `settings`, one line, goes to its standard input."""
        self._context = zmq.asyncio.Context()
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="headway-"))  # mode 0700
        except OSError as error:
            raise EngineError(f"the engine process cannot be started: {error}") from error
        self._address = f"ipc://{self._folder}/engine"
        try:
            self._commands = self._context.socket(zmq.PUSH)
            self._reports = self._context.socket(zmq.PULL)
            self._commands.set_hwm(0)
            self._commands.bind(f"{self._address}.commands")
            self._reports.bind(f"{self._address}.reports")
            self._process = subprocess.Popen(
                [*command, self._address],
                stdin=subprocess.PIPE,
                # A terminal's Ctrl-C reaches the whole foreground group; only the API process
                # may act on it, or streams would be cut instead of drained.
                start_new_session=True,
            )
        except (OSError, zmq.ZMQError) as error:
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise EngineError(f"the engine process cannot be started: {error}") from error
        self._send_settings(settings)

    def _send_settings(self, settings: bytes) -> None:
        stdin = self._process.stdin
        if stdin is None:
            raise EngineDeadError("the engine process has no standard input")
        # Left open on purpose: the engine takes its end as the sign that we are gone.
        with contextlib.suppress(BrokenPipeError):
            stdin.write(settings + b"\n")
            stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def send(self, command: Command) -> None:
        """Pass a command on without waiting: with nobody at the other end, waiting has no end."""
        try:
            await self._commands.send(encode(command), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineDeadError("the engine process takes no commands") from error

    async def receive(self, timeout_s: float) -> Report | None:
        """The next report, or None if none comes in time. EngineDeadError once the process has
        gone and everything it said has been received."""
        if await self._reports.poll(timeout=int(timeout_s * 1000)):
            try:
                return decode_report(await self._reports.recv())
            except (msgspec.DecodeError, ValueError) as error:  # the latter of text that is none
                # What it said is lost, and with it what state it is in.
                raise EngineError(f"a report of the engine cannot be read: {error}") from error
        if not self.is_alive:
            raise EngineDeadError(
                f"the engine process ended with exit code {self._process.returncode}"
            )
        return None

    async def dump_stacks(self) -> None:
        """Have it write down where it is; one that is stopped, not hung, cannot."""
        if self.is_alive:
            self._process.send_signal(STACKS_SIGNAL)
            await asyncio.sleep(STACKS_TIMEOUT_S)

    def unfinished_step(self) -> frozenset[str]:
        """The ids of the requests in the step it was computing when it ended, if it was."""
        return read_journal(journal_path(self._address))

    def kill(self) -> None:
        """End it without asking; `stop` must still follow."""
        self._process.kill()

    async def wait(self) -> None:
        """Until it has ended, as one that was killed does unless the kernel is stuck in it."""
        try:
            await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise EngineDeadError("the engine process cannot be killed") from error

    async def stop(self) -> None:
        """Ask it to leave, then insist; afterwards no process and no file is left."""
        if self.is_alive:
            with contextlib.suppress(zmq.ZMQError, EngineDeadError):
                await self.send(Shutdown())
            await asyncio.to_thread(self._wait_or_kill)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_or_kill(self) -> None:
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("the engine did not stop within %.0f s; killing it", STOP_TIMEOUT_S)
            self._process.kill()
            self._process.wait()
