"""Interface of a model with its KV store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headway.executors.spec import ModelSpec
from headway.executors.torch.attention import Span


@dataclass(frozen=True, slots=True)
class Scores:
    """Best token and score of each row, and the logits if requested.

    `best` is not finite if any score of its row is not. `logits` is None if not requested.
    """

    best: Sequence[float]
    best_ids: Sequence[int]
    logits: torch.Tensor | None

    @staticmethod
    def of(logits: torch.Tensor) -> Scores:
        best, best_ids = logits.max(dim=-1)
        return Scores(best.tolist(), best_ids.tolist(), logits)

    def row(self, at: int) -> Scores:
        logits = None if self.logits is None else self.logits[at : at + 1]
        return Scores(self.best[at : at + 1], self.best_ids[at : at + 1], logits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Data types and sizes of a model; `kernels` is None for plain torch."""

    dtype: str
    num_blocks: int
    block_size: int
    max_model_len: int
    num_slots: int = 0
    kv_dtype: str = "bf16"
    kernels: str | None = None
    num_threads: int = 1
    device: str = "cpu"


class StepModel(Protocol):
    """Weights and KV store."""

    spec: ModelSpec
    device: torch.device
    num_blocks: int
    block_size: int
    num_slots: int

    def run(self, spans: Sequence[Span], rows: Sequence[int], needs_logits: bool) -> Scores | None:
        """Compute the tokens of all spans; return the scores of `rows`, if any.

        Writes the KV store. Rows are numbered over the tokens of all spans, in the order of the
        caller.
        """
        ...

    def profile(self) -> dict[str, float]:
        """Return seconds by part of `run` since the last call; may be empty."""
        ...

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks; every source is read before any target is written."""
        ...

    def save(self, block_ids: Sequence[int], slot_ids: Sequence[int]) -> None:
        """Copy whole blocks, bit for bit, into slots of the offload store."""
        ...

    def load(self, slot_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy slots back into blocks."""
        ...
