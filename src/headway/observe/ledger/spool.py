"""The spool: rows on disk until the database has them, as lines of JSON.

A row is in a file before the writer sends it to the database. If a process is killed, the next
process that uses the folder sends its rows. A row may be sent twice; the database stores it once.
An appended line is in the page cache, which survives the process; `sync` makes it survive the
machine.
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
"""Rows that are read, and sent to the database, at a time."""
SUFFIX = ".jsonl"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Row).decode


@dataclass(slots=True)
class Segment:
    """One file of rows, locked by this process."""

    path: Path
    file: int
    num_bytes: int = 0
    num_rows: int = 0
    num_synced_bytes: int = 0

    def append(self, content: bytes, num_rows: int) -> None:
        """Append whole lines."""
        rest = content
        try:
            while rest:
                rest = rest[os.write(self.file, rest) :]
        except OSError:
            # Remove a partial line, or the next line would be joined to it.
            os.ftruncate(self.file, self.num_bytes)
            raise
        self.num_bytes += len(content)
        self.num_rows += num_rows

    def remove(self) -> None:
        """Delete the file."""
        self.path.unlink(missing_ok=True)
        os.close(self.file)


class Spool:
    """The spool files of this process, and files left by dead processes in the same folder.

    One thread appends to the open file while another sends the sealed file; there are at most two.
    Every method may raise OSError.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._open: Segment | None = None
        self._sealed: Segment | None = None
        self._num_left_bytes = 0
        """Bytes in the files of other processes, at the last look."""

    @property
    def num_rows(self) -> int:
        """Rows in the files of this process."""
        return sum(one.num_rows for one in self._segments())

    def append(self, rows: Sequence[Row]) -> int:
        """Append rows up to the size limit; return how many were appended."""
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
        """Flush the files to disk."""
        with self._lock:
            for segment in self._segments():
                if segment.num_synced_bytes < segment.num_bytes:
                    os.fdatasync(segment.file)
                    segment.num_synced_bytes = segment.num_bytes

    def sealed(self) -> Path | None:
        """Return the file to send, which no longer grows; None if there is no row.

        Seals the open file if no file is sealed.
        """
        with self._lock:
            if self._sealed is None and self._open is not None and self._open.num_rows:
                self._sealed, self._open = self._open, None
            return None if self._sealed is None else self._sealed.path

    def remove_sealed(self) -> None:
        """Delete the sealed file; the database has its rows."""
        with self._lock:
            segment, self._sealed = self._sealed, None
            if segment is not None:
                segment.remove()

    def leftover_files(self) -> Iterator[Path]:
        """Yield the files of dead processes.

        Each file stays locked until the next is requested, and is then deleted.
        """
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
        """Close the files; files with rows stay on disk."""
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
            # Between create and lock, another process may have locked the file as a leftover.
            if _lock(file, path):
                return Segment(path, file)
            os.close(file)


def num_waiting_bytes(folder: Path) -> int:
    """Return the bytes in all spool files of a folder."""
    try:
        return sum(_size(path) for path in folder.iterdir() if path.suffix == SUFFIX)
    except OSError:
        return 0


def read_rows(path: Path) -> Iterator[list[Row]]:
    """Yield the rows of a file in chunks; damaged lines are logged and skipped."""
    chunk: list[Row] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                chunk.append(_decode(line))
            except msgspec.MsgspecError:
                # The writer was killed, or the disk failed.
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
    """Lock a file; return False if another process has it or the file was replaced."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    with contextlib.suppress(FileNotFoundError):
        return os.fstat(file).st_ino == path.stat().st_ino
    return False
