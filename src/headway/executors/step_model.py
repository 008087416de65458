"""Interface of a model with its KV store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headway.core.executor import BlockRecorder
from headway.core.plan import Embedding, Failure, Sample, TokenLogprobs
from headway.executors.cpu.packed_cache import PackedCache
from headway.executors.sampling import Row
from headway.executors.spec import ModelSpec
from headway.executors.weights.reader import Progress


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one request from position `start`, and its block table."""

    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    def written_block_ids(self, block_size: int) -> Sequence[int]:
        """Return the blocks that its tokens are written to."""
        return self.block_ids[self.start // block_size : (self.end - 1) // block_size + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Data types and sizes of a model; `kernels` is None for plain torch."""

    dtype: str
    num_blocks: int
    block_size: int
    max_model_len: int
    num_slots: int = 0
    kv_dtype: str = "bf16"
    activation_dtype: str = "bf16"
    kernels: str | None = None
    num_threads: int = 1
    device: str = "cpu"


def _go_on() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoading:
    """How a model is loaded; none of it changes what the model computes."""

    progress: Progress | None = None
    cache: PackedCache | None = None
    """Packed weights of earlier loads."""
    kv_descriptor: int | None = None
    """Memory for the KV store that outlives the process; None: memory of the process."""
    when_packed: Callable[[], None] = _go_on
    """Called with the weights in memory, before the KV store is mapped."""


DEFAULT_LOADING = ModelLoading()


RowOutcome = Sample | TokenLogprobs | Embedding | Failure


class HasLogits(Protocol):
    """A model whose quality can be measured."""

    def logits(self, spans: Sequence[Span], places: Sequence[int]) -> np.ndarray:
        """Compute the tokens of all spans; return the logits of `places`, in fp32."""
        ...


class StepModel(HasLogits, Protocol):
    """Weights and KV store."""

    spec: ModelSpec
    num_blocks: int
    block_size: int
    num_slots: int
    recorder: BlockRecorder | None
    """Records published blocks; None if no block outlives the process."""

    def sample(
        self,
        spans: Sequence[Span],
        places: Sequence[int],
        rows: Sequence[Row],
        masks: Future[None] | None = None,
    ) -> list[RowOutcome]:
        """Compute the tokens of all spans; sample or score a token for each row.

        Writes the KV store. `places` are the tokens whose logits the rows need, numbered over all
        spans in the order of the caller. A SampleRow becomes a Sample, a ScoreRow TokenLogprobs,
        a HiddenRow an Embedding; a row that is not finite fails alone. The masks of rows are read
        when `masks` is done, if it is given: another thread is writing them.
        """
        ...

    def profile(self) -> dict[str, float]:
        """Return seconds by part of `sample` since the last call; may be empty."""
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
