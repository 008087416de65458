"""Reads the tensors of a checkpoint by canonical name, in any file format.

Formats are safetensors and GGUF; neither can run code when read. In reading order:

    source_files.py the files of a checkpoint, and whether they changed
    names.py        canonical tensor names and shapes
    safetensors.py  Hugging Face folders
    gguf.py         GGUF files
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
class Quantized:
    """Quantized rows of a tensor: ggml type name, bytes per row, and shape in values."""

    kind: str
    rows: np.ndarray
    shape: tuple[int, ...]


@runtime_checkable
class QuantizedRows(Protocol):
    """A checkpoint that can return tensors without dequantizing them."""

    @property
    def quantization(self) -> str | None:
        """Return int8 or int4, if the linear layers are quantized."""
        ...

    def read_quantized(self, name: str) -> Quantized: ...


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Read the headers of a checkpoint, without tensor data."""
    if source.kind is SourceKind.GGUF:
        from headway.executors.weights.gguf import GgufCheckpoint

        return GgufCheckpoint(source.path)
    from headway.executors.weights.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(source.path)


def facts_of(checkpoint: Checkpoint) -> ModelFacts:
    """Return the facts of a checkpoint for `resolve`."""
    quantization = checkpoint.quantization if isinstance(checkpoint, QuantizedRows) else None
    return replace(checkpoint.spec.facts, quantization=quantization)


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
