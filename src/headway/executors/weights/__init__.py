"""Reads the tensors of a checkpoint by canonical name, in any file format.

Formats are safetensors and GGUF; neither can run code when read. In reading order:

    source_files.py the files of a checkpoint, and whether they changed
    names.py        canonical tensor names and shapes
    safetensors.py  Hugging Face folders
    ggml_types.py   types of the tensors in GGUF files
    gguf.py         GGUF files
    formats.py      data type of each packed matrix
    reader.py       reads the tensors of a model in order
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from headway.errors import ModelLoadError
from headway.executors.source import ModelSource, SourceKind
from headway.executors.spec import ModelSpec
from headway.executors.weights.formats import num_int8_parameters, quantization
from headway.executors.weights.source_files import SourceFiles
from headway.resolve import ModelFacts

_NAMES_SHOWN = 5


class Checkpoint(Protocol):
    """An open checkpoint; reads one tensor at a time, in canonical form."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def source(self) -> SourceFiles | None:
        """Return the files that tensors and spec come from; None if there are none."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of every tensor by canonical name, from the headers."""
        ...

    def read(self, name: str) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """Rows of a tensor as the file has them: ggml type name and bytes per row."""

    kind: str
    rows: np.ndarray


@runtime_checkable
class StoredRows(Protocol):
    """A checkpoint that can return rows of a matrix without converting them."""

    def kinds(self) -> Mapping[str, str]:
        """Return the ggml type name of every tensor by canonical name."""
        ...

    def read_stored(self, name: str, first: int, last: int) -> Stored:
        """Return the rows from `first` to before `last`; any thread may call this."""
        ...


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Read the headers of a checkpoint, without tensor data."""
    if source.kind is SourceKind.GGUF:
        from headway.executors.weights.gguf import GgufCheckpoint

        return GgufCheckpoint(source.path)
    from headway.executors.weights.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(source.path)


def kinds_of(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return the ggml type names of the tensors; empty if the checkpoint has none."""
    return checkpoint.kinds() if isinstance(checkpoint, StoredRows) else {}


def facts_of(checkpoint: Checkpoint) -> ModelFacts:
    """Return the facts of a checkpoint for `resolve`."""
    spec, kinds = checkpoint.spec, kinds_of(checkpoint)
    return replace(
        spec.facts,
        quantization=quantization(kinds),
        num_int8_parameters=num_int8_parameters(spec, kinds),
    )


def check_shapes(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse a checkpoint with missing, unexpected or misshapen tensors.

    Runs before memory is allocated, because the configuration may not match the tensors.
    """
    if missing := sorted(expected.keys() - found.keys()):
        raise ModelLoadError(f"the checkpoint lacks {_listed(missing)}")
    if extra := sorted(found.keys() - expected.keys()):
        raise ModelLoadError(f"the checkpoint has unexpected {_listed(extra)}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelLoadError(
                f"tensor {name} has shape {list(found[name])}; "
                f"the configuration asks for {list(shape)}"
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"tensors {shown} and {more} more" if more > 0 else f"tensors {shown}"
