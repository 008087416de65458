"""The step journal: the request ids of the step under way, in a file.

The engine process writes the ids of each step into the file before it runs the step, and clears
them when it has reported the result. Adding or aborting a request counts as a step of its own. The
file outlives the process. If the process dies or hangs in a step, the API process reads the ids:
one of these requests may be the cause.
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
    """Return the path of an engine's journal, which is beside its sockets."""
    return Path(f"{address.removeprefix('ipc://')}.step")


class StepJournal:
    """Writes the journal.

    A write goes to the page cache: it takes microseconds and survives SIGKILL.
    """

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
    """Return the request ids of the step that did not end, if any."""
    try:
        content = path.read_bytes()
        length = int.from_bytes(content[:_LENGTH_BYTES], "big")
        ids = content[_LENGTH_BYTES : _LENGTH_BYTES + length]
        return frozenset(msgspec.msgpack.decode(ids, type=list[str])) if length else frozenset()
    except (OSError, ValueError, msgspec.DecodeError):
        # The process died before or during a write; ValueError means that an id is not UTF-8.
        return frozenset()


class JournaledExecutor:
    """An executor that writes each step to the journal; the engine loop clears it."""

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
