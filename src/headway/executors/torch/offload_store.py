"""The offload store: KV blocks of preempted requests in host memory.

A slot has one block of all layers, bit for bit. The scheduler knows which request owns a slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class TensorOffloadStore:
    """Copies blocks to slots and back; the first dimension of `blocks` is the block."""

    def __init__(self, blocks: torch.Tensor, num_slots: int) -> None:
        self.num_slots = num_slots
        self._blocks = blocks
        # Not initialized: the first write into a slot allocates its memory.
        self._slots = torch.empty(
            (num_slots, *blocks.shape[1:]),
            dtype=blocks.dtype,
            pin_memory=num_slots > 0 and blocks.device.type == "cuda",
        )

    def save(self, block_ids: Sequence[int], slot_ids: Sequence[int]) -> None:
        for block_id, slot_id in zip(block_ids, slot_ids, strict=True):
            self._slots[slot_id].copy_(self._blocks[block_id])

    def load(self, slot_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        for slot_id, block_id in zip(slot_ids, block_ids, strict=True):
            self._blocks[block_id].copy_(self._slots[slot_id])
