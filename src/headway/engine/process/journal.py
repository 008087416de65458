"""Which requests the engine is computing right now, written where it outlives the engine.

The engine process writes the ids of each step into a file before it runs the step, and clears them
when it has reported the result. A request that is being added or aborted is a step of its own. If
the process dies or hangs in between, the API process reads there who was being computed: one of
them may be the cause.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.core.executor import Capacity, Executor, Ticket
from headway.core.plan import StepPlan, StepResult

_LENGTH_BYTES = 4
_NO_REQUESTS = bytes(_LENGTH_BYTES)


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
        os.pwrite(self._file, _NO_REQUESTS, 0)

    def close(self) -> None:
        os.close(self._file)


def read_journal(path: Path) -> frozenset[str]:
    """Who was in the step that did not end; nobody if the engine was between two steps."""
    try:
        content = path.read_bytes()
        length = int.from_bytes(content[:_LENGTH_BYTES], "big")
        ids = content[_LENGTH_BYTES : _LENGTH_BYTES + length]
        return frozenset(msgspec.msgpack.decode(ids, type=list[str])) if length else frozenset()
    except (OSError, ValueError, msgspec.DecodeError):
        # It died before it wrote anything, or while it did; ValueError is of text that is none.
        return frozenset()


class JournaledExecutor:
    """An executor that enters its steps into the journal; the engine loop clears them."""

    def __init__(self, executor: Executor, journal: StepJournal) -> None:
        self._executor = executor
        self._journal = journal

    def capacity(self) -> Capacity:
        return self._executor.capacity()

    def submit(self, plan: StepPlan) -> Ticket:
        self._journal.begin([item.request_id for item in plan.scheduled])
        return self._executor.submit(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        return self._executor.collect(ticket)

    def close(self) -> None:
        self._executor.close()
        self._journal.close()
