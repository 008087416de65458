from __future__ import annotations

import torch

from headway.executors.step_model import Span
from headway.executors.torch.inputs import make_inputs
from headway.executors.torch.kv_store import KVStore
from tests.support.tiny import tiny_spec

CPU = torch.device("cpu")


def make_store() -> KVStore:
    store = KVStore(tiny_spec(), 8, 4, torch.float32, CPU)
    store._data.copy_(torch.randn(store._data.shape))
    return store


def test_written_tokens_are_gathered_in_order():
    store = make_store()
    inputs = make_inputs([Span(range(6), 0, [5, 2])], [None], store)
    keys, values = torch.randn(2, 6, 2, 8)
    store.write(1, inputs.slots, keys, values)
    got_keys, got_values = store.gather(1, inputs.groups[None][0].kv_rows)
    assert torch.equal(got_keys.view(2, 8, 8)[:, :6], keys.transpose(0, 1))
    assert torch.equal(got_values.view(2, 8, 8)[:, :6], values.transpose(0, 1))


def test_writing_touches_nothing_else():
    store = make_store()
    before = store._data.clone()
    inputs = make_inputs([Span((0,), 6, [5, 2])], [None], store)
    store.write(0, inputs.slots, torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    changed = (store._data != before).nonzero()[:, [0, 2, 4]].unique(dim=0)
    assert changed.tolist() == [[0, 2, 2]]


def test_copies_read_every_source_first():
    store = make_store()
    before = store._data.clone()
    store.copy([1, 2, 3], [2, 1, 4])
    expected = before.clone()
    expected[:, :, 2], expected[:, :, 1] = before[:, :, 1], before[:, :, 2]
    expected[:, :, 4] = before[:, :, 3]
    assert torch.equal(store._data, expected)


def test_only_blocks_begun_and_left_open_are_cleared():
    store = make_store()
    table = [5, 2, 7]

    def begun(start: int, end: int) -> tuple[int, ...]:
        return make_inputs([Span(range(end - start), start, table)], [None], store).begun_blocks

    assert begun(0, 3) == (5,)
    assert begun(0, 4) == ()
    assert begun(2, 9) == (7,)
    assert begun(3, 4) == ()
    assert begun(4, 5) == (2,)
    assert begun(5, 6) == ()
