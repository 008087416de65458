"""Rows on their way to the database, on disk: lines of JSON in a file of this process.

A row is in the file before the database is asked to take it, so a process that is killed leaves its
rows behind, and the next one that uses the same folder sends them on. A row may be sent twice; the
database takes it once. The file is in the page cache at once, which outlives the process; `sync`
makes it outlive the machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from headway.observe.usage import Row

logger = logging.getLogger(__name__)

CHUNK_ROWS = 500
SUFFIX = ".jsonl"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Row).decode


class Spool:
    """The file of this process, and those that others left in the same folder.

    For one thread. Every method may raise OSError.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._path: Path | None = None
        self._file = -1
        self._num_bytes = 0
        self._num_left_bytes = 0
        """In the files that others left, when last looked."""

    @property
    def is_empty(self) -> bool:
        return self._num_bytes == 0

    def append(self, rows: Sequence[Row]) -> int:
        """Keep the rows; how many of them, as there is a bound."""
        self._open()
        lines = [_encode(row) + b"\n" for row in rows]
        room = self._max_bytes - self._num_bytes - self._num_left_bytes
        num_taken, num_bytes = 0, 0
        for line in lines:
            if num_bytes + len(line) > room:
                break
            num_taken, num_bytes = num_taken + 1, num_bytes + len(line)
        self._write(b"".join(lines[:num_taken]))
        return num_taken

    def _write(self, content: bytes) -> None:
        start = self._num_bytes
        try:
            while content:
                content = content[os.write(self._file, content) :]
        except OSError:
            # Half a line must not stay behind, or the next one would be part of it.
            os.ftruncate(self._file, start)
            raise
        self._num_bytes = os.fstat(self._file).st_size

    def sync(self) -> None:
        if self._file >= 0:
            os.fdatasync(self._file)

    def chunks(self) -> Iterator[list[Row]]:
        """The rows kept, some at a time."""
        if self._path is not None and self._num_bytes:
            yield from read_rows(self._path)

    def clear(self) -> None:
        """The database has all of them."""
        if self._num_bytes:
            os.ftruncate(self._file, 0)
            self._num_bytes = 0

    def left_behind(self) -> Iterator[Path]:
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
        if self._file < 0 or self._path is None:
            return
        if self.is_empty:
            self._path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = -1

    def _others(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):
            found = self._folder.iterdir()
            return sorted(one for one in found if one.suffix == SUFFIX and one != self._path)
        return []

    def _open(self) -> None:
        while self._file < 0:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = self._folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}{SUFFIX}"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            # Between the two lines another process may have taken it for left behind.
            if _lock(file, path):
                self._file, self._path = file, path
            else:
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
