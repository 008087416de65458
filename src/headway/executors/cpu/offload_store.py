"""The offload store of the compiled kernels: KV blocks of preempted requests.

A slot has one block of all layers, bit for bit. The scheduler knows which request owns a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class OffloadStore:
    """Copies blocks to slots and back; `blocks` is [layer, block, bytes]."""

    def __init__(self, blocks: np.ndarray, num_slots: int) -> None:
        self._blocks = blocks
        num_layers, _, num_bytes = blocks.shape
        # Not initialized: the first write into a slot allocates its memory.
        self._slots = np.empty((num_slots, num_layers, num_bytes), dtype=np.uint8)

    def save(self, block_ids: Sequence[int], slot_ids: Sequence[int]) -> None:
        for block_id, slot_id in zip(block_ids, slot_ids, strict=True):
            self._slots[slot_id] = self._blocks[:, block_id]

    def load(self, slot_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        for slot_id, block_id in zip(slot_ids, block_ids, strict=True):
            self._blocks[:, block_id] = self._slots[slot_id]
