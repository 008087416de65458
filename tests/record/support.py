"""Engines that are recorded, and what a replay of their recordings finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headway.clock import Clock
from headway.core.engine import EngineCore
from headway.core.events import Sink
from headway.core.executor import BlockRecorder, Executor
from headway.core.scheduler import Scheduler
from headway.record.core import RecordedCore
from headway.record.encoder import CallEncoder
from headway.record.entries import RecordingHeader
from headway.record.kinds import ENGINE
from headway.record.parts import PartWriter
from headway.record.reader import RecordingReader
from headway.record.recording import MAX_QUEUED_CALLS, Recording
from headway.record.replay import Difference, ReplayedEngine, find_difference
from tests.properties.rig import Rig
from tests.support.harness import Harness

FILE_BYTES = 2**20
KEY = b"a key for tests"


@dataclass
class Recorder:
    """Makes recorded engine cores, whose files are in one folder."""

    folder: Path
    file_bytes: int = FILE_BYTES
    total_bytes: int = 100 * FILE_BYTES
    key: bytes = KEY
    name: str = "test"
    clock_began_at: float | None = None
    max_queued: int = MAX_QUEUED_CALLS

    def start(self, scheduler: Scheduler) -> Recording:
        has_cache, capacity = scheduler.kv.enable_prefix_caching, scheduler.capacity
        header = RecordingHeader(
            recording=self.name,
            headway="0",
            platform="tests",
            model="fake",
            numerics="none",
            scheduler=scheduler.config,
            capacity=capacity,
            enable_prefix_caching=has_cache,
            clock_began_at=self.clock_began_at,
        )
        writer = PartWriter(self.folder, header, self.file_bytes, self.total_bytes)
        encoder = CallEncoder(self.key, capacity.block_size if has_cache else 0)
        return Recording(writer, encoder, self.max_queued)

    def make_core(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        sink: Sink,
        blocks: BlockRecorder | None = None,
    ) -> RecordedCore:
        recording = self.start(scheduler)
        return RecordedCore(scheduler, executor, clock, sink, blocks, recording)

    @property
    def path(self) -> Path:
        """The first file."""
        return self.folder / f"{self.name}.0000.rec"


@dataclass(frozen=True)
class Outcome:
    """What a replay finds."""

    num_steps: int
    difference: Difference | None
    end: str


def replay(path: Path) -> Outcome:
    reader = RecordingReader.open(path, ENGINE)
    one = ReplayedEngine(reader.header)
    difference = find_difference(reader, one)
    return Outcome(one.num_steps, difference, reader.end)


def rig_class(recorder: Recorder) -> type[Rig]:
    class RecordedRig(Rig):
        def make_core(self) -> EngineCore:
            return recorder.make_core(self.scheduler, self.executor, self.clock, self.ledger)

    return RecordedRig


def harness_class(recorder: Recorder) -> type[Harness]:
    class RecordedHarness(Harness):
        def make_core(self, recorder_: BlockRecorder | None) -> EngineCore:
            return recorder.make_core(
                self.scheduler, self.executor, self.clock, self.events.extend, recorder_
            )

    return RecordedHarness


@contextmanager
def recorded(harness: Harness) -> Iterator[Harness]:
    """Write all of the recording at the end."""
    yield harness
    harness.core.close()
