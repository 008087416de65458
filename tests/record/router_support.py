"""Routers that are recorded, and what a replay of their recordings finds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headway.record.kinds import ROUTER
from headway.record.parts import PartWriter
from headway.record.reader import RecordingReader
from headway.record.recording import Recording
from headway.record.router.encoder import RouterEncoder
from headway.record.router.entries import RouterHeader
from headway.record.router.recorded import RecordedRouter
from headway.record.router.replay import ReplayedRouter, RouterDifference, find_router_difference
from headway.routing import RULES, AllowedEngines
from headway.routing.router import AllEngines

NAME = "router"


@dataclass
class RecordedRun:
    """A recorded router, and its file."""

    folder: Path
    rule: str = "ttft"
    allowed: AllowedEngines | None = None
    key: bytes = b"a key for tests"

    def __post_init__(self) -> None:
        header = RouterHeader(recording=NAME, headway="0", platform="tests", rule=self.rule)
        writer = PartWriter(self.folder, header, 2**20, 100 * 2**20)
        self.recording = Recording(writer, RouterEncoder(self.key))
        self.router = RecordedRouter(RULES[self.rule](), self.allowed or AllEngines())
        self.router.record(self.recording)

    @property
    def path(self) -> Path:
        return self.folder / f"{NAME}.0000.rec"

    def close(self) -> None:
        """Write all of the recording."""
        self.recording.close()

    def replay(self) -> tuple[ReplayedRouter, RouterDifference | None]:
        """End the recording, and replay it."""
        self.close()
        return replay(self.path)


def replay(path: Path) -> tuple[ReplayedRouter, RouterDifference | None]:
    reader = RecordingReader.open(path, ROUTER)
    replayed = ReplayedRouter(reader.header)
    difference = find_router_difference(reader.entries(), replayed)
    assert difference is not None or reader.is_complete, reader.end
    return replayed, difference
