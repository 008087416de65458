"""Which requests the engine is computing right now, written where it outlives the engine.

The engine process writes the ids of each step into a file before it runs the step, and clears them
after it. If it dies or hangs in between, the API process reads there who was being computed: one
of them may be the cause.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.core.executor import Capacity, Executor, Ticket
from headway.core.plan import StepPlan, StepResult

_LENGTH_BYTES = 4
_NOBODY = bytes(_LENGTH_BYTES)


def journal_path(address: str) -> Path:
    """Where the journal of the engine with this socket address is: beside its sockets."""
    return Path(f"{address.removeprefix('ipc://')}.step")


class StepJournal:
    """The writing side. A write goes to the page cache: microseconds, and safe from SIGKILL."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def begin(self, request_ids: Sequence[str]) -> None:
        ids = msgspec.msgpack.encode(request_ids)
        os.pwrite(self._file, len(ids).to_bytes(_LENGTH_BYTES, "big") + ids, 0)

    def end(self) -> None:
        os.pwrite(self._file, _NOBODY, 0)

    def close(self) -> None:
        os.close(self._file)


def read_journal(path: Path) -> frozenset[str]:
    """Who was in the step that did not end; nobody if the engine was between two steps."""
    try:
        content = path.read_bytes()
        length = int.from_bytes(content[:_LENGTH_BYTES], "big")
        ids = content[_LENGTH_BYTES : _LENGTH_BYTES + length]
        return frozenset(msgspec.msgpack.decode(ids, type=list[str])) if length else frozenset()
    except (OSError, msgspec.DecodeError):  # it died before it wrote anything, or while it did
        return frozenset()


class JournaledExecutor:
    """An executor whose steps are in the journal while they run."""

    def __init__(self, executor: Executor, journal: StepJournal) -> None:
        self._executor = executor
        self._journal = journal

    def capacity(self) -> Capacity:
        return self._executor.capacity()

    def submit(self, plan: StepPlan) -> Ticket:
        self._journal.begin([item.request_id for item in plan.scheduled])
        return self._executor.submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        result = self._executor.collect(ticket)
        self._journal.end()
        return result

    def close(self) -> None:
        self._executor.close()
        self._journal.close()
