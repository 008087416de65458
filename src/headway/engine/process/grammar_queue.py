"""Requests that wait until their grammar is compiled.

Compiling takes milliseconds, or much more for a large grammar, and steps must not wait for it. So
the engine loop adds a request with a grammar to the core only when the grammar is compiled. One
thread compiles, for tenants in turn: many slow grammars of one delay the others by one at most. A
compiled grammar is kept until its request ends, however long that waits or is preempted.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Set
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from headway.core.request import FinishReason, sample_id
from headway.engine.process.messages import AddRequest
from headway.engine.process.tenant_turns import TenantTurns

logger = logging.getLogger(__name__)

PREPARE_AFTER_MS = 5000
"""Idle time after which the engine prepares for its first grammar. Preparing stops Python for about
half a second, which would be felt in streams, and costs memory."""


class Compiler(Protocol):
    """Compiles grammars and keeps them for the executor."""

    def prepare(self) -> None: ...

    def is_compiled(self, grammar: str) -> bool: ...

    def matcher(self, grammar: str) -> object: ...

    def keep(self, grammar: str) -> None: ...

    def release(self, grammar: str) -> None: ...


class CompiledRequest(NamedTuple):
    """A request that may be added now, and why it is to be aborted at once, if it is."""

    command: AddRequest
    abort_reason: FinishReason | None


class _LiveGrammar(NamedTuple):
    """The grammar of a request that has not ended, and its samples."""

    grammar: str
    sample_ids: frozenset[str]


class GrammarQueue:
    """Compiles the grammars of requests; `fileno` is readable when a request may be added."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._work: TenantTurns[AddRequest] = TenantTurns()
        self._has_work = threading.Condition()
        """Guards `_work` and `_must_prepare`."""
        self._must_prepare = False
        self._done: SimpleQueue[AddRequest] = SimpleQueue()
        self._waiting: dict[str, FinishReason | None] = {}
        self._live: dict[str, _LiveGrammar] = {}
        self._is_prepared = False
        self._thread: threading.Thread | None = None
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)

    def fileno(self) -> int:
        return self._reader

    @property
    def idle_ms(self) -> int | None:
        """How long an idle engine waits before it calls `prepare`; None if that is done."""
        return None if self._is_prepared else PREPARE_AFTER_MS

    def prepare(self) -> None:
        """Have the thread prepare for the first grammar."""
        if not self._is_prepared:
            with self._has_work:
                self._must_prepare = True
            self._start()

    def add(self, command: AddRequest) -> bool:
        """Compile the grammar of a request; return whether the request must wait for it."""
        grammar = command.params.grammar
        if grammar is None:
            return False
        if command.id not in self._live:
            ids = frozenset(sample_id(command.id, at) for at in range(command.params.n))
            self._live[command.id] = _LiveGrammar(grammar, ids)
            self._compiler.keep(grammar)
        if self._compiler.is_compiled(grammar):
            return False
        self._waiting[command.id] = None
        with self._has_work:
            self._work.add(command.terms.tenant, command)
        self._start()
        return True

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """Have a waiting request aborted as soon as it is added."""
        if request_id in self._waiting:
            self._waiting[request_id] = reason

    def release_ended(self, live_ids: Set[str]) -> None:
        """Let the grammars go of requests that the core does not have any more."""
        ended = [
            request_id
            for request_id, one in self._live.items()
            if request_id not in self._waiting and one.sample_ids.isdisjoint(live_ids)
        ]
        for request_id in ended:
            self._compiler.release(self._live.pop(request_id).grammar)

    def take(self) -> list[CompiledRequest]:
        """Return the requests whose grammars are compiled, those of a tenant in order."""
        try:
            os.read(self._reader, 4096)
        except BlockingIOError:
            return []
        taken: list[CompiledRequest] = []
        while not self._done.empty():
            command = self._done.get()
            taken.append(CompiledRequest(command, self._waiting.pop(command.id, None)))
        return taken

    def _start(self) -> None:
        """Have the thread take the work that was added."""
        self._is_prepared = True
        if self._thread is None:
            # A daemon: it holds nothing that must be closed, and may be in a long compilation.
            self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
            self._thread.start()
        with self._has_work:
            self._has_work.notify()

    def _run(self) -> None:
        while True:
            command = self._next()
            try:
                if command is None:
                    self._compiler.prepare()
                elif command.params.grammar is not None and not self._waiting.get(command.id):
                    self._compiler.matcher(command.params.grammar)
            except Exception as error:
                # The request fails in its first step, with the error.
                logger.warning("a grammar cannot be compiled: %s", error)
            if command is not None:
                self._done.put(command)
                os.write(self._writer, b"\0")

    def _next(self) -> AddRequest | None:
        """Wait for work; return the next request, or None to prepare."""
        with self._has_work:
            while True:
                if self._must_prepare:
                    self._must_prepare = False
                    return None
                found = self._work.take()
                if found is not None:
                    return found[1]
                self._has_work.wait()
