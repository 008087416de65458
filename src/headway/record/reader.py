"""Reads the files of a recording."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Generic

import msgspec

from headway.errors import RecordingError
from headway.record.entries import CLOSED, FORMAT, GOES_ON, SUFFIX, ClosedEntry
from headway.record.kinds import E, H, HeaderStart, Kind, decode_start
from headway.record.parts import (
    BLOCK_HEADER_BYTES,
    CHECK,
    LENGTHS,
    MAGIC,
    part_path,
    recording_of,
)

CUT_SHORT = "the file is cut short: its process was killed, or still runs"


@dataclass(slots=True)
class RecordingReader(Generic[H, E]):
    """The entries of a recording, from its first file to its last."""

    path: Path
    """The first file."""
    kind: Kind[H, E]
    header: H
    end: str = CUT_SHORT
    """Why the recording ends where it does, once it is read."""

    @staticmethod
    def open(path: Path, kind: Kind[H, E]) -> RecordingReader[H, E]:
        """Read the header of a recording of this kind; `path` is any of its files."""
        header = _read_header(path, kind)
        if header.part == 0:
            return RecordingReader(path, kind, header)
        first = part_path(path.parent, header.recording, 0)
        if not first.exists():
            raise RecordingError(f"{path}: {first.name}, the start of the recording, is gone")
        return RecordingReader(first, kind, _read_header(first, kind))

    @property
    def is_complete(self) -> bool:
        """Whether all up to the end of the process is recorded; known once it is read."""
        return self.end == CLOSED

    def entries(self) -> Iterator[E]:
        """Yield the entries; raise RecordingError where a file is damaged."""
        for part in count():
            path = part_path(self.path.parent, self.header.recording, part) if part else self.path
            if not path.exists():
                self.end = f"{path.name}, the next file of the recording, is missing"
                return
            self.end = CUT_SHORT
            yield from self._part_entries(path, part)
            if self.end != GOES_ON:
                return

    def _part_entries(self, path: Path, part: int) -> Iterator[E]:
        blocks = _blocks(path)
        if (first := next(blocks, None)) is None:
            return
        header = _decode_header(path, first, self.kind)
        if (header.recording, header.part) != (self.header.recording, part):
            raise RecordingError(f"{path} is a file of another recording, {header.recording}")
        for content in blocks:
            for entry in _decode_entries(path, content, self.kind):
                if isinstance(entry, ClosedEntry):
                    self.end = entry.reason
                    return
                yield entry


def find_recordings(paths: list[Path]) -> list[Path]:
    """Return the first file of each recording; a folder stands for all in it."""
    found: dict[Path, None] = {}
    for path in paths:
        try:
            found.update(dict.fromkeys(_recordings_at(path)))
        except OSError as error:
            raise RecordingError(f"{path} cannot be read: {error.strerror}") from error
    return list(found)


def _recordings_at(path: Path) -> list[Path]:
    if not path.is_dir():
        first = part_path(path.parent, recording_of(path), 0)
        return [first if first.exists() else path]
    names = sorted(name for name in os.listdir(path) if name.endswith(f".0000{SUFFIX}"))
    if not names:
        raise RecordingError(f"{path} has no recordings (files *{SUFFIX})")
    return [path / name for name in names]


def kind_of(path: Path) -> str:
    """Return the name of the kind of a recording, by one of its files."""
    return _decode_start(path, _header_block(path)).kind


def _header_block(path: Path) -> bytes:
    if not path.exists():
        raise RecordingError(f"{path} does not exist")
    content = next(_blocks(path), None)
    if content is None:
        raise RecordingError(f"{path} is cut short in its header: nothing is recorded")
    return content


def _read_header(path: Path, kind: Kind[H, E]) -> H:
    return _decode_header(path, _header_block(path), kind)


def _decode_header(path: Path, content: bytes, kind: Kind[H, E]) -> H:
    start = _decode_start(path, content)
    if start.format != FORMAT:
        raise RecordingError(
            f"{path} has format {start.format}, this release reads format {FORMAT}: replay with "
            "the release that recorded it"
        )
    if start.kind != kind.name:
        raise RecordingError(
            f"{path} is the recording of another process: {start.kind}, not {kind.name}"
        )
    try:
        return kind.decode_header(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path} has a header that cannot be read: {error}") from error


def _decode_start(path: Path, content: bytes) -> HeaderStart:
    try:
        return decode_start(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path} has a header that cannot be read: {error}") from error


def _decode_entries(path: Path, content: bytes, kind: Kind[H, E]) -> list[E | ClosedEntry]:
    try:
        return kind.decode_entries(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordingError(f"{path} has an entry that cannot be read: {error}") from error


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the contents of the whole blocks of a file."""
    try:
        with path.open("rb") as file:
            if not MAGIC.startswith(file.read(len(MAGIC))):
                raise RecordingError(f"{path} is not a recording of `--record`")
            at = len(MAGIC)
            while len(fields := file.read(BLOCK_HEADER_BYTES)) == BLOCK_HEADER_BYTES:
                lengths = fields[: LENGTHS.size]
                length, checksum = LENGTHS.unpack(lengths)
                (check,) = CHECK.unpack(fields[LENGTHS.size :])
                if zlib.crc32(lengths) != check:
                    raise RecordingError(f"{path} is damaged at byte {at}")
                content = file.read(length)
                if len(content) < length:
                    return
                if zlib.crc32(content) != checksum:
                    raise RecordingError(f"{path} is damaged at byte {at}")
                yield content
                at += BLOCK_HEADER_BYTES + length
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror}") from error
