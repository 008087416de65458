"""Starting and stopping the engine process, and the two sockets that lead to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import zmq
import zmq.asyncio

from headway.engine.messages import Command, Report, Shutdown, decode_report, encode
from headway.errors import EngineDeadError

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


class EngineProcess:
    """One engine process. Its sockets live in a directory only this user can enter."""

    def __init__(self, command: Sequence[str], settings: bytes) -> None:
        """`command` starts the process; `settings`, one line, goes to its standard input."""
        self._folder = Path(tempfile.mkdtemp(prefix="headway-"))  # mode 0700
        address = f"ipc://{self._folder}/engine"
        self._context = zmq.asyncio.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._reports = self._context.socket(zmq.PULL)
        self._commands.set_hwm(0)
        self._commands.bind(f"{address}.commands")
        self._reports.bind(f"{address}.reports")
        self._process = subprocess.Popen(
            [*command, address],
            stdin=subprocess.PIPE,
            # A terminal's Ctrl-C reaches the whole foreground group; only the API process
            # may act on it, or streams would be cut instead of drained.
            start_new_session=True,
        )
        self._tell(settings)

    def _tell(self, settings: bytes) -> None:
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
        except zmq.Again as error:
            raise EngineDeadError("the engine process takes no commands") from error

    async def receive(self) -> Report:
        """The next report; EngineDeadError once the process has gone without a word."""
        while True:
            if await self._reports.poll(timeout=200):
                return decode_report(await self._reports.recv())
            if not self.is_alive:
                raise EngineDeadError(
                    f"the engine process ended with exit code {self._process.returncode}"
                )

    def kill(self) -> None:
        """End it without asking; `stop` must still follow."""
        self._process.kill()

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
