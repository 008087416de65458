"""Steps and requests of a recorded engine: what profiles are fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.core.events import Event, Finished, Forked, TokensEmitted
from headway.core.slo.steptime import StepShape, shape_of
from headway.errors import RecordingError
from headway.record.entries import (
    AbortEntry,
    AddEntry,
    BeginEntry,
    EndEntry,
    Entry,
    RecordingHeader,
)
from headway.record.kinds import ENGINE
from headway.record.reader import RecordingReader
from headway.record.replay import Difference, ReplayedEngine, compare


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """One step of the engine."""

    began_at: float
    shape: StepShape
    num_scheduled: int
    elapsed_s: float
    """Seconds in the executor."""
    overhead_s: float
    """Seconds besides, up to the next step if the engine had work for it."""
    num_added: int = 0
    """Prompts that were added between this step and the next."""
    num_ended: int = 0
    """Requests, or samples of a prompt, that ended with it."""


@dataclass(slots=True)
class ObservedRequest:
    """One sample at the engine; times are those of the engine's clock."""

    entry: AddEntry
    hashes: bytearray
    """Hashes of its full blocks, output included, one after the other."""
    is_added_idle: bool
    """Whether the engine had nothing to do, and took the request at once."""
    first_token_at: float | None = None
    finished_at: float | None = None
    num_output_tokens: int = 0


@dataclass(slots=True)
class ObservedEngine:
    """What a recording says about an engine."""

    header: RecordingHeader
    steps: list[ObservedStep] = field(default_factory=list[ObservedStep])
    requests: dict[str, ObservedRequest] = field(default_factory=dict[str, ObservedRequest])
    refused: list[AddEntry] = field(default_factory=list[AddEntry])
    """Requests that the engine refused."""
    num_resent: int = 0
    """Requests that another engine had before: their recording has them."""
    cut: str = ""
    """Why the recording ends before the engine did; empty if it does not."""

    @property
    def block_size(self) -> int:
        """Tokens of a hashed block."""
        return self.header.capacity.block_size


def read_observed(path: Path) -> ObservedEngine:
    """Replay a recording; return its steps and requests."""
    reader = RecordingReader.open(path, ENGINE)
    observer = _Observer(reader.header)
    for entry in reader.entries():
        if (difference := observer.take(entry)) is not None:
            raise RecordingError(
                f"{path}: the replay differs in step {difference.step}; see `headway replay`"
            )
    if not reader.is_complete:
        observer.observed.cut = reader.end
    return observer.observed


class _Observer:
    """Takes notes while a recording is replayed."""

    def __init__(self, header: RecordingHeader) -> None:
        self.observed = ObservedEngine(header)
        self._replay = ReplayedEngine(header)
        self._replay.on_events = self._take_events
        self._now = 0.0
        self._is_idle = True
        self._began_at = 0.0
        self._shape, self._num_scheduled = StepShape(), 0
        self._num_added = self._num_ended = 0
        self._ended: EndEntry | None = None
        """End of the last step, until the time after it is known."""

    def take(self, entry: Entry) -> Difference | None:
        """Repeat a call and note what it shows; return how its outcome differs, if it does."""
        if isinstance(entry, AddEntry | AbortEntry | BeginEntry | EndEntry):
            self._now = entry.now
        if isinstance(entry, EndEntry):
            self._note_hashes(entry)
        if (difference := compare(self._replay, entry)) is not None:
            return difference
        match entry:
            case AddEntry():
                self._note_request(entry)
            case BeginEntry(digest=digest) if digest:
                self._begin()
            case BeginEntry() if self._ended is not None:  # the last request was aborted
                self._note_step(self._ended, entry.now)
                self._is_idle = True
            case EndEntry():
                self._end(entry)
            case _:
                pass
        return None

    def _note_request(self, entry: AddEntry) -> None:
        if entry.is_resent:
            self.observed.num_resent += 1
        elif entry.is_refused:
            self.observed.refused.append(entry)
        else:
            hashes = bytearray(entry.hashes)
            self.observed.requests[entry.id] = ObservedRequest(entry, hashes, self._is_idle)
            self._num_added += 1
        self._is_idle = False

    def _begin(self) -> None:
        if self._ended is not None:
            self._note_step(self._ended, self._now)
        plan = self._replay.plan
        if plan is not None:
            self._began_at, self._num_added, self._num_ended = self._now, 0, 0
            self._shape, self._num_scheduled = shape_of(plan), len(plan.scheduled)
        self._is_idle = False

    def _note_hashes(self, entry: EndEntry) -> None:
        plan = self._replay.plan
        if plan is None:
            return
        for position, hashes in entry.hashes:
            request = self.observed.requests.get(plan.scheduled[position].request_id)
            if request is not None:
                request.hashes += hashes

    def _end(self, entry: EndEntry) -> None:
        self._ended = entry
        if not self._replay.core.has_work:
            self._note_step(entry, entry.now)
            self._is_idle = True

    def _note_step(self, ended: EndEntry, until: float) -> None:
        """Note the last step; its overhead ends at `until`."""
        overhead_s = max(0.0, until - self._began_at - ended.elapsed_s)
        self.observed.steps.append(
            ObservedStep(
                self._began_at,
                self._shape,
                self._num_scheduled,
                ended.elapsed_s,
                overhead_s,
                self._num_added,
                self._num_ended,
            )
        )
        self._ended = None

    def _take_events(self, events: Sequence[Event]) -> None:
        requests = self.observed.requests
        for event in events:
            if isinstance(event, Forked) and (parent := requests.get(event.parent_id)) is not None:
                hashes = bytearray(parent.entry.hashes)
                requests[event.request_id] = ObservedRequest(parent.entry, hashes, False)
            elif isinstance(event, TokensEmitted | Finished):
                request = requests.get(event.request_id)
                if request is not None:
                    self._note_output(request, event)

    def _note_output(self, request: ObservedRequest, event: TokensEmitted | Finished) -> None:
        if isinstance(event, Finished):
            self._num_ended += 1
            request.finished_at = self._now
            request.num_output_tokens = event.num_output_tokens
        elif request.first_token_at is None:
            request.first_token_at = self._now
