"""The plain torch model: any device, any dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.executors.torch.attention import Span
from headway.executors.torch.inputs import make_inputs
from headway.executors.torch.kv_store import KVStore
from headway.executors.torch.model import Decoder
from headway.executors.torch.offload_store import OffloadStore
from headway.executors.torch.step_model import Scores


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
        self._decoder = decoder
        self._store = KVStore(decoder.spec, num_blocks, block_size, decoder.dtype, decoder.device)
        self._offload = OffloadStore(self._store.by_block(), num_slots)

    @torch.inference_mode()
    def run(self, spans: Sequence[Span], rows: Sequence[int], needs_logits: bool) -> Scores | None:
        inputs = make_inputs(spans, self.spec.windows, self._store)
        hidden = self._decoder.forward(inputs, self._store)
        if not rows:
            return None
        # Inputs are in attention order; `rows` are in the order of the caller.
        places = [
            first + offset
            for span, first in zip(spans, inputs.rows, strict=True)
            for offset in range(len(span.token_ids))
        ]
        return Scores.of(self._decoder.logits(hidden[[places[row] for row in rows]]))

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
