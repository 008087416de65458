"""The plain torch model: any device, any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch

from headway.core.executor import BlockRecorder
from headway.core.plan import Failure, Sample
from headway.errors import ConfigError
from headway.executors.sampling import SampleRow
from headway.executors.step_model import ModelOptions, Span
from headway.executors.torch.inputs import make_inputs
from headway.executors.torch.kv_store import KVStore
from headway.executors.torch.model import Decoder
from headway.executors.torch.offload_store import TensorOffloadStore
from headway.executors.torch.sampler import Scores, sample
from headway.executors.weights import Checkpoint
from headway.executors.weights.reader import Progress

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
        rows: Sequence[SampleRow],
        masks: Future[None] | None = None,
    ) -> list[Sample | Failure]:
        logits = self._logits(spans, places)
        if masks is not None:
            masks.result()
        return sample(Scores.of(logits), rows) if rows else []

    @torch.inference_mode()
    def logits(self, spans: Sequence[Span], places: Sequence[int]) -> np.ndarray:
        return self._logits(spans, places).float().cpu().numpy()

    def _logits(self, spans: Sequence[Span], places: Sequence[int]) -> torch.Tensor:
        inputs = make_inputs(spans, self.spec.windows, self._store)
        hidden = self._decoder.forward(inputs, self._store)
        # Inputs are in attention order; `places` are in the order of the caller.
        order = [
            first + offset
            for span, first in zip(spans, inputs.rows, strict=True)
            for offset in range(len(span.token_ids))
        ]
        return self._decoder.logits(hidden[[order[place] for place in places]])

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
