"""Attention through block tables, without padding tokens.

Decodes (one query each) with contexts of similar length share one gather and one call; shorter
contexts of a group are rounded up to the longest, at most by a quarter, and masked. A prefill chunk
is a group of its own. Indices and masks depend on the step, not on the layer, and are made once per
step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headway.executors.step_model import Span
from headway.executors.torch.kv_store import KVStore

MAX_STRETCH = 1.25
MAX_GROUP_BLOCKS = 1024
"""Most blocks gathered at once; a single request may exceed the limit."""


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Requests computed together: equal number of queries, adjacent batch rows.

    `mask` is added to the scores: [requests, 1, queries, keys], 0 or minus infinity.
    """

    queries: slice
    kv_rows: torch.Tensor
    mask: torch.Tensor


def attend(
    queries: torch.Tensor, groups: Sequence[AttentionGroup], store: KVStore, layer: int
) -> torch.Tensor:
    """Return the attention of [tokens, heads, head_dim] over the context of each token."""
    output = torch.empty_like(queries)
    for group in groups:
        num_requests, _, num_queries, num_keys = group.mask.shape
        kv_shape = (num_requests, store.num_kv_heads, num_keys, store.head_dim)
        keys, values = (part.view(kv_shape) for part in store.gather(layer, group.kv_rows))
        shape = (num_requests, num_queries, -1, store.head_dim)
        split = queries[group.queries].view(shape).transpose(1, 2)
        if num_queries == 1:
            # Heads that share a KV head become its queries, so keys are read once, not per head.
            split = split.reshape(num_requests, store.num_kv_heads, -1, store.head_dim)
        mixed = F.scaled_dot_product_attention(
            split, keys, values, attn_mask=group.mask, enable_gqa=True
        )
        if num_queries == 1:
            mixed = mixed.reshape(num_requests, -1, 1, store.head_dim)
        output[group.queries].view(shape).copy_(mixed.transpose(1, 2))
    return output


def attention_order(span: Span) -> tuple[bool, int]:
    """Return the batch order for groups: decodes first, by context length."""
    return len(span.token_ids) > 1, span.end


def make_groups(
    spans: Sequence[Span], window: int | None, store: KVStore
) -> tuple[AttentionGroup, ...]:
    """Return the groups of one step and one window; `spans` are in `attention_order`."""
    groups: list[AttentionGroup] = []
    row = 0
    for batch in _batches(spans, window, store.block_size):
        num_rows = sum(len(span.token_ids) for span in batch)
        groups.append(_make_group(batch, window, store, slice(row, row + num_rows)))
        row += num_rows
    return tuple(groups)


def _batches(
    spans: Sequence[Span], window: int | None, block_size: int
) -> Iterator[Sequence[Span]]:
    batch: list[Span] = []
    shortest = 0
    for span in spans:
        size = len(_visible(span, window, block_size))
        is_alike = size <= MAX_STRETCH * shortest
        fits = size * (len(batch) + 1) <= MAX_GROUP_BLOCKS
        if batch and not (len(span.token_ids) == 1 and is_alike and fits):
            yield batch
            batch = []
        shortest = shortest if batch else size
        batch.append(span)
    if batch:
        yield batch


def _visible(span: Span, window: int | None, block_size: int) -> range:
    """Return the block table range that queries of the span can see."""
    oldest = 0 if window is None else max(0, span.start - window + 1)
    return range(oldest // block_size, -(-span.end // block_size))


def _make_group(
    batch: Sequence[Span], window: int | None, store: KVStore, queries: slice
) -> AttentionGroup:
    visible = [_visible(span, window, store.block_size) for span in batch]
    width = max(len(places) for places in visible)
    tables = [
        [*span.block_ids[places.start : places.stop]]
        + [span.block_ids[places[-1]]] * (width - len(places))
        for span, places in zip(batch, visible, strict=True)
    ]
    heads = torch.arange(store.num_kv_heads)
    kv_rows = torch.tensor(tables).unsqueeze(1) * store.num_kv_heads + heads.view(1, -1, 1)

    # Keys are numbered by position, so those past a request's end are in its future and masked
    # by causality alone.
    first_keys = torch.tensor([places.start * store.block_size for places in visible])
    first_queries = torch.tensor([span.start for span in batch])
    key_at = first_keys.view(-1, 1, 1, 1) + torch.arange(width * store.block_size)
    query_at = first_queries.view(-1, 1, 1, 1) + torch.arange(len(batch[0].token_ids)).view(-1, 1)
    is_hidden = key_at > query_at
    if window is not None:
        is_hidden |= key_at <= query_at - window
    mask = torch.zeros(is_hidden.shape, dtype=store.dtype).masked_fill_(is_hidden, -torch.inf)
    return AttentionGroup(queries, kv_rows.flatten().to(store.device), mask.to(store.device))
