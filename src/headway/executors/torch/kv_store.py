"""The KV store: keys and values of every layer in blocks.

A block is [kv_heads, block_size, head_dim]: one block of one head is a contiguous row to gather,
and a whole block is a contiguous range to copy. The store does not know requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.executors.spec import ModelSpec


class KVStore:
    """Block storage for all layers. Slots and rows index the store as flat tables:

    slot = (block * kv_heads + head) * block_size + offset   one token of one head
    row  = block * kv_heads + head                           one block of one head
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = spec.num_kv_heads
        self.head_dim = spec.head_dim
        self.dtype = dtype
        self.device = device
        # Not initialized: `clear` runs before the first write into a block.
        self._data = torch.empty(
            (spec.num_layers, 2, num_blocks, spec.num_kv_heads, block_size, spec.head_dim),
            dtype=dtype,
            device=device,
        )
        self._slots = self._data.view(spec.num_layers, 2, -1, spec.head_dim)
        self._rows = self._data.view(spec.num_layers, 2, -1, block_size * spec.head_dim)
        self._scratch = torch.empty((2, 0, block_size * spec.head_dim), dtype=dtype, device=device)

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store [tokens, kv_heads, head_dim] at `slots`, one slot per token and head."""
        key_slots, value_slots = self._slots[layer]
        key_slots.index_copy_(0, slots, keys.reshape(-1, self.head_dim))
        value_slots.index_copy_(0, slots, values.reshape(-1, self.head_dim))

    def gather(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of these rows; valid until the next gather.

        The target is reused because fresh memory of this size costs more than the copy.
        """
        count = rows.shape[0]
        if self._scratch.shape[1] < count:
            self._scratch = self._scratch.new_empty((2, count, self._scratch.shape[2]))
        keys, values = self._scratch[0, :count], self._scratch[1, :count]
        torch.index_select(self._rows[layer, 0], 0, rows, out=keys)
        torch.index_select(self._rows[layer, 1], 0, rows, out=values)
        return keys, values

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks in all layers; every source is read before any target is written."""
        source_ids = torch.tensor(sources, device=self.device)
        target_ids = torch.tensor(targets, device=self.device)
        self._data[:, :, target_ids] = self._data[:, :, source_ids]

    def by_block(self) -> torch.Tensor:
        """Return a view with the block as its first dimension."""
        return self._data.movedim(2, 0)

    def clear(self, block_ids: Sequence[int]) -> None:
        """Zero blocks in all layers.

        Attention reads whole blocks and masks the tail, and a masked NaN is still a NaN, so values
        of an earlier owner must not remain.
        """
        if block_ids:
            self._data[:, :, torch.tensor(block_ids, device=self.device)] = 0
