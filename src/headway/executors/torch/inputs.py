"""Flat tensors of one forward pass, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from headway.executors.torch.attention import (
    AttentionGroup,
    Span,
    attention_order,
    make_groups,
)
from headway.executors.torch.kv_store import KVStore


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """Inputs of one forward pass.

    Tokens of a request are adjacent; requests are in attention order.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    """KV store slot of each token and head: [tokens * kv_heads]."""
    begun_blocks: tuple[int, ...]
    """Blocks whose first slot this pass writes and which it does not fill."""
    groups: Mapping[int | None, tuple[AttentionGroup, ...]]
    """Attention groups by window."""
    rows: tuple[int, ...]
    """First batch row of each span, in the order of the caller."""


def make_inputs(
    spans: Sequence[Span], windows: Iterable[int | None], store: KVStore
) -> BatchInputs:
    """Return the inputs of one pass over `spans`, for layers with these windows."""
    order = sorted(range(len(spans)), key=lambda index: attention_order(spans[index]))
    ordered = [spans[index] for index in order]
    rows = [0] * len(spans)
    row = 0
    for index in order:
        rows[index] = row
        row += len(spans[index].token_ids)
    return BatchInputs(
        token_ids=_tensor((token for span in ordered for token in span.token_ids), store),
        positions=_tensor((at for span in ordered for at in range(span.start, span.end)), store),
        slots=_slots(ordered, store),
        begun_blocks=tuple(_begun_blocks(ordered, store.block_size)),
        groups={window: make_groups(ordered, window, store) for window in set(windows)},
        rows=tuple(rows),
    )


def _tensor(values: Iterable[int], store: KVStore) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64).to(store.device)


def _slots(spans: Sequence[Span], store: KVStore) -> torch.Tensor:
    size, heads = store.block_size, store.num_kv_heads
    first_head = [
        span.block_ids[at // size] * heads * size + at % size
        for span in spans
        for at in range(span.start, span.end)
    ]
    head_steps = torch.arange(heads) * size
    slots = torch.tensor(first_head, dtype=torch.int64).unsqueeze(1) + head_steps
    return slots.flatten().to(store.device)


def _begun_blocks(spans: Sequence[Span], block_size: int) -> Iterable[int]:
    for span in spans:
        position, filled = divmod(span.end, block_size)
        if filled and span.start <= position * block_size:
            yield span.block_ids[position]
