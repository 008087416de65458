"""Reading a checkpoint's tensors by canonical name, whatever the file format.

Formats are safetensors and GGUF; both are data, neither can run code when read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from headway.errors import ModelLoadError
from headway.executors.source import ModelSource, SourceKind
from headway.executors.spec import ModelSpec
from headway.resolve import ModelFacts

_NAMES_SHOWN = 5


class Checkpoint(Protocol):
    """An opened checkpoint: tensors are read one at a time, in their canonical form."""

    @property
    def spec(self) -> ModelSpec: ...

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """What the headers say of every tensor, by canonical name."""
        ...

    def read(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Quantized:
    """Rows as a file keeps them: ggml's name of the kind, the bytes of each row, and the shape
    of the tensor in values."""

    kind: str
    rows: np.ndarray
    shape: tuple[int, ...]


@runtime_checkable
class QuantizedRows(Protocol):
    """A checkpoint that can hand out tensors without dequantizing them."""

    @property
    def quantization(self) -> str | None:
        """int8 or int4, if that is how the linear layers' weights are held."""
        ...

    def read_quantized(self, name: str) -> Quantized: ...


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Read the headers of a checkpoint; no tensor data yet."""
    if source.kind is SourceKind.GGUF:
        from headway.executors.torch.weights.gguf import GgufCheckpoint

        return GgufCheckpoint(source.path)
    from headway.executors.torch.weights.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(source.path)


def facts_of(checkpoint: Checkpoint) -> ModelFacts:
    """What resolving settings needs to know of a checkpoint."""
    quantization = checkpoint.quantization if isinstance(checkpoint, QuantizedRows) else None
    return replace(checkpoint.spec.facts, quantization=quantization)


def check_shapes(
    expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse a checkpoint that lacks a tensor, has one nobody reads, or one of another shape.

    Before any memory is allocated: what the configuration asks for need not be what is there.
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
