from __future__ import annotations

import random

import pytest
import torch

from headway.executors.step_model import Span
from headway.executors.torch.attention import attend
from headway.executors.torch.inputs import make_inputs
from headway.executors.torch.kv_store import KVStore
from tests.support.tiny import tiny_spec

CPU = torch.device("cpu")
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 16


def make_store(block_size: int, dtype: torch.dtype = torch.float32) -> KVStore:
    spec = tiny_spec(
        num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, num_layers=1
    )
    store = KVStore(spec, 256, block_size, dtype, CPU)
    store._data.fill_(torch.nan)  # whatever is read without having been written shows
    return store


def dense(queries, kv, start, window):
    """One request, written out: [tokens, heads, dim] in, the same out, in fp64."""
    keys, values = kv
    group = NUM_HEADS // NUM_KV_HEADS
    output = torch.empty(queries.shape, dtype=torch.float64)
    for offset in range(len(queries)):
        last = start + offset
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(NUM_HEADS):
            seen_keys = keys[first : last + 1, head // group].double()
            seen_values = values[first : last + 1, head // group].double()
            scores = seen_keys @ queries[offset, head].double() / HEAD_DIM**0.5
            output[offset, head] = scores.softmax(0) @ seen_values
    return output


def run(lengths: list[tuple[int, int]], window: int | None, store: KVStore):
    """Prefill (start, count) pairs up to start, then attend with the rest in one batch."""
    draw = random.Random(0)
    free = list(range(store.num_blocks))
    draw.shuffle(free)
    torch.manual_seed(0)
    requests = []
    for start, count in lengths:
        table = [free.pop() for _ in range(-(-(start + count) // store.block_size))]
        kv = torch.randn(2, start + count, NUM_KV_HEADS, HEAD_DIM).to(store.dtype)
        requests.append((Span(range(count), start, table), kv))
        if start:
            past = make_inputs([Span(range(start), 0, table)], [None], store)
            store.clear(past.begun_blocks)
            store.write(0, past.slots, kv[0, :start], kv[1, :start])
    inputs = make_inputs([span for span, _ in requests], [window], store)
    store.clear(inputs.begun_blocks)
    queries = torch.randn(len(inputs.token_ids), NUM_HEADS, HEAD_DIM).to(store.dtype)
    written = torch.empty(2, len(inputs.token_ids), NUM_KV_HEADS, HEAD_DIM, dtype=store.dtype)
    for (span, kv), row in zip(requests, inputs.rows, strict=True):
        written[:, row : row + len(span.token_ids)] = kv[:, span.start :]
    store.write(0, inputs.slots, written[0], written[1])
    actual = attend(queries, inputs.groups[window], store, 0)
    for (span, kv), row in zip(requests, inputs.rows, strict=True):
        rows = slice(row, row + len(span.token_ids))
        yield actual[rows].double(), dense(queries[rows], kv, span.start, window)


MIXED = [(0, 1), (30, 1), (0, 9), (7, 1), (31, 1), (16, 5), (15, 1), (33, 1), (63, 1), (8, 8)]


@torch.inference_mode()
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_equals_dense_attention(block_size, window):
    for actual, expected in run(MIXED, window, make_store(block_size)):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_bf16_stays_close():
    for actual, expected in run(MIXED, None, make_store(8, torch.bfloat16)):
        torch.testing.assert_close(actual, expected, atol=2e-2, rtol=2e-2)


def test_no_token_is_added():
    store = make_store(4)
    spans = [Span((1, 2, 3), 0, [5]), Span((9,), 6, [1, 2]), Span((7,), 1, [3])]
    inputs = make_inputs(spans, [None], store)
    assert inputs.token_ids.tolist() == [7, 9, 1, 2, 3]
    assert inputs.positions.tolist() == [1, 6, 0, 1, 2]
    assert inputs.rows == (2, 1, 0)
    assert len(inputs.slots) == 5 * NUM_KV_HEADS


def test_decodes_of_unlike_length_are_not_stretched():
    store = make_store(4)
    spans = [Span((0,), start, list(range(64))) for start in (7, 7, 8, 79, 81, 239)]
    groups = make_inputs(spans, [None], store).groups[None]
    assert [group.mask.shape[0] for group in groups] == [2, 1, 2, 1]
    gathered = sum(len(group.kv_rows) for group in groups) // NUM_KV_HEADS
    assert gathered == 2 + 2 + 3 + 21 + 21 + 60


def test_a_window_reads_only_the_blocks_it_shows():
    store = make_store(4)
    groups = make_inputs([Span((0,), 100, list(range(26)))], [8], store).groups[8]
    assert len(groups[0].kv_rows) == 3 * NUM_KV_HEADS
