"""Reads the header of a GGUF file: metadata and tensor offsets.

The reader of the gguf package builds an array view per string, which takes seconds for a
vocabulary; this module walks the header once. Tokenizers and weights both use it. It does not
interpret keys.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from headway.errors import ModelLoadError

_SUPPORTED_VERSIONS = (2, 3)
_STRING = 8
_ARRAY = 9
_UINT64 = 10
# Value type number to struct code, for every type of fixed size.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_LENGTH = struct.Struct("<Q")
_LENGTH_BYTES = _LENGTH.size
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class SkippedStrings:
    """An array of strings that was not read; the vocabulary is most of a header."""

    count: int


MetadataValue = (
    int | float | bool | str | list[int] | list[float] | list[bool] | list[str] | SkippedStrings
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Shape (rows first), ggml type number and file offset of a tensor."""

    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything before the tensor data."""

    metadata: dict[str, MetadataValue]
    tensors: dict[str, TensorEntry]


def read_header(path: Path, has_strings: bool = True) -> GgufHeader:
    """Read and bounds-check the header, with or without its arrays of strings."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data, has_strings).read()
    except FileNotFoundError as error:
        raise ModelLoadError(f"no GGUF file at {path}") from error
    except (OSError, ValueError, struct.error) as error:
        raise ModelLoadError(f"{path} is not a readable GGUF file: {error}") from error


class _Cursor:
    """Read position in the mapped file.

    Raises ValueError or struct.error at the end of the data.
    """

    def __init__(self, data: mmap.mmap, has_strings: bool) -> None:
        self._data = data
        self._has_strings = has_strings
        self._position = 0

    def read(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not start with 'GGUF'")
        self._position = 4
        version = self._scalar("I")
        if version not in _SUPPORTED_VERSIONS:
            raise ValueError(
                f"GGUF version {version} is not one of {_SUPPORTED_VERSIONS} (little-endian)"
            )
        num_tensors = self._scalar("Q")
        num_keys = self._scalar("Q")
        metadata: dict[str, MetadataValue] = {}
        for _ in range(num_keys):
            key = self._strings(1)[0]
            if key in metadata:
                raise ValueError(f"the key {key!r} is repeated")
            metadata[key] = self._value(self._scalar("I"))
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}, not a number above 0")
        data_at = -(-self._position // alignment) * alignment
        tensors = {
            name: TensorEntry(shape, type_id, data_at + offset)
            for name, shape, type_id, offset in entries
        }
        if len(tensors) != len(entries):
            raise ValueError("a tensor name is repeated")
        return GgufHeader(metadata, tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._strings(1)[0]
        num_dims = self._scalar("I")
        shape = tuple(reversed(self._scalars(_UINT64, num_dims)))
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _value(self, kind: int) -> MetadataValue:
        if kind == _STRING:
            return self._strings(1)[0]
        if kind != _ARRAY:
            return self._scalars(kind, 1)[0]
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind != _STRING:
            return self._scalars(kind, count)
        return self._strings(count) if self._has_strings else self._skip_strings(count)

    def _scalar(self, code: str) -> int:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._position)
        self._position += struct.calcsize(f"<{code}")
        return value

    def _scalars(self, kind: int, count: int) -> list:
        code = _SCALARS.get(kind)
        if code is None:
            raise ValueError(f"value type {kind} is not supported")
        size = count * struct.calcsize(f"<{code}")
        # Checked before unpacking: a corrupt count must not become an allocation.
        if size > len(self._data) - self._position:
            raise ValueError("an array runs past the end of the file")
        values = struct.unpack_from(f"<{count}{code}", self._data, self._position)
        self._position += size
        return list(values)

    def _skip_strings(self, count: int) -> SkippedStrings:
        data, position, size = self._data, self._position, len(self._data)
        unpack = _LENGTH.unpack_from
        for _ in range(count):
            position += _LENGTH_BYTES + unpack(data, position)[0]
            if position > size:
                raise ValueError("a string runs past the end of the file")
        self._position = position
        return SkippedStrings(count)

    def _strings(self, count: int) -> list[str]:
        data, position, size = self._data, self._position, len(self._data)
        values = []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(data, position)
            start = position + _LENGTH_BYTES
            position = start + length
            if position > size:
                raise ValueError("a string runs past the end of the file")
            values.append(data[start:position].decode())
        self._position = position
        return values
