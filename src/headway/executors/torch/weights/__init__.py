"""Reading a checkpoint's tensors by canonical name, whatever the file format.

Formats are safetensors and GGUF; both are data, neither can run code when read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from headway.errors import ModelLoadError
from headway.executors.source import ModelSource, SourceKind
from headway.executors.torch.spec import ModelSpec

_NAMES_SHOWN = 5


class Checkpoint(Protocol):
    """An opened checkpoint: tensors are read one at a time, in their canonical form."""

    @property
    def spec(self) -> ModelSpec: ...

    def names(self) -> frozenset[str]: ...

    def read(self, name: str) -> torch.Tensor: ...


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Read the headers of a checkpoint; no tensor data yet."""
    if source.kind is SourceKind.GGUF:
        from headway.executors.torch.weights.gguf import GgufCheckpoint

        return GgufCheckpoint(source.path)
    from headway.executors.torch.weights.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(source.path)


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
