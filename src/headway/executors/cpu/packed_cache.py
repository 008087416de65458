"""Files of packed weights, so that a model is packed once and not at every start.

One file holds the packed matrices of one model in one data type. Its name is a digest of the
model's files, the data type and the kernel library. The packed layout is the same for every
instruction set. A file is written under another name and renamed, so that two processes may write
it at once. Every matrix has a checksum, which is compared on every read.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import re
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headway.executors.weights.source_files import SourceFiles

logger = logging.getLogger(__name__)

_MAGIC = b"headway packed weights 1\n"
_SUFFIX, _UNFINISHED = ".packed", ".unfinished"
_MAX_HEADER_BYTES = 16 * 1024**2
_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class Matrix(msgspec.Struct, frozen=True):
    """A packed matrix: its tensors, its format and the order of its panels."""

    tensors: tuple[str, ...]
    format: int
    is_interleaved: bool
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A packed matrix in memory."""

    matrix: Matrix
    data: memoryview


class _Stored(msgspec.Struct, frozen=True):
    """Place and checksum of a matrix in a file."""

    matrix: Matrix
    offset: int
    checksum: int


class _Header(msgspec.Struct, frozen=True):
    model: str
    dtype: str
    digest: str
    matrices: list[_Stored]


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Identifies packed weights."""

    model: str
    dtype: str
    digest: str


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A file of packed weights; `model` is empty if the file cannot be read."""

    path: Path
    model: str
    dtype: str
    num_bytes: int
    used_at: float


def make_key(source: SourceFiles, dtype: str, library: Path) -> CacheKey | None:
    """Return the key of a model's weights; None if the kernel library cannot be read."""
    digest = hashlib.sha256(f"{dtype}\n{source.digest}\n".encode())
    try:
        digest.update(library.read_bytes())
    except OSError:
        return None
    return CacheKey(os.fspath(source.path.absolute()), dtype, digest.hexdigest()[:32])


class PackedFile:
    """An open file of packed weights. Any thread may read."""

    def __init__(self, descriptor: int, header: _Header) -> None:
        self._descriptor = descriptor
        self._stored = {one.matrix: one for one in header.matrices}

    def read(self, matrix: Matrix, target: memoryview) -> bool:
        """Fill `target` with a matrix; False if the file does not have it intact."""
        stored = self._stored.get(matrix)
        if stored is None or len(target) != matrix.num_bytes:
            return False
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done:]], stored.offset + done)
            except OSError:
                return False
            if count == 0:
                return False
            done += count
        return zlib.crc32(target) == stored.checksum

    def close(self) -> None:
        os.close(self._descriptor)


class PackedCache:
    """A folder of packed weights, bounded in bytes; the least recently used file goes first."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.max_bytes = max_bytes

    def open(self, key: CacheKey) -> PackedFile | None:
        """Return the weights of a key; None if they are not here."""
        self._delete_unfinished()
        path = self._path(key)
        descriptor = _open(path) if self._is_ours() else None
        if descriptor is None:
            return None
        header = _read_header(descriptor)
        if header is None or header.digest != key.digest:
            logger.warning("%s is damaged; the model is packed again", path)
            os.close(descriptor)
            return None
        with contextlib.suppress(OSError):
            os.utime(descriptor)
        return PackedFile(descriptor, header)

    def store(self, key: CacheKey, matrices: Sequence[PackedMatrix]) -> None:
        """Write the weights of a key. A failure is logged: the cache is not needed."""
        try:
            self._store(key, matrices)
        except OSError as error:
            logger.warning("cannot store packed weights in %s: %s", self.folder, error)

    def entries(self) -> list[CacheEntry]:
        """Return the files of the folder, the most recently used first."""
        found = (_entry(path) for path in self._files(_SUFFIX))
        return sorted((one for one in found if one), key=lambda one: -one.used_at)

    def clear(self) -> int:
        """Delete all files of the cache; return the bytes freed."""
        freed = sum(entry.num_bytes for entry in self.entries() if _delete(entry.path))
        self._delete_unfinished()
        return freed

    def _is_ours(self) -> bool:
        """Return whether nobody else can put a file into the folder."""
        try:
            found = self.folder.stat()
        except OSError:
            return False
        is_ours = found.st_uid == os.geteuid() and not found.st_mode & _OTHERS
        if not is_ours:
            logger.warning(
                "%s belongs to or is writable by others; packed weights are not used "
                "(set --weights-cache to a folder of your own)",
                self.folder,
            )
        return is_ours

    def _path(self, key: CacheKey) -> Path:
        name = re.sub(r"[^\w.-]", "_", Path(key.model).name)[:80]
        return self.folder / f"{name}-{key.dtype}-{key.digest}{_SUFFIX}"

    def _files(self, suffix: str) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            yield from (path for path in self.folder.iterdir() if path.name.endswith(suffix))

    def _store(self, key: CacheKey, matrices: Sequence[PackedMatrix]) -> None:
        header, num_bytes = _lay_out(key, matrices)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._is_ours() or not self._make_room(num_bytes):
            return
        handle, name = tempfile.mkstemp(_UNFINISHED, dir=self.folder)
        try:
            with open(handle, "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(header)
                for one in matrices:
                    file.seek(_aligned(file.tell()))
                    file.write(one.data)
                file.flush()
                os.replace(name, self._path(key))
        except BaseException:
            _delete(Path(name))
            raise
        logger.info("packed weights are in %s (%d MB)", self._path(key), num_bytes // 10**6)

    def _make_room(self, num_bytes: int) -> bool:
        """Delete the least recently used files; False if there is no room even so."""
        # The cache must not be what fills a disk.
        if num_bytes > min(self.max_bytes, shutil.disk_usage(self.folder).free // 2):
            return False
        entries = self.entries()
        while entries and sum(entry.num_bytes for entry in entries) > self.max_bytes - num_bytes:
            _delete(entries.pop().path)
        return True

    def _delete_unfinished(self) -> None:
        """Delete what a killed process was writing; a living process holds a lock."""
        for path in self._files(_UNFINISHED):
            descriptor = _open(path)
            if descriptor is None:
                continue
            try:
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            finally:
                os.close(descriptor)


def _aligned(offset: int) -> int:
    return -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE


def _lay_out(key: CacheKey, matrices: Sequence[PackedMatrix]) -> tuple[bytes, int]:
    """Return the header of a file and the size of the file.

    Offsets count from the end of the header until its length is known.
    """
    stored, offset = [], 0
    for one in matrices:
        stored.append(_Stored(one.matrix, offset, zlib.crc32(one.data)))
        offset = _aligned(offset + len(one.data))
    text = msgspec.json.encode(_Header(key.model, key.dtype, key.digest, stored))
    sizes = len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little")
    header = _MAGIC + sizes + text
    return header, _aligned(len(header)) + offset


def _open(path: Path) -> int | None:
    """Return the descriptor of a file that only this user may have written."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS:
        return descriptor
    logger.warning("%s is not a file that only this user may write; it is not read", path)
    os.close(descriptor)
    return None


def _read_header(descriptor: int) -> _Header | None:
    """Return the header with offsets from the start of the file; None if it is damaged."""
    length = len(_MAGIC) + 12
    try:
        start = os.pread(descriptor, length, 0)
        size = int.from_bytes(start[-12:-4], "little")
        if len(start) < length or not start.startswith(_MAGIC) or size > _MAX_HEADER_BYTES:
            return None
        text = os.pread(descriptor, size, length)
        if zlib.crc32(text).to_bytes(4, "little") != start[-4:]:
            return None
        header = msgspec.json.decode(text, type=_Header)
    except (OSError, msgspec.MsgspecError):
        return None
    first = _aligned(length + size)
    moved = [_Stored(one.matrix, one.offset + first, one.checksum) for one in header.matrices]
    return _Header(header.model, header.dtype, header.digest, moved)


def _entry(path: Path) -> CacheEntry | None:
    descriptor = _open(path)
    if descriptor is None:
        return None
    try:
        header, found = _read_header(descriptor), os.fstat(descriptor)
    finally:
        os.close(descriptor)
    model, dtype = (header.model, header.dtype) if header else ("", "")
    return CacheEntry(path, model, dtype, found.st_size, found.st_mtime)


def _delete(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.unlink()
        return True
    return False
