"""Packing weights into panels and reading them back, against the rules written out in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headway.executors.torch import kernels
from headway.executors.torch.compiled import _columns
from headway.resolve import _WEIGHT_BYTES

LIBRARY: Any = kernels.load_kernels()
if LIBRARY is None:
    pytest.skip("the compiled kernels are not built", allow_module_level=True)

BLOCKS = ("Q4_0", "Q4_1", "Q8_0")
NUM_OUTPUTS, NUM_INPUTS = 48, 96


def some_rows(num_outputs: int = NUM_OUTPUTS, num_inputs: int = NUM_INPUTS) -> np.ndarray:
    """Groups of every kind: around zero, off it, large, small, of one sign, constant, zero."""
    draw = np.random.default_rng(0)
    groups = draw.normal(size=(num_outputs * num_inputs // 32, 32)).astype(np.float32)
    groups *= 10.0 ** draw.uniform(-2, 2, size=(len(groups), 1)).astype(np.float32)
    groups[1::7] += groups[1::7].max(axis=1, keepdims=True)
    groups[2::7] = -np.abs(groups[2::7])
    groups[3::21] = groups[3::21, :1]
    groups[10::21] = 0.0
    return groups.reshape(num_outputs, num_inputs)


def blocks_of(rows: np.ndarray, kind: str) -> np.ndarray:
    return gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind])


def values_of(blocks: np.ndarray, kind: str) -> np.ndarray:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


def bf16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().float().numpy()


def scales_of(rows: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Each group's scale and offset, as rows of [groups, 1]."""
    groups = rows.astype(np.float32).reshape(-1, 32)
    low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    if dtype == "int8":
        scale = np.maximum(np.abs(low), np.abs(high)) / np.float32(127)
        low = np.zeros_like(low)
    else:
        scale = (high - low) / np.float32(15)
    return scale.astype(np.float16).astype(np.float32), low.astype(np.float16).astype(np.float32)


def quantized(rows: np.ndarray, dtype: str) -> np.ndarray:
    """What int8 or int4 makes of fp32 weights, before bf16 rounds it."""
    scale, offset = scales_of(rows, dtype)
    groups = rows.reshape(-1, 32) - offset
    numbers = np.rint(np.divide(groups, scale, out=np.zeros_like(groups), where=scale > 0))
    low, high = (-127, 127) if dtype == "int8" else (0, 15)
    return (np.clip(numbers, low, high) * scale + offset).reshape(rows.shape)


class Packed:
    """A linear layer in `dtype` into which rows can be packed."""

    def __init__(self, dtype: str, num_outputs: int, num_inputs: int) -> None:
        self.kind = kernels.FORMATS[dtype]
        size = LIBRARY.hw_packed_bytes(self.kind, num_outputs, num_inputs)
        self.data = torch.full((size,), 0xFF, dtype=torch.uint8)
        self.linear = kernels.Linear(
            self.data.data_ptr(), None, num_outputs, num_inputs, self.kind, 0
        )

    def pack(self, rows: np.ndarray, outputs: Sequence[int], source: str = "F32") -> None:
        rows, columns = np.ascontiguousarray(rows), np.array(outputs, dtype=np.int32)
        LIBRARY.hw_pack(
            self.data.data_ptr(),
            self.kind,
            kernels.SOURCES[source],
            rows.ctypes.data,
            len(rows),
            self.linear.num_inputs,
            columns.ctypes.data,
        )

    def unpack(self, outputs: Sequence[int] | None = None) -> np.ndarray:
        outputs = range(self.linear.num_outputs) if outputs is None else outputs
        rows = np.empty((len(outputs), self.linear.num_inputs), dtype=np.float32)
        for row, output in zip(rows, outputs, strict=True):
            LIBRARY.hw_unpack(self.linear, output, row.ctypes.data)
        return rows


def packed(rows: np.ndarray, dtype: str, source: str = "F32", num_inputs: int = NUM_INPUTS):
    layer = Packed(dtype, len(rows), num_inputs)
    layer.pack(rows, range(len(rows)), source)
    return layer.unpack()


@pytest.mark.parametrize("dtype", kernels.FORMATS)
def test_a_weight_takes_the_bytes_that_resolving_counts_on(dtype):
    size = LIBRARY.hw_packed_bytes(kernels.FORMATS[dtype], NUM_OUTPUTS, NUM_INPUTS)
    assert size == NUM_OUTPUTS * NUM_INPUTS * _WEIGHT_BYTES[dtype]


def test_bf16_rounds_as_torch_does():
    rows = some_rows()
    special = [0.0, -0.0, 1e-40, -1e-42, 3.39e38, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan]
    rows[0, : len(special)] = special
    # Halfway between two neighbours, and a little to either side; the upper or lower is even.
    bits = np.array([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0xBF808000], dtype=np.uint32)
    rows[1, : len(bits)] = bits.view(np.float32)
    np.testing.assert_array_equal(packed(rows, "bf16"), bf16(rows))
    assert np.signbit(packed(rows, "bf16")[0, 1])


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_fp32_is_quantized_by_the_rule(dtype):
    rows = some_rows()
    actual = packed(rows, dtype)
    np.testing.assert_array_equal(actual, bf16(quantized(rows, dtype)))
    # Half a step; that the scale and the offset are fp16 and the result is bf16 comes on top.
    scale, offset = scales_of(rows, dtype)
    size = np.abs(rows.reshape(-1, 32))
    allowed = 0.5 * scale + 2.0**-10 * np.abs(offset) + 2.0**-8 * size + 1e-7
    assert (np.abs((actual - rows).reshape(-1, 32)) <= allowed).all()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_weights_beyond_fp16_scales_stay_within_range(dtype):
    rows = np.full((16, 32), 1e-9, dtype=np.float32)
    rows[0] = np.linspace(-1e30, 1e30, 32)
    rows[1] = np.linspace(-1e-4, 1e-4, 32)
    actual = packed(rows, dtype, num_inputs=32)
    assert np.isfinite(actual).all()
    assert np.abs(actual[1] - rows[1]).max() < 1e-5
    assert np.abs(actual[2:]).max() < 1e-7


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("dtype", kernels.FORMATS)
def test_blocks_of_a_file_are_kept_to_the_last_bit_or_become_what_their_values_would(kind, dtype):
    blocks = blocks_of(some_rows(), kind)
    expected = values_of(blocks, kind)
    is_kept = (kind[:2], dtype) in (("Q4", "int4"), ("Q8", "int8"))
    if dtype != "bf16" and not is_kept:
        expected = quantized(expected, dtype)
    np.testing.assert_array_equal(packed(blocks, dtype, kind), bf16(expected))


def test_every_number_of_a_block_has_its_own_place():
    draw = np.random.default_rng(1)
    for kind, size in (("Q4_0", 18), ("Q4_1", 20), ("Q8_0", 34)):
        blocks = draw.integers(0, 256, size=(32, 2 * size), dtype=np.uint8)
        blocks = blocks.reshape(-1, size)
        blocks[:, 1] = blocks[:, 1] & 0x83 | 0x20  # a scale that is no infinity
        if kind == "Q4_1":
            blocks[:, 3] = blocks[:, 3] & 0x83 | 0x20
        blocks = blocks.reshape(32, -1)
        dtype = "int8" if kind == "Q8_0" else "int4"
        expected = bf16(values_of(blocks, kind))
        np.testing.assert_array_equal(packed(blocks, dtype, kind, 64), expected)


@pytest.mark.parametrize("dtype", kernels.FORMATS)
@pytest.mark.parametrize(("sizes", "by_turns"), [((64, 32, 32), False), ((48, 48), True)])
def test_merged_layers_keep_their_rows(dtype, sizes, by_turns):
    rows = some_rows(sum(sizes))
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    columns = _columns(sizes, by_turns)
    assert sorted(np.concatenate(columns)) == list(range(sum(sizes)))
    layer = Packed(dtype, sum(sizes), NUM_INPUTS)
    for part, outputs in zip(parts, columns, strict=True):
        layer.pack(part, outputs.tolist())
    for part, outputs in zip(parts, columns, strict=True):
        expected = bf16(part if dtype == "bf16" else quantized(part, dtype))
        np.testing.assert_array_equal(layer.unpack(outputs.tolist()), expected)


def test_by_turns_means_a_panel_of_each():
    first, second = _columns([32, 32], by_turns=True)
    assert first.tolist() == [*range(16), *range(32, 48)]
    assert second.tolist() == [*range(16, 32), *range(48, 64)]


@pytest.mark.parametrize("dtype", kernels.FORMATS)
def test_outputs_in_any_order_do_not_touch_each_other(dtype):
    rows = some_rows()
    order = np.random.default_rng(2).permutation(NUM_OUTPUTS)
    layer = Packed(dtype, NUM_OUTPUTS, NUM_INPUTS)
    for row, output in zip(rows, order, strict=True):
        layer.pack(row[None], [int(output)])
    np.testing.assert_array_equal(layer.unpack(order.tolist()), packed(rows, dtype))
