"""Packed weights: their values, against the rules written out in numpy, and models over them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headway.clock import SystemClock
from headway.config import load_config
from headway.core.params import SamplingParams
from headway.core.plan import BlockCopy, Failure, Sample, ScheduledRequest
from headway.errors import ModelLoadError
from headway.executors.cpu import kernels
from headway.executors.cpu.compiled import CompiledModel
from headway.executors.cpu.packing import _columns
from headway.executors.load import LoadOptions, ModelExecutor, ModelOptions
from headway.executors.step_model import Span
from headway.executors.weights import Quantized, QuantizedRows
from headway.executors.weights.names import EMBEDDING, HEAD
from headway.resolve import WEIGHT_BYTES, Hardware, resolve
from tests.executors.cpu.test_compiled import (
    ISAS,
    SPECS,
    TABLE,
    TOKENS,
    WIDE,
    Case,
    assert_close,
    case_of,
    every_isa,
    in_chunks,
    logits_of,
    mixed_steps,
    poison,
    spec_of,
    weights_of,
)
from tests.executors.torch.test_executor import (
    GREEDY,
    PROMPT,
    first,
    generate,
    new,
    step,
    tokens_of,
)
from tests.support.tiny import MemoryCheckpoint

LIBRARY: Any = kernels.load_kernels()
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
        self.linear = kernels.CLinear(
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
    assert size == NUM_OUTPUTS * NUM_INPUTS * WEIGHT_BYTES[dtype]


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
    np.testing.assert_array_equal(actual[1:], bf16(quantized(rows[1:], dtype)))
    assert np.abs(actual[1:] - rows[1:]).max() < 1e-5


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
@pytest.mark.parametrize(("sizes", "is_interleaved"), [((64, 32, 32), False), ((48, 48), True)])
def test_merged_layers_keep_their_rows(dtype, sizes, is_interleaved):
    rows = some_rows(sum(sizes))
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    columns = _columns(sizes, is_interleaved)
    assert sorted(np.concatenate(columns)) == list(range(sum(sizes)))
    layer = Packed(dtype, sum(sizes), NUM_INPUTS)
    for part, outputs in zip(parts, columns, strict=True):
        layer.pack(part, outputs.tolist())
    for part, outputs in zip(parts, columns, strict=True):
        expected = bf16(part if dtype == "bf16" else quantized(part, dtype))
        np.testing.assert_array_equal(layer.unpack(outputs.tolist()), expected)


def test_interleaved_means_a_panel_of_each():
    first, second = _columns([32, 32], is_interleaved=True)
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


# ------------------------------------------------------------------- models


def test_the_wide_model_has_more_inputs_than_are_opened_at_a_time():
    header = (Path(__file__).parents[3] / "kernels/ops.h").read_text()
    (size,) = re.findall(r"PANEL_CHUNK = (\d+);", header)
    assert WIDE.hidden_size > int(size)


@every_isa
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantized_weights_are_close_to_what_they_stand_for(isa, dtype):
    case = case_of(SPECS["no groups, biases, llama3 rope"])
    rounded = {}
    for name, values in case.weights.items():
        kept = "int8" if name in (EMBEDDING, HEAD) else dtype
        is_packed = values.ndim == 2
        known = torch.from_numpy(quantized(values.numpy(), kept)) if is_packed else values
        rounded[name] = known.bfloat16().float()
    expected = mixed_steps(Case(case.spec, rounded).load(None, "fp32"))
    assert_close(mixed_steps(case.compiled(isa, dtype)), expected)


@dataclass
class BlockCheckpoint(MemoryCheckpoint):
    """Matrices as a GGUF file has them: Q4_1, or Q8_0 for the tables."""

    quantization = "int4"

    def read_quantized(self, name: str) -> Quantized:
        kind = "Q8_0" if name in (EMBEDDING, HEAD) else "Q4_1"
        values = self.weights[name].numpy()
        rows = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        return Quantized(kind, rows, values.shape)


@every_isa
def test_kept_blocks_compute_as_their_values_do(isa):
    checkpoint = BlockCheckpoint(WIDE, weights_of(WIDE))
    assert isinstance(checkpoint, QuantizedRows)
    seen: list[tuple[int, int]] = []
    found = []
    for dtype in ("int4", "bf16"):
        options = ModelOptions(
            dtype=dtype, num_blocks=8, block_size=16, max_model_len=128, kernels=isa
        )
        model = CompiledModel(
            checkpoint, options, LoadOptions(progress=lambda *counts: seen.append(counts))
        )
        found.append(in_chunks(model, [40, 20, 10]))
    assert torch.equal(*found)
    assert seen == 2 * [(i + 1, len(checkpoint.weights)) for i in range(len(checkpoint.weights))]


def test_blocks_of_another_shape_are_refused():
    weights = weights_of(WIDE)
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights[name][:-16].contiguous()
    options = ModelOptions(dtype="int4", num_blocks=8, block_size=16, max_model_len=128)
    with pytest.raises(ModelLoadError, match=r"down_proj.weight has shape \[592, 64\]"):
        CompiledModel(BlockCheckpoint(WIDE, weights), options)


# ------------------------------------------------------------------- around the model


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_blocks_have_the_bytes_that_resolving_counts_on(kv_dtype):
    spec = SPECS["odd heads, linear rope, windows"]
    settings = {"dtype": "bf16", "kv_cache_dtype": kv_dtype, "block_size": 48}
    machine = Hardware(num_cores=1, available_bytes=2**30, kernels="plain")
    choice = resolve(load_config(settings, environ={}), spec.facts, machine)
    model = case_of(spec).compiled("plain", kv_dtype=choice.kv_dtype, block_size=48)
    num_bytes = model._library.hw_block_bytes(model._model) * spec.num_layers
    assert choice.kv_cache_bytes == num_bytes * choice.num_blocks


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 48},
        {"intermediate_size": 80},
        {"head_dim": 48},
        {"head_dim": 160},
        {"vocab_size": 61},
    ],
)
def test_shapes_that_do_not_fit_are_refused_and_known_beforehand(changes):
    spec = spec_of(**changes)
    assert spec.facts.kernel_misfit and str(*changes.values()) in spec.facts.kernel_misfit
    with pytest.raises(ModelLoadError, match="cannot run this model"):
        case_of(spec).load("plain")


def test_options_that_cannot_be_met_are_refused():
    case = case_of(spec_of())
    assert case.spec.facts.kernel_misfit is None
    engine = ctypes.c_void_p()
    status = LIBRARY.hw_create(case.compiled("plain")._model, len(kernels.ISA), 1, engine)
    assert (status, engine.value) == (kernels.STATUSES["MISFIT"], None)
    with pytest.raises(ModelLoadError):
        case.load("plain", block_size=24)
    with pytest.raises(ModelLoadError):
        case.load("plain", num_threads=0)


def test_the_profile_starts_anew_when_it_is_read():
    model = case_of(spec_of()).compiled("plain")
    logits_of(model, Span(TOKENS, 0, TABLE))
    profile = model.profile()
    assert tuple(profile) == kernels.PARTS and profile["linear"] > 0
    assert not any(model.profile().values())


@pytest.fixture(params=ISAS, name="executor")
def make_executor(request) -> ModelExecutor:
    model = case_of(spec_of(windows=(None, 20))).compiled(request.param, "int4")
    return ModelExecutor(model, 256, SystemClock())


SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.5, max_tokens=50)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_resumed_request_draws_the_same_tokens(executor, params):
    whole = generate(executor, TOKENS, params, 40, seed=5)
    head = generate(executor, TOKENS, params, 13, seed=5)
    tail = generate(executor, (*TOKENS, *head), params, 27, seed=5, num_prompt=len(TOKENS))
    assert head + tail == whole


def test_batched_requests_agree_with_those_alone(executor):
    alone = {n: generate(executor, TOKENS[:n], GREEDY, 8) for n in (2, 40, 15)}
    known = {n: TOKENS[:n] for n in alone}
    scheduled = [first(str(n), TOKENS[:n], range(n, n + 4)) for n in alone]
    sampled = first("s", TOKENS[:9], [60], new=new(TOKENS[:9], SAMPLED))
    step(executor, sampled)
    for at in range(8):
        # Every other step somebody needs all the logits.
        company = [ScheduledRequest("s", 9 + at // 2, (1,), (), True)] * (at % 2)
        outputs = tokens_of(step(executor, *scheduled, *company))
        for n, token_id in zip(alone, outputs[: len(alone)], strict=True):
            known[n].append(token_id)
        scheduled = [
            ScheduledRequest(str(n), len(known[n]) - 1, (known[n][-1],), (), True) for n in alone
        ]
    assert {n: known[n][n:] for n in alone} == alone


def test_forks_and_failures(executor):
    (token_id,) = tokens_of(step(executor, first("a", blocks=(0,))))
    fork = ScheduledRequest("a#1", 6, (token_id,), (5,), True, new((*PROMPT, token_id), GREEDY))
    original = ScheduledRequest("a", 6, (token_id,), (), True)
    result = step(executor, original, fork, copies=(BlockCopy(0, 5),))
    assert isinstance(result.outcomes[0], Sample) and result.outcomes[0] == result.outcomes[1]
    poison(executor._model, [5])
    forked = ScheduledRequest("a#1", 7, (1,), (), True)
    healthy, failure = step(executor, ScheduledRequest("a", 7, (1,), (), True), forked).outcomes
    assert isinstance(healthy, Sample)
    assert isinstance(failure, Failure) and "not finite" in failure.message
