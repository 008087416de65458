"""Talks to one engine process over two sockets, and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess

import msgspec
import psutil
import zmq
import zmq.asyncio

from headway.engine.process.journal import journal_path, read_journal
from headway.engine.process.messages import (
    Command,
    EngineReady,
    Report,
    Shutdown,
    decode_report,
    encode,
)
from headway.engine.supervise.start import STACKS_SIGNAL, EngineStart
from headway.errors import EngineDeadError, EngineError

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
STACKS_TIMEOUT_S = 0.5
LAST_REPORTS_TIMEOUT_MS = 20
CONNECT_TIMEOUT_MS = 5000


class EngineProcess:
    """One engine process and the sockets to it, in a folder that only this user can enter."""

    def __init__(self, start: EngineStart, settings: bytes) -> None:
        """Bind the sockets; write `settings`, one line, to the standard input of the process."""
        self._start = start
        self._process = start.process
        self._cpu_s = 0.0
        self._context = zmq.asyncio.Context()
        try:
            self._commands = self._context.socket(zmq.PUSH)
            self._reports = self._context.socket(zmq.PULL)
            self._commands.set_hwm(0)
            self._commands.bind(f"{start.address}.commands")
            self._reports.bind(f"{start.address}.reports")
        except (OSError, zmq.ZMQError) as error:
            self._context.destroy(linger=0)
            start.close()
            raise EngineError(f"the engine process cannot be started: {error}") from error
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._reports, zmq.POLLIN)
        self._death = _watch_death(self.pid)
        if self._death is not None:
            self._poller.register(self._death, zmq.POLLIN)
        self._send_line(settings)

    def _send_line(self, line: bytes) -> None:
        stdin = self._process.stdin
        if stdin is None:
            raise EngineDeadError("the engine process has no standard input")
        # Stays open: the engine stops when its standard input ends.
        with contextlib.suppress(BrokenPipeError):
            stdin.write(line + b"\n")
            stdin.flush()

    def activate(self) -> None:
        """Have a standby process take over the KV blocks and become ready."""
        self._send_line(b"")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def cpu_s(self) -> float:
        """Return the CPU time that the process has used, as last known if it cannot be read."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except (psutil.Error, OSError):  # the process has ended, or no descriptor is left
            return self._cpu_s
        self._cpu_s = times.user + times.system
        return self._cpu_s

    async def send(self, command: Command) -> None:
        """Send a command without waiting; a dead process would never take it."""
        try:
            await self._commands.send(encode(command), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineDeadError("the engine process takes no commands") from error

    async def receive(self, timeout_s: float) -> Report | None:
        """Return the next report, or None after `timeout_s`; EngineReady once commands get there.

        Raises EngineDeadError once the process has ended and all its reports were received.
        """
        await self._poller.poll(int(timeout_s * 1000))
        is_alive = self.is_alive
        frame = await self._take_frame()
        if frame is None and not is_alive:
            # The last reports of a process that has ended may still be on their way.
            await self._reports.poll(LAST_REPORTS_TIMEOUT_MS)
            frame = await self._take_frame()
        if frame is not None:
            try:
                report = decode_report(frame)
            except (msgspec.DecodeError, ValueError) as error:  # ValueError: text is not UTF-8
                # Without this report the state of the engine is unknown.
                raise EngineError(f"a report of the engine cannot be read: {error}") from error
            if isinstance(report, EngineReady):
                await self._wait_until_connected()
                logger.info("engine process %d is ready", self.pid)
            return report
        if not is_alive:
            raise EngineDeadError(
                f"the engine process ended with exit code {self._process.returncode}"
            )
        return None

    async def _wait_until_connected(self) -> None:
        """Wait until commands reach the process, or until it ends: those sent before were lost."""
        poller = zmq.asyncio.Poller()
        poller.register(self._commands, zmq.POLLOUT)
        if self._death is not None:
            poller.register(self._death, zmq.POLLIN)
        if not await poller.poll(CONNECT_TIMEOUT_MS) and self.is_alive:
            raise EngineError("the engine process is ready but takes no commands")

    async def _take_frame(self) -> bytes | None:
        """Return the next frame; None if there is none.

        Never waits: a readable socket has no frame if its sender has gone since.
        """
        try:
            return await self._reports.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    async def dump_stacks(self) -> None:
        """Have the process write the stacks of its threads; a stopped process cannot."""
        if self.is_alive:
            self._process.send_signal(STACKS_SIGNAL)
            await asyncio.sleep(STACKS_TIMEOUT_S)

    def unfinished_step(self) -> frozenset[str]:
        """Return the ids of the requests in the step that did not end, if any."""
        return read_journal(journal_path(self._start.address))

    def kill(self) -> None:
        """Kill the process; `stop` must still follow."""
        self._process.kill()

    async def wait(self) -> None:
        """Wait until a killed process has ended; raise EngineDeadError if it does not."""
        try:
            await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise EngineDeadError("the engine process cannot be killed") from error

    async def stop(self) -> None:
        """Stop the process, by force after a timeout; remove its sockets and files."""
        if self.is_alive:
            with contextlib.suppress(zmq.ZMQError, EngineDeadError):
                await self.send(Shutdown())
            await asyncio.to_thread(self._wait_or_kill)
        self.discard()

    def discard(self) -> None:
        """Kill the process if it is alive; remove its sockets and files."""
        if self._death is not None:
            self._poller.unregister(self._death)
            os.close(self._death)
            self._death = None
        self._context.destroy(linger=0)
        self._start.close()

    def _wait_or_kill(self) -> None:
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.warning("the engine did not stop within %.0f s; killing it", STOP_TIMEOUT_S)
            self._process.kill()
            self._process.wait()


def _watch_death(pid: int) -> int | None:
    """Return a descriptor that is readable once the process has ended; None if there is none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # an old kernel, or no descriptor left
        return None
