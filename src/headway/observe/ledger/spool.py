"""Rows on their way to the database, on disk: lines of JSON in files of this process.

A row is in the file before the database is asked to take it, so a process that is killed leaves its
rows behind, and the next one that uses the same folder sends them on. A row may be sent twice; the
database takes it once. A line is in the page cache at once, which outlives the process; `sync`
makes it outlive the machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.observe.ledger.usage import Row

logger = logging.getLogger(__name__)

CHUNK_ROWS = 500
SUFFIX = ".jsonl"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Row).decode


@dataclass(slots=True)
class Segment:
    """One file of rows, taken by this process."""

    path: Path
    file: int
    num_bytes: int = 0
    num_rows: int = 0
    num_synced_bytes: int = 0

    def append(self, content: bytes, num_rows: int) -> None:
        rest = content
        try:
            while rest:
                rest = rest[os.write(self.file, rest) :]
        except OSError:
            # Half a line must not stay behind, or the next one would be part of it.
            os.ftruncate(self.file, self.num_bytes)
            raise
        self.num_bytes += len(content)
        self.num_rows += num_rows

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self.file)


class Spool:
    """The files of this process, and those that others left in the same folder.

    One thread appends to a file while another sends off the one before it; at most two are there.
    Every method may raise OSError.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._open: Segment | None = None
        self._sealed: Segment | None = None
        self._num_left_bytes = 0
        """In the files that others left, when last looked."""

    @property
    def num_rows(self) -> int:
        return sum(one.num_rows for one in self._segments())

    def append(self, rows: Sequence[Row]) -> int:
        """Keep the rows; how many of them, as there is a bound."""
        lines = [_encode(row) + b"\n" for row in rows]
        with self._lock:
            room = self._max_bytes - self._num_left_bytes
            room -= sum(one.num_bytes for one in self._segments())
            num_taken, num_bytes = 0, 0
            for line in lines:
                if num_bytes + len(line) > room:
                    break
                num_taken, num_bytes = num_taken + 1, num_bytes + len(line)
            if num_taken:
                if self._open is None:
                    self._open = self._new_segment()
                self._open.append(b"".join(lines[:num_taken]), num_taken)
            return num_taken

    def sync(self) -> None:
        """Have the disk hold what the page cache holds."""
        with self._lock:
            for segment in self._segments():
                if segment.num_synced_bytes < segment.num_bytes:
                    os.fdatasync(segment.file)
                    segment.num_synced_bytes = segment.num_bytes

    def sealed(self) -> Path | None:
        """The file to be sent off, to which nothing is added any more; None if no row is left."""
        with self._lock:
            if self._sealed is None and self._open is not None and self._open.num_rows:
                self._sealed, self._open = self._open, None
            return None if self._sealed is None else self._sealed.path

    def remove_sealed(self) -> None:
        """The database has all of it."""
        with self._lock:
            segment, self._sealed = self._sealed, None
            if segment is not None:
                segment.remove()

    def leftover_files(self) -> Iterator[Path]:
        """Files of processes that are gone. One that has been dealt with before the next is asked
        for is removed; nobody else takes it meanwhile."""
        others = self._others()
        self._num_left_bytes = sum(_size(path) for path in others)
        for path in others:
            with contextlib.suppress(FileNotFoundError):
                file = os.open(path, os.O_RDWR)
                try:
                    if _lock(file, path):
                        yield path
                        self._num_left_bytes -= os.fstat(file).st_size
                        path.unlink()
                finally:
                    os.close(file)

    def close(self) -> None:
        """Let go of the files; those with rows stay."""
        with self._lock:
            for segment in self._segments():
                if segment.num_rows:
                    os.close(segment.file)
                else:
                    segment.remove()
            self._open = self._sealed = None

    def _segments(self) -> list[Segment]:
        return [one for one in (self._sealed, self._open) if one is not None]

    def _others(self) -> list[Path]:
        own = {one.path for one in self._segments()}
        with contextlib.suppress(FileNotFoundError):
            found = self._folder.iterdir()
            return sorted(one for one in found if one.suffix == SUFFIX and one not in own)
        return []

    def _new_segment(self) -> Segment:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            path = self._folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}{SUFFIX}"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            # Between the two lines another process may have taken it for left behind.
            if _lock(file, path):
                return Segment(path, file)
            os.close(file)


def num_waiting_bytes(folder: Path) -> int:
    """How much is in the spools of a folder, of living processes or dead."""
    try:
        return sum(_size(path) for path in folder.iterdir() if path.suffix == SUFFIX)
    except OSError:
        return 0


def read_rows(path: Path) -> Iterator[list[Row]]:
    """The rows of a file; lines that are none are reported and left out."""
    chunk: list[Row] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                chunk.append(_decode(line))
            except msgspec.MsgspecError:
                # The end of a file whose writer was killed, or whose disk failed.
                logger.error("the ledger's spool %s: line %d is damaged", path, number)
            if len(chunk) == CHUNK_ROWS:
                yield chunk
                chunk = []
    if chunk:
        yield chunk


def _size(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _lock(file: int, path: Path) -> bool:
    """Take a file, if it is nobody's and still the one that goes by this name."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    with contextlib.suppress(FileNotFoundError):
        return os.fstat(file).st_ino == path.stat().st_ino
    return False
