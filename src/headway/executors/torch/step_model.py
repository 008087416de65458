"""What an executor runs steps on: a decoder with its KV store, whoever does the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from headway.executors.spec import ModelSpec
from headway.executors.torch.attention import Span


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores over the vocabulary of some tokens, one row each, and the best of each row.

    `best` is not finite if any score of its row is not. `logits` is None if nobody asked for it.
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
    """A model's form; `kernels` names an instruction set, or is None for plain torch."""

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
        """Compute the spans' tokens, writing the store; the scores of `rows`, if any.

        Rows are numbered over the tokens of all spans, in the caller's order.
        """
        ...

    def profile(self) -> dict[str, float]:
        """Seconds by part of `run` since the last call; empty if it does not tell."""
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
