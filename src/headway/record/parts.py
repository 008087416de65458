"""The files of a recording: blocks with checksums, a size limit per file and for the folder.

A block is its length, the checksum of its content, the checksum of these two, and the content. A
file that was cut short is readable up to its last whole block. A replay needs a recording from its
start, so a recording that has no room left ends; older recordings are deleted as a whole.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.record.entries import GOES_ON, SUFFIX, ClosedEntry, Entry, RecordingHeader, encode

MAGIC = b"HEADWAY\x01"
LENGTHS = struct.Struct(">II")
CHECK = struct.Struct(">I")
BLOCK_HEADER_BYTES = LENGTHS.size + CHECK.size
_END_BYTES = 64
"""Room for the last entry of a file."""
NO_ROOM = "no room for another file"


class NoRoomError(Exception):
    """The folder has no room for another file of the recording."""


def make_block(content: bytes) -> bytes:
    """Return a block with this content."""
    lengths = LENGTHS.pack(len(content), zlib.crc32(content))
    return b"".join((lengths, CHECK.pack(zlib.crc32(lengths)), content))


def part_path(folder: Path, recording: str, part: int) -> Path:
    """Return the path of one file of a recording."""
    return folder / f"{recording}.{part:04d}{SUFFIX}"


class PartWriter:
    """Writes entries; begins another file when one is full.

    Each write goes to the page cache at once and survives the end of the process. The first file is
    locked while the recording goes on.
    """

    def __init__(
        self, folder: Path, header: RecordingHeader, file_bytes: int, total_bytes: int
    ) -> None:
        self._folder = folder
        self._header = header
        self._file_bytes = file_bytes
        self._total_bytes = total_bytes
        self._size = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_room()
        self._lock = self._file = self._create(part=0)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._append(self._start)

    @property
    def path(self) -> Path:
        """The file that is written now."""
        return part_path(self._folder, self._header.recording, self._header.part)

    def write(self, entries: Sequence[Entry]) -> None:
        """Write entries as one block; raise OSError or NoRoomError if they cannot be.

        A file is larger than its limit only if one entry is.
        """
        block = make_block(encode(entries))
        if len(block) > self._file_bytes // 2 and len(entries) > 1:
            middle = len(entries) // 2
            self.write(entries[:middle])
            self.write(entries[middle:])
            return
        if self._size + len(block) + _END_BYTES > self._file_bytes:
            self._make_room()
            self._append(make_block(encode([ClosedEntry(GOES_ON)])))
            before, self._file = self._file, self._create(self._header.part + 1)
            if before != self._lock:
                os.close(before)
            self._append(self._start)
        self._append(block)

    def close(self, reason: str) -> None:
        """Write the last entry, if there is room for it, and close the file."""
        try:
            if self._size:
                self._append(make_block(encode([ClosedEntry(reason)])))
        except OSError:
            pass  # the disk is full: the recording ends without this entry
        finally:
            for file in {self._file, self._lock}:
                os.close(file)

    def _create(self, part: int) -> int:
        """Create the next file and return its descriptor."""
        self._header = msgspec.structs.replace(self._header, part=part)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._size = 0
        return file

    @property
    def _start(self) -> bytes:
        """What a file begins with."""
        return MAGIC + make_block(encode(self._header))

    def _append(self, content: bytes) -> None:
        """Write all of this, or nothing."""
        left = memoryview(content)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            os.ftruncate(self._file, self._size)
            os.lseek(self._file, self._size, os.SEEK_SET)
            raise
        self._size += len(content)

    def _make_room(self) -> None:
        """Delete older recordings until another file fits."""
        files = {path: path.stat().st_size for path in self._folder.glob(f"*{SUFFIX}")}
        num_bytes = sum(files.values())
        recordings = sorted({recording_of(path) for path in files} - {self._header.recording})
        for recording in recordings:
            if num_bytes + self._file_bytes <= self._total_bytes:
                return
            if self._is_written(recording):
                continue
            # The last file first: what is left of an interrupted deletion has its start.
            for path in sorted(path for path in files if recording_of(path) == recording)[::-1]:
                path.unlink(missing_ok=True)
                num_bytes -= files[path]
        if num_bytes + self._file_bytes > self._total_bytes:
            raise NoRoomError(f"{self._folder} has {num_bytes} of {self._total_bytes} bytes")

    def _is_written(self, recording: str) -> bool:
        """Whether another process is writing a recording."""
        try:
            file = os.open(part_path(self._folder, recording, 0), os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False


def recording_of(path: Path) -> str:
    """Return the name of the recording that a file belongs to."""
    return path.name.removesuffix(SUFFIX).rpartition(".")[0]
