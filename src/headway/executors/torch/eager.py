"""The plain torch model: any device, any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch

from headway.core.executor import BlockRecorder
from headway.core.plan import Embedding, Failure
from headway.errors import ConfigError
from headway.executors.sampling import HiddenRow, Row, SampleRow, ScoreRow
from headway.executors.step_model import ModelOptions, RowOutcome, Span
from headway.executors.torch.inputs import make_inputs
from headway.executors.torch.kv_store import KVStore
from headway.executors.torch.model import Decoder
from headway.executors.torch.offload_store import TensorOffloadStore
from headway.executors.torch.sampler import Scores, sample, score
from headway.executors.weights import Checkpoint
from headway.executors.weights.reader import Progress

SCORED_ROWS = 64
"""Rows of logits that are scored at a time: those of a whole prompt could fill the memory."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class EagerModel:
    """A Decoder and its KV store as a StepModel."""

    def __init__(
        self, decoder: Decoder, num_blocks: int, block_size: int, num_slots: int = 0
    ) -> None:
        self.spec = decoder.spec
        self.device = decoder.device
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_slots = num_slots
        self.recorder: BlockRecorder | None = None  # blocks are lost with the process
        self._decoder = decoder
        self._store = KVStore(decoder.spec, num_blocks, block_size, decoder.dtype, decoder.device)
        self._offload = TensorOffloadStore(self._store.by_block(), num_slots)

    @torch.inference_mode()
    def sample(
        self,
        spans: Sequence[Span],
        places: Sequence[int],
        rows: Sequence[Row],
        masks: Future[None] | None = None,
    ) -> list[RowOutcome]:
        hidden = self._hidden(spans, places)
        if masks is not None:
            masks.result()
        sampled = {at: row for at, row in enumerate(rows) if isinstance(row, SampleRow)}
        scored = [(at, row) for at, row in enumerate(rows) if isinstance(row, ScoreRow)]
        outcomes: dict[int, RowOutcome] = {}
        if sampled:
            logits = self._decoder.logits(hidden[list(sampled)])
            samples = sample(Scores.of(logits), list(sampled.values()))
            outcomes |= zip(sampled, samples, strict=True)
        for first in range(0, len(scored), SCORED_ROWS):
            numbers, score_rows = zip(*scored[first : first + SCORED_ROWS], strict=True)
            logits = self._decoder.logits(hidden[list(numbers)])
            outcomes |= zip(numbers, score(logits, score_rows), strict=True)
        for at, row in enumerate(rows):
            if isinstance(row, HiddenRow):
                outcomes[at] = self._embed(hidden[at])
        return [outcomes[at] for at in range(len(rows))]

    def _embed(self, hidden: torch.Tensor) -> Embedding | Failure:
        values = self._decoder.final_norm(hidden).float().cpu()
        if not values.isfinite().all():
            return Failure("the model's hidden state is not finite")
        return Embedding(values.numpy().tobytes())

    @torch.inference_mode()
    def logits(self, spans: Sequence[Span], places: Sequence[int]) -> np.ndarray:
        return self._decoder.logits(self._hidden(spans, places)).float().cpu().numpy()

    def _hidden(self, spans: Sequence[Span], places: Sequence[int]) -> torch.Tensor:
        inputs = make_inputs(spans, self.spec.windows, self._store)
        hidden = self._decoder.forward(inputs, self._store)
        # Inputs are in attention order; `places` are in the order of the caller.
        order = [
            first + offset
            for span, first in zip(spans, inputs.rows, strict=True)
            for offset in range(len(span.token_ids))
        ]
        return hidden[[order[place] for place in places]]

    def profile(self) -> dict[str, float]:
        return {}

    @torch.inference_mode()
    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._store.copy(sources, targets)

    @torch.inference_mode()
    def save(self, block_ids: Sequence[int], slot_ids: Sequence[int]) -> None:
        self._offload.save(block_ids, slot_ids)

    @torch.inference_mode()
    def load(self, slot_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        self._offload.load(slot_ids, block_ids)


def load_eager(
    checkpoint: Checkpoint, options: ModelOptions, progress: Progress | None = None
) -> EagerModel:
    """Return the model in plain torch, which then uses as many threads as the options say."""
    torch.set_num_threads(options.num_threads)
    decoder = load_decoder(checkpoint, options.dtype, options.device, progress)
    return EagerModel(decoder, options.num_blocks, options.block_size, options.num_slots)


def load_decoder(
    checkpoint: Checkpoint, dtype: str, device: str = "cpu", progress: Progress | None = None
) -> Decoder:
    """Return the plain torch model; `dtype` also applies to the KV store."""
    if dtype not in _DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; known: {', '.join(_DTYPES)}")
    with torch.inference_mode():
        return Decoder.load(checkpoint, _DTYPES[dtype], torch.device(device), progress)
