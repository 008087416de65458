"""Reading a checkpoint's tensors by canonical name, whatever the file format.

Formats are safetensors and GGUF; both are data, neither can run code when read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from headway.errors import ModelLoadError
from headway.executors.source import ModelSource, SourceKind
from headway.executors.torch.spec import ModelSpec
from headway.resolve import ModelFacts

_NAMES_SHOWN = 5


class Checkpoint(Protocol):
    """An opened checkpoint: tensors are read one at a time, in their canonical form."""

    @property
    def spec(self) -> ModelSpec: ...

    def names(self) -> frozenset[str]: ...

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


def check_names(expected: Iterable[str], found: frozenset[str]) -> None:
    """Refuse a checkpoint that lacks a tensor or has one nobody would read."""
    wanted = set(expected)
    if missing := sorted(wanted - found):
        raise ModelLoadError(f"the checkpoint lacks {_listed(missing)}")
    if extra := sorted(found - wanted):
        raise ModelLoadError(f"the checkpoint has unexpected {_listed(extra)}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"tensors {shown} and {more} more" if more > 0 else f"tensors {shown}"
