"""The engine process: takes commands from a socket, runs steps, sends events back.

The loop owns its sockets and the journal; the caller builds the core. The process ends on a
Shutdown command, on a failure, or when its parent process ends. Standard input shows the latter: it
reaches its end when the parent is gone.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys
from collections.abc import Callable

import zmq

from headway.core.engine import EngineCore
from headway.core.events import Event, Refused, Sink
from headway.core.request import Request
from headway.engine.process.grammar_queue import GrammarQueue
from headway.engine.process.journal import StepJournal, journal_path
from headway.engine.process.messages import (
    AbortRequests,
    AddRequest,
    Command,
    EngineFailed,
    EngineInfo,
    EngineReady,
    LoadProgress,
    Report,
    Shutdown,
    batch_events,
    decode_command,
    encode,
)
from headway.errors import HeadwayError

logger = logging.getLogger(__name__)

MAX_COMMANDS_PER_STEP = 1024
NUM_PROGRESS_REPORTS = 20
Progress = Callable[[int, int], None]
CoreFactory = Callable[[Sink, Progress], tuple[EngineCore, EngineInfo]]


def ignore_stop_signals() -> None:
    """Leave the signals that stop or reload a server to the API process.

    A service manager signals every process of a service. The engine must outlive the drain of the
    API process; the end of standard input stops the engine.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


class EngineLoop:
    """Takes commands between two steps, and reports after each step."""

    def __init__(self, address: str) -> None:
        """Connect to the two ipc sockets of the API process; `address` is their prefix."""
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._reports = self._context.socket(zmq.PUSH)
        self._commands.connect(f"{address}.commands")
        self._reports.connect(f"{address}.reports")
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)
        self._poller.register(sys.stdin.fileno(), zmq.POLLIN)
        self._events: list[Event] = []
        self._grammars: GrammarQueue | None = None
        self.journal = StepJournal(journal_path(address))

    def use_grammars(self, grammars: GrammarQueue) -> None:
        """Have requests with a grammar wait until it is compiled."""
        self._grammars = grammars
        self._poller.register(grammars.fileno(), zmq.POLLIN)

    def run(self, factory: CoreFactory) -> int:
        """Build the core, serve until the end, clean up; return the exit code."""
        try:
            # Imported and loaded objects live as long as the process: the collector skips them.
            gc.disable()
            gc.freeze()
            core, info = factory(self._events.extend, self._report_progress)
            gc.collect()
            gc.freeze()
            gc.enable()
            self._send(EngineReady(info))
            try:
                self._serve(core)
            finally:
                core.close()
        except HeadwayError as error:  # the API process logs it; a stack trace adds nothing
            self._send(EngineFailed(str(error)))
            return 1
        except Exception as error:
            logger.exception("the engine failed")
            self._send(EngineFailed(f"{type(error).__name__}: {error}"))
            return 1
        finally:
            self._context.destroy(linger=1000)
        return 0

    def _serve(self, core: EngineCore) -> None:
        while self._take_commands(core):
            core.step()
            if self._grammars is not None:
                self._grammars.release_ended(core.scheduler.requests.keys())
            self._flush()
            # After the report: a fault in handling or reporting the result belongs to this step.
            self.journal.end()

    def _take_commands(self, core: EngineCore) -> bool:
        """Apply pending commands; wait for one if there is no work. Return False to stop."""
        timeout_ms = 0 if core.has_work else self._idle_ms
        for _ in range(MAX_COMMANDS_PER_STEP):
            ready = dict(self._poller.poll(timeout_ms))
            if self._grammars is not None:
                self._use_compiled(self._grammars, core, is_idle=not ready and bool(timeout_ms))
            if self._commands not in ready:
                # Standard input is readable only at its end: the parent process is gone.
                return sys.stdin.fileno() not in ready
            command = decode_command(self._commands.recv())
            if isinstance(command, Shutdown):
                return False
            self._apply(command, core)
            timeout_ms = 0
        return True

    @property
    def _idle_ms(self) -> int | None:
        return None if self._grammars is None else self._grammars.idle_ms

    def _use_compiled(self, grammars: GrammarQueue, core: EngineCore, is_idle: bool) -> None:
        """Add the requests whose grammars are compiled now; prepare for some if idle."""
        if is_idle:
            grammars.prepare()
        for command, abort_reason in grammars.take():
            self.journal.begin([command.id])
            self._add(command, core)
            if abort_reason is not None:
                core.abort(command.id, abort_reason)
            self.journal.end()

    def _apply(self, command: Command, core: EngineCore) -> None:
        if isinstance(command, AddRequest):
            self.journal.begin([command.id])
            if self._grammars is None or not self._grammars.add(command):
                self._add(command, core)
        elif isinstance(command, AbortRequests):
            self.journal.begin(command.ids)
            for request_id in command.ids:
                core.abort(request_id, command.reason)
                if self._grammars is not None:
                    self._grammars.abort(request_id, command.reason)
        self.journal.end()

    def _add(self, command: AddRequest, core: EngineCore) -> None:
        try:
            request = Request(
                id=command.id,
                token_ids=command.token_ids,
                params=command.params,
                seed=command.seed,
                arrived_at=command.arrived_at,
                priority=command.priority,
                terms=command.terms,
                index=command.index,
                num_prompt_tokens=command.num_prompt_tokens,
                num_scored=command.num_scored,
            )
            core.add(request, command.is_resent, command.waited_s)
        except ValueError as error:  # an invalid request must not end the others
            self._events.append(Refused(command.id, command.arrived_at, "invalid", str(error)))

    def _flush(self) -> None:
        if self._events:
            self._send(batch_events(self._events))
            self._events.clear()

    def _report_progress(self, num_done: int, num_total: int) -> None:
        # The API process takes 0.3 ms for each report, while it is about to start itself.
        if num_done * NUM_PROGRESS_REPORTS // num_total != (
            (num_done - 1) * NUM_PROGRESS_REPORTS // num_total
        ):
            self._send(LoadProgress(num_done, num_total))

    def _send(self, report: Report) -> None:
        self._reports.send(encode(report))
