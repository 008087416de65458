"""The files of a recording: blocks with checksums, a size limit per file and for the folder.

A block is its length, the checksum of its content, the checksum of these two, and the content. A
file that was cut short is readable up to its last whole block. A replay needs a recording from its
start, so a recording that has no room left ends; older recordings are deleted as a whole. A
recording has half of the folder at most: that of an engine that crashed outlives the next one.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from headway.record.entries import GOES_ON, SUFFIX, ClosedEntry, Header, encode

MAGIC = b"HEADWAY\x01"
LENGTHS = struct.Struct(">II")
CHECK = struct.Struct(">I")
BLOCK_HEADER_BYTES = LENGTHS.size + CHECK.size
_END_BYTES = 64
"""Room for the last entry of a file."""
NO_ROOM = "no room for another file"
LOCK_NAME = ".lock"
"""File of the folder that a process locks while it begins or deletes others."""
_NAME = re.compile(rf"(.+)\.\d{{4,}}{re.escape(SUFFIX)}")


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
        self,
        folder: Path,
        header: Header,
        file_bytes: int,
        total_bytes: int,
    ) -> None:
        self._folder = folder
        self._header = header
        self._file_bytes = file_bytes
        self._total_bytes = total_bytes
        self._size = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._alone():
            self._make_room()
            self._lock = self._file = self._create(part=0)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                self._append(self._start)
            except OSError:
                os.close(self._lock)
                self.path.unlink()
                raise

    @property
    def path(self) -> Path:
        """The file that is written now."""
        return part_path(self._folder, self._header.recording, self._header.part)

    def write(self, entries: Sequence[msgspec.Struct]) -> None:
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
            with self._alone():
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

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Have no other process begin or delete files of the folder meanwhile."""
        # On NFS, a lock that excludes others needs a file that is open for writing.
        lock = os.open(self._folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _make_room(self) -> None:
        """Delete older recordings until another file fits, unless that is not enough."""
        name, total = self._header.recording, self._total_bytes
        files = _recording_files(self._folder)
        own = sum(files.pop(name, {}).values())
        if own + self._file_bytes > total // 2:
            raise NoRoomError(f"this recording has {own} bytes, and may have {total // 2}")
        written = {one for one in files if self._is_written(one)}
        sizes = {one: sum(files[one].values()) for one in files}
        for one in written:  # its last file may become as large as this one
            sizes[one] += max(0, self._file_bytes - files[one][max(files[one])])
        most = total - own - self._file_bytes
        if (kept := sum(sizes[one] for one in written)) > most:
            raise NoRoomError(f"recordings that go on have {kept + own} of {total} bytes")
        num_bytes = sum(sizes.values())
        for one in sorted(files.keys() - written):
            if num_bytes <= most:
                return
            # The last file first: what is left of an interrupted deletion has its start.
            for path in sorted(files[one], reverse=True):
                path.unlink(missing_ok=True)
            num_bytes -= sizes[one]

    def _is_written(self, recording: str) -> bool:
        """Whether another process is writing a recording."""
        try:
            file = os.open(part_path(self._folder, recording, 0), os.O_RDWR)
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
    """Return the name of the recording that a file belongs to, by the name of the file."""
    found = _NAME.fullmatch(path.name)
    return "" if found is None else found[1]


def _recording_files(folder: Path) -> dict[str, dict[Path, int]]:
    """Return the size of each file of each recording, without files of another kind."""
    found: dict[str, dict[Path, int]] = {}
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):  # a folder, a file of another user, or one that is gone by now
            if (name := recording_of(path)) and _has_magic(path):
                found.setdefault(name, {})[path] = path.stat().st_size
    return found


def _has_magic(path: Path) -> bool:
    """Whether a file begins as those of recordings do, or was cut short in that."""
    with path.open("rb") as file:
        return MAGIC.startswith(file.read(len(MAGIC)))
