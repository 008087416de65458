"""KV blocks of an engine process that ended are used again only if nothing happened to them."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from headway.core.executor import BlockRecorder, HashedBlock
from headway.executors.cpu import kernels
from headway.executors.cpu.compiled import CompiledModel
from headway.executors.cpu.shared_kv import (
    _ENTRY,
    _HEADER_BYTES,
    MAX_STARTS,
    RecordedBlock,
    SharedKV,
)
from headway.executors.step_model import ModelLoading, ModelOptions, Span
from headway.executors.weights.source_files import SourceFiles
from tests.executors.cpu.test_compiled import spec_of, weights_of
from tests.support.tiny import MemoryCheckpoint

pytestmark = pytest.mark.skipif(
    kernels.best_isa() is None, reason="the compiled kernels are not built"
)

NUM_BLOCKS = 16
SHAPE = (2, NUM_BLOCKS, 4096)
IDENTITY = sha256(b"model").digest()
SPEC = spec_of()
TOKENS = [(7 * i + 3) % 47 for i in range(64)]
TABLE = [5, 2, 9, 0]


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def hashed(number: int, group: str = "group", num_tokens: int = 16) -> HashedBlock:
    return HashedBlock(number, sha256(bytes([number])).digest(), group, num_tokens)


def test_records_are_there_for_the_next_process(descriptor: int) -> None:
    first = SharedKV(descriptor, IDENTITY, SHAPE)
    assert first.recorded() == []
    entries = [RecordedBlock(hashed(i, "ü" * i), 2**64 - 1 - i) for i in (0, 7, 15)]
    first.record(entries)
    assert SharedKV(descriptor, IDENTITY, SHAPE).recorded() == entries
    first.record([RecordedBlock(hashed(7, "other"), 1), RecordedBlock(hashed(0, "x" * 82), 1)])
    assert SharedKV(descriptor, IDENTITY, SHAPE).recorded() == [
        RecordedBlock(hashed(7, "other"), 1),
        entries[2],
    ]


@pytest.mark.parametrize(
    ("identity", "shape"),
    [(sha256(b"other").digest(), SHAPE), (IDENTITY, (2, 17, 4096)), (IDENTITY, (2, 16, 8192))],
)
def test_memory_of_another_model_or_size_is_cleared(
    descriptor: int, identity: bytes, shape: tuple[int, int, int]
) -> None:
    first = SharedKV(descriptor, IDENTITY, SHAPE)
    first.record([RecordedBlock(hashed(3), 1)])
    assert SharedKV(descriptor, identity, shape).recorded() == []
    assert SharedKV(descriptor, IDENTITY, SHAPE).recorded() == []


def test_no_flipped_bit_and_no_torn_entry_is_believed(descriptor: int) -> None:
    shared = SharedKV(descriptor, IDENTITY, SHAPE)
    shared.record([RecordedBlock(hashed(3), 1)])
    at = _HEADER_BYTES + 3 * _ENTRY.size
    entry = os.pread(descriptor, _ENTRY.size, at)
    for bit in range(8 * _ENTRY.size):
        damaged = bytearray(entry)
        damaged[bit // 8] ^= 1 << bit % 8
        os.pwrite(descriptor, damaged, at)
        assert shared.recorded() == []
    for end in range(_ENTRY.size):
        for rest in (bytes(_ENTRY.size), os.urandom(_ENTRY.size), b"\xff" * _ENTRY.size):
            os.pwrite(descriptor, entry[:end] + rest[end:], at)
            assert all(one == RecordedBlock(hashed(3), 1) for one in shared.recorded())
    # An entry in the place of another is of no block.
    os.pwrite(descriptor, entry, _HEADER_BYTES + 4 * _ENTRY.size)
    os.pwrite(descriptor, bytes(_ENTRY.size), at)
    assert shared.recorded() == []


def model_on(descriptor: int, folder: Path, **changes: object) -> CompiledModel:
    file = folder / "weights"
    if not file.exists():
        file.touch()
    source = SourceFiles.of(file, [file])
    options = {"dtype": "int8", "kernels": "plain", "num_threads": 2, **changes}
    return CompiledModel(
        MemoryCheckpoint(SPEC, weights_of(SPEC), source),
        ModelOptions(
            num_blocks=NUM_BLOCKS,
            block_size=16,
            max_model_len=128,
            **options,  # pyright: ignore[reportArgumentType]
        ),
        ModelLoading(kv_descriptor=descriptor),
    )


def recorder_of(model: CompiledModel) -> BlockRecorder:
    assert model.recorder is not None
    return model.recorder


def intact(recorder: BlockRecorder) -> list[HashedBlock]:
    return recorder.find_intact(recorder.restore())


BLOCKS = [hashed(block_id) for block_id in TABLE[:3]]


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_a_request_continues_on_the_blocks_of_another_process(
    descriptor: int, tmp_path: Path, kv_dtype: str
) -> None:
    first = model_on(descriptor, tmp_path, kv_dtype=kv_dtype)
    first.logits([Span(TOKENS[:48], 0, TABLE)], [47])
    recorder_of(first).record(BLOCKS)
    expected = first.logits([Span(TOKENS[48:60], 48, TABLE)], range(12))
    second = model_on(descriptor, tmp_path, kv_dtype=kv_dtype)
    assert intact(recorder_of(second)) == sorted(BLOCKS)
    assert (second.logits([Span(TOKENS[48:60], 48, TABLE)], range(12)) == expected).all()


TAIL = hashed(TABLE[3], num_tokens=5)


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_a_tail_continues_whatever_was_written_behind_it(
    descriptor: int, tmp_path: Path, kv_dtype: str
) -> None:
    first = model_on(descriptor, tmp_path, kv_dtype=kv_dtype)
    first.logits([Span(TOKENS[:53], 0, TABLE)], [52])
    recorder_of(first).record([*BLOCKS, TAIL])
    expected = first.logits([Span(TOKENS[53:60], 53, TABLE)], range(7))
    first.logits([Span([3] * 11, 53, TABLE)], [10])
    # Not a number behind the tail, as after garbage was written.
    tail = first._offload._blocks[:, TABLE[3]].copy()
    shape = (SPEC.num_layers, SPEC.num_kv_heads, 2)
    if kv_dtype == "bf16":
        values = tail.view(np.uint16).reshape(*shape, 8, -1, 2)
        values[:, :, 1, 3:] = values[:, :, 1, 2, :, 1] = 0x7FC0
    else:
        tail.view(np.float32).reshape(*shape, -1)[..., -16 + 5 :] = np.nan
    first._offload._blocks[:, TABLE[3]] = tail
    second = model_on(descriptor, tmp_path, kv_dtype=kv_dtype)
    assert intact(recorder_of(second)) == sorted([*BLOCKS, TAIL])
    assert (second.logits([Span(TOKENS[53:60], 53, TABLE)], range(7)) == expected).all()


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("chunks", [(53,), (7, 9, 30, 7), (1,) * 53, (48, 1, 1, 1, 1, 1)])
def test_steps_add_up_the_checksums_of_what_is_in_the_blocks(
    descriptor: int, tmp_path: Path, kv_dtype: str, chunks: tuple[int, ...]
) -> None:
    model = model_on(descriptor, tmp_path, kv_dtype=kv_dtype)
    at = 0
    for size in chunks:
        model.logits([Span(TOKENS[at : at + size], at, TABLE)], [size - 1])
        at += size
    sizes = (TABLE, [16, 16, 16, 5])
    added = list(model._blocks.checksums(*sizes))
    model._blocks.forget(TABLE)
    assert list(model._blocks.checksums(*sizes)) == added
    assert len(set(added)) == 4


def test_a_copied_block_and_a_loaded_block_have_the_checksum_of_their_contents(
    descriptor: int, tmp_path: Path
) -> None:
    model = model_on(descriptor, tmp_path, num_slots=1)
    model.logits([Span(TOKENS[:53], 0, TABLE)], [52])
    model.logits([Span(TOKENS[20:41], 0, [7, 8])], [20])
    source, other = model._blocks.checksums([TABLE[3], 8], [5, 5])
    assert source != other
    model.copy([TABLE[3]], [8])
    assert list(model._blocks.checksums([8], [5])) == [source]
    model.save([TABLE[3]], [0])
    model.load([0], [7])
    assert list(model._blocks.checksums([7], [5])) == [source]


def test_an_entry_with_more_tokens_than_a_block_is_not_used(
    descriptor: int, tmp_path: Path
) -> None:
    model = model_on(descriptor, tmp_path)
    for num_tokens in (0, 17, 65535):
        entry = RecordedBlock(hashed(3, num_tokens=num_tokens), 0)
        model._shared.record([entry])  # pyright: ignore[reportOptionalMemberAccess]
        assert intact(recorder_of(model)) == []


def test_another_data_type_begins_anew(descriptor: int, tmp_path: Path) -> None:
    first = model_on(descriptor, tmp_path)
    first.logits([Span(TOKENS[:48], 0, TABLE)], [47])
    recorder_of(first).record(BLOCKS)
    assert intact(recorder_of(model_on(descriptor, tmp_path, dtype="int4"))) == []


def test_another_file_of_weights_begins_anew(descriptor: int, tmp_path: Path) -> None:
    first = model_on(descriptor, tmp_path)
    first.logits([Span(TOKENS[:48], 0, TABLE)], [47])
    recorder_of(first).record(BLOCKS)
    (tmp_path / "weights").write_text("other")
    assert intact(recorder_of(model_on(descriptor, tmp_path))) == []


def test_a_damaged_block_is_not_used(descriptor: int, tmp_path: Path) -> None:
    """One bit anywhere, garbage, zeros, and blocks that change places."""
    model = model_on(descriptor, tmp_path)
    model.logits([Span(TOKENS[:48], 0, TABLE)], [47])
    recorder_of(model).record(BLOCKS)
    draw = random.Random(1)
    size = model._library.hw_block_bytes(model._model)
    blocks = model._offload._blocks
    for case in range(200):
        layer, block_id = draw.randrange(SPEC.num_layers), draw.choice(TABLE[:3])
        before = blocks[:, :NUM_BLOCKS].copy()
        if case % 4 == 0:
            first, last = sorted(draw.sample(range(size), 2))
            blocks[layer, block_id, first:last] = draw.choice([0, 0xFF, draw.randrange(256)])
        elif case % 4 == 1:
            other = draw.choice([one for one in TABLE[:3] if one != block_id])
            blocks[layer, block_id] = before[layer, other]
        elif case % 4 == 2:
            at = 64 * draw.randrange(size // 64 - 1)  # whole lines change places
            line = blocks[layer, block_id, at : at + 64].copy()
            blocks[layer, block_id, at : at + 64] = blocks[layer, block_id, at + 64 : at + 128]
            blocks[layer, block_id, at + 64 : at + 128] = line
        else:
            blocks[layer, block_id, draw.randrange(size)] ^= 1 << draw.randrange(8)
        is_changed = (blocks[:, block_id] != before[:, block_id]).any()
        restored = {block.block_id for block in intact(recorder_of(model))}
        assert restored == set(TABLE[:3]) - ({block_id} if is_changed else set()), case
        blocks[:, :NUM_BLOCKS] = before
    assert intact(recorder_of(model)) == sorted(BLOCKS)


def test_blocks_are_on_large_pages_and_keep_their_contents(descriptor: int) -> None:
    shape = (3, 1000, 12 * 1024)
    shared = SharedKV(descriptor, IDENTITY, shape)
    num_bytes = shape[0] * shape[1] * shape[2]
    memory = (ctypes.c_ubyte * num_bytes).from_address(shared.address)
    draw = random.Random(1)
    written = {draw.randrange(num_bytes): draw.randrange(256) for _ in range(2000)}
    for at, value in written.items():
        memory[at] = value
    for block_id in (0, 169, 170, 171, 500, 999):
        shared.prepare(block_id)
    assert all(memory[at] == value for at, value in written.items())
    again = SharedKV(descriptor, IDENTITY, shape)
    memory = (ctypes.c_ubyte * num_bytes).from_address(again.address)
    assert all(memory[at] == value for at, value in written.items())


def test_sizes_that_change_no_block_keep_the_blocks(descriptor: int, tmp_path: Path) -> None:
    """The free memory decides the number of slots, and is another after a crash."""
    first = model_on(descriptor, tmp_path, num_slots=3)
    first.logits([Span(TOKENS[:48], 0, TABLE)], [47])
    recorder_of(first).record(BLOCKS)
    second = model_on(descriptor, tmp_path, num_slots=5, num_threads=1)
    assert intact(recorder_of(second)) == sorted(BLOCKS)


def test_processes_that_complete_no_step_cost_the_blocks_in_the_end(
    descriptor: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks that take every engine down must not do so for ever."""
    entries = [RecordedBlock(hashed(3), 1)]
    SharedKV(descriptor, IDENTITY, SHAPE).record(entries)
    for _ in range(2 * MAX_STARTS):
        shared = SharedKV(descriptor, IDENTITY, SHAPE)
        assert shared.recorded() == entries
        shared.confirm()
    for _ in range(MAX_STARTS):
        assert SharedKV(descriptor, IDENTITY, SHAPE).recorded() == entries
    assert "cannot be used" not in caplog.text
    assert SharedKV(descriptor, IDENTITY, SHAPE).recorded() == []
    assert "cannot be used" in caplog.text
