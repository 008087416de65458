"""Requests of a recorded router: those of all its engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from headway.core.request import sample_id
from headway.record.entries import AddEntry
from headway.record.kinds import ROUTER
from headway.record.reader import RecordingReader
from headway.record.router.entries import (
    ArrivedEntry,
    EndedEntry,
    ForgottenEntry,
    JoinedEntry,
    RouterEntry,
    TickEntry,
)
from headway.sim.recording.observed import ObservedRequest


@dataclass(slots=True)
class ObservedRouter:
    """What a recording says about the requests of a router."""

    block_size: int = 1
    """Tokens of a hashed block."""
    requests: dict[str, ObservedRequest] = field(default_factory=dict[str, ObservedRequest])
    """Requests by number; of several samples, all but the first are as long as the first."""
    refused: list[AddEntry] = field(default_factory=list[AddEntry])
    """Requests that were refused for their targets."""
    cut: str = ""
    """Why the recording ends before the process did; empty if it does not."""


def read_routed(path: Path) -> ObservedRouter:
    """Return the requests of a recorded router."""
    reader = RecordingReader.open(path, ROUTER)
    observer = _RouterObserver()
    for entry in reader.entries():
        observer.take(entry)
    if not reader.is_complete:
        observer.observed.cut = reader.end
    return observer.observed


@dataclass(slots=True)
class _RoutedAttempt:
    """A request in the router; it arrives again if its engine is lost."""

    entry: ArrivedEntry
    request: ObservedRequest
    is_sent: bool


class _RouterObserver:
    """Follows requests by number."""

    def __init__(self) -> None:
        self.observed = ObservedRouter()
        self._numbers = count()
        self._live: dict[int, _RoutedAttempt] = {}
        self._latest: dict[str, ObservedRequest] = {}
        """Requests by id; a client may use an id again."""
        self._has_engine = False

    def take(self, entry: RouterEntry) -> None:
        """Note what a call says about a request."""
        match entry:
            case ArrivedEntry():
                self._arrive(next(self._numbers), entry)
            case TickEntry():
                for sending in entry.sendings:
                    self._live[sending.request].is_sent = True
            case EndedEntry():
                self._end(entry)
            case ForgottenEntry():
                self._live.pop(entry.request, None)
            case JoinedEntry():
                self._join(entry)
            case _:
                pass

    def _join(self, entry: JoinedEntry) -> None:
        if not self._has_engine:
            self._has_engine, self.observed.block_size = True, entry.block_size
        for number, hashes in entry.hashes:
            request = self._live[number].request
            request.entry.hashes = hashes
            request.hashes = bytearray(hashes)

    def _arrive(self, number: int, entry: ArrivedEntry) -> None:
        if entry.late_s is not None:
            self.observed.refused.append(_added(entry))
            return
        request = self._latest.get(entry.id)
        # By then an engine has the request, if another process decided about it meanwhile.
        goes_on = request is not None and (
            entry.is_resent or (entry.is_sent and request.finished_at is None)
        )
        if request is None or not goes_on:
            request = ObservedRequest(_added(entry), bytearray(), is_added_idle=False)
            self._latest[entry.id] = self.observed.requests[f"{number}"] = request
        request.hashes = bytearray(entry.hashes)
        self._live[number] = _RoutedAttempt(entry, request, entry.is_sent)

    def _end(self, entry: EndedEntry) -> None:
        attempt = self._live.pop(entry.request, None)
        if attempt is None or not attempt.is_sent:  # cancelled, or another process decides
            return
        arrived, request = attempt.entry, attempt.request
        # What an engine that was lost had computed of the answer is part of the tokens known.
        num_before = arrived.num_tokens - request.entry.num_prompt_tokens
        request.num_output_tokens = num_before + entry.num_output_tokens
        request.finished_at = entry.now
        request.hashes += entry.hashes
        for index in range(1, arrived.n):
            other = ObservedRequest(request.entry, bytearray(request.entry.hashes), False)
            other.num_output_tokens = request.num_output_tokens
            other.finished_at = entry.now
            self.observed.requests[sample_id(f"{entry.request}", index)] = other


def _added(entry: ArrivedEntry) -> AddEntry:
    """Return the entry that an engine would have of a request."""
    return AddEntry(
        now=entry.now,
        id=entry.id,
        num_tokens=entry.num_tokens,
        num_prompt_tokens=entry.num_prompt_tokens,
        max_tokens=entry.max_tokens,
        arrived_at=entry.arrived_at,
        is_refused=entry.late_s is not None,
        hashes=entry.hashes,
        terms=entry.terms,
        priority=entry.priority,
        n=entry.n,
    )
