"""Packed weights: their values, against the rules written out in numpy, and models over them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from benchmarks.support.random_gguf import quantize, write_random
from headway.clock import SystemClock
from headway.config import load_config
from headway.core.params import SamplingParams
from headway.core.plan import BlockCopy, Failure, Sample, ScheduledRequest
from headway.errors import ModelLoadError
from headway.executors.cpu import kernels, packing
from headway.executors.cpu.compiled import CompiledModel
from headway.executors.cpu.packing import _Place, _places
from headway.executors.load import ModelExecutor, ModelLoading, ModelOptions
from headway.executors.step_model import Span
from headway.executors.weights import Checkpoint, Stored, StoredRows, facts_of
from headway.executors.weights.gguf import GgufCheckpoint
from headway.executors.weights.names import EMBEDDING, HEAD
from headway.resolve import WEIGHT_BYTES, Hardware, resolve, weight_bytes
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
BLOCKS = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}
"""Bytes of each kind of 32 weights."""
K_BLOCKS = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
"""Bytes of each kind of 256 weights."""
KEPT = {"int4": ("Q4_0", "Q4_1", "Q4_K"), "int8": ("Q4_0", "Q5_0", "Q8_0"), "bf16": ()}
NUM_OUTPUTS, NUM_INPUTS = 48, 256
WHOLE = _Place(0, 1)


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

    def pack(self, rows: np.ndarray, place: _Place = WHOLE, source: str = "F32") -> None:
        rows = np.ascontiguousarray(rows)
        described = kernels.Rows(
            rows.ctypes.data, len(rows), self.linear.num_inputs, kernels.SOURCES[source], 0
        )
        LIBRARY.hw_pack(
            self.data.data_ptr(), self.kind, described, place.first_panel, place.panel_step
        )

    def unpack(self, outputs: Sequence[int] | None = None) -> np.ndarray:
        outputs = range(self.linear.num_outputs) if outputs is None else outputs
        rows = np.empty((len(outputs), self.linear.num_inputs), dtype=np.float32)
        for row, output in zip(rows, outputs, strict=True):
            LIBRARY.hw_unpack(self.linear, output, row.ctypes.data)
        return rows


def packed(rows: np.ndarray, dtype: str, source: str = "F32", num_inputs: int = NUM_INPUTS):
    layer = Packed(dtype, len(rows), num_inputs)
    layer.pack(rows, source=source)
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


def expected_of(blocks: np.ndarray, kind: str, dtype: str) -> np.ndarray:
    """What blocks become in `dtype`, before bf16 rounds it."""
    values = values_of(blocks, kind)
    if kind == "Q4_K" and dtype == "int4":
        return with_half_scales(blocks).reshape(values.shape)
    return values if dtype == "bf16" or kind in KEPT[dtype] else quantized(values, dtype)


def with_half_scales(blocks: np.ndarray) -> np.ndarray:
    """Q4_K, with the scale and the offset of each 32 weights rounded to fp16."""
    one = blocks.reshape(-1, 144)
    units = one[:, :4].copy().view(np.float16).astype(np.float32)
    scales, lows = gguf.quants.Q4_K.get_scale_min(one[:, 4:16].copy())
    scale = (units[:, :1] * scales).astype(np.float16).astype(np.float32)
    offset = (-units[:, 1:] * lows).astype(np.float16).astype(np.float32)
    halves = one[:, 16:].reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(2, 1) & 15
    return scale[:, :, None] * halves.reshape(-1, 8, 32) + offset[:, :, None]


@pytest.mark.parametrize("kind", [*BLOCKS, *K_BLOCKS])
@pytest.mark.parametrize("dtype", kernels.FORMATS)
def test_blocks_of_a_file_are_kept_to_the_last_bit_or_become_what_their_values_would(kind, dtype):
    blocks = quantize(some_rows(), kind)
    expected = expected_of(blocks, kind, dtype)
    np.testing.assert_array_equal(packed(blocks, dtype, kind), bf16(expected))


@pytest.mark.parametrize("kind", [*BLOCKS, *K_BLOCKS])
def test_every_bit_of_a_block_has_its_own_meaning(kind):
    draw = np.random.default_rng(1)
    size, per_row = (BLOCKS[kind], 8) if kind in BLOCKS else (K_BLOCKS[kind], 1)
    blocks = draw.integers(0, 256, size=(32 * per_row, size), dtype=np.uint8)
    halves = {"Q6_K": (209,), "Q4_0": (1,), "Q5_0": (1,), "Q8_0": (1,)}.get(kind, (1, 3))
    for at in halves:  # scales that are no infinity
        blocks[:, at] = blocks[:, at] & 0x83 | 0x20
    blocks = blocks.reshape(32, -1)
    for dtype in kernels.FORMATS:
        expected = bf16(expected_of(blocks, kind, dtype))
        np.testing.assert_array_equal(packed(blocks, dtype, kind), expected)


@pytest.mark.parametrize(
    ("kind", "dtype", "bound"),
    [
        # bf16 alone gives 1.7e-3. A second quantization to int8 would give Q4_K 5e-3.
        ("Q4_K", "int4", 2e-3),
        ("Q4_K", "int8", 6e-3),
        ("Q5_0", "int8", 2e-3),
        ("Q5_1", "int8", 6e-3),
        ("Q5_K", "int8", 6e-3),
        ("Q6_K", "int8", 6e-3),
        ("Q8_0", "int8", 2e-3),
    ],
)
def test_what_packing_adds_is_small_beside_the_quantization_of_the_file(kind, dtype, bound):
    values = np.random.default_rng(3).normal(size=(64, NUM_INPUTS)).astype(np.float32) / 50
    blocks = quantize(values, kind)
    stored = values_of(blocks, kind)
    added = np.sqrt(np.mean((packed(blocks, dtype, kind) - stored) ** 2)) / values.std()
    of_file = np.sqrt(np.mean((stored - values) ** 2)) / values.std()
    assert added < bound
    assert kind == "Q8_0" or added < of_file / 3


@pytest.mark.parametrize("dtype", kernels.FORMATS)
def test_half_numbers_become_what_their_values_would(dtype):
    rows = some_rows()
    halves = rows.astype(np.float16)
    wide = halves.astype(np.float32)
    np.testing.assert_array_equal(packed(halves, dtype, "F16"), packed(wide, dtype))
    brief = bf16(rows)
    top = (brief.view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(packed(top, dtype, "BF16"), packed(brief, dtype))


def test_special_half_numbers_stay_what_they_are():
    rows = np.zeros((16, 32), dtype=np.float16)
    special = [0.0, -0.0, 6e-8, -6e-8, 6e-5, 65504, -65504, np.inf, -np.inf, np.nan]
    rows[0, : len(special)] = special
    expected = bf16(rows.astype(np.float32))
    np.testing.assert_array_equal(packed(rows, "bf16", "F16", 32), expected)
    assert np.signbit(packed(rows, "bf16", "F16", 32)[0, 1])


@pytest.mark.parametrize("kind", [*BLOCKS, *K_BLOCKS])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_scale_that_is_no_number_spoils_its_own_weights_only(kind, dtype):
    blocks = quantize(some_rows(), kind).reshape(NUM_OUTPUTS, -1)
    size = BLOCKS.get(kind) or K_BLOCKS[kind]
    at = 208 if kind == "Q6_K" else 0
    expected = packed(blocks, dtype, kind)
    blocks[5, at : at + 2] = 0xFF
    actual = packed(blocks, dtype, kind)
    num_spoiled = 256 if kind in K_BLOCKS else 32
    assert size * NUM_INPUTS == blocks.shape[1] * num_spoiled
    assert np.isnan(actual[5, :num_spoiled]).all()
    actual[5, :num_spoiled] = expected[5, :num_spoiled]
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", kernels.FORMATS)
@pytest.mark.parametrize(("sizes", "is_interleaved"), [((64, 32, 32), False), ((48, 48), True)])
def test_merged_layers_keep_their_rows(dtype, sizes, is_interleaved):
    rows = some_rows(sum(sizes))
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    places = _places(sizes, is_interleaved)
    columns = [place.columns(size) for place, size in zip(places, sizes, strict=True)]
    assert sorted(np.concatenate(columns)) == list(range(sum(sizes)))
    layer = Packed(dtype, sum(sizes), NUM_INPUTS)
    for part, place in zip(parts, places, strict=True):
        layer.pack(part, place)
    for part, outputs in zip(parts, columns, strict=True):
        expected = bf16(part if dtype == "bf16" else quantized(part, dtype))
        np.testing.assert_array_equal(layer.unpack(outputs.tolist()), expected)


def test_interleaved_means_a_panel_of_each():
    first, second = _places([32, 32], is_interleaved=True)
    assert first.columns(32).tolist() == [*range(16), *range(32, 48)]
    assert second.columns(32).tolist() == [*range(16, 32), *range(48, 64)]


@pytest.mark.parametrize("dtype", kernels.FORMATS)
def test_panels_in_any_order_do_not_touch_each_other(dtype):
    rows = some_rows()
    layer = Packed(dtype, NUM_OUTPUTS, NUM_INPUTS)
    for panel in (2, 0, 1):
        layer.pack(rows[panel * 16 : panel * 16 + 16], _Place(panel, 1))
    np.testing.assert_array_equal(layer.unpack(), packed(rows, dtype))


@pytest.mark.parametrize("dtype", kernels.FORMATS)
def test_a_panel_that_is_not_full_is_packed_as_far_as_it_goes(dtype):
    rows = some_rows()
    layer = Packed(dtype, 21, NUM_INPUTS)
    layer.pack(rows[:21])
    np.testing.assert_array_equal(layer.unpack(), packed(rows, dtype)[:21])


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

    changed: dict[str, str] = field(default_factory=dict)

    def kinds(self) -> dict[str, str]:
        common = {name: "Q8_0" if name in (EMBEDDING, HEAD) else "Q4_1" for name in self.weights}
        return common | self.changed

    def read_stored(self, name: str, first: int, last: int) -> Stored:
        kind = self.kinds()[name]
        return Stored(kind, quantize(self.weights[name].numpy()[first:last], kind))


@every_isa
def test_kept_blocks_compute_as_their_values_do(isa):
    checkpoint = BlockCheckpoint(WIDE, weights_of(WIDE))
    assert isinstance(checkpoint, StoredRows)
    seen: list[tuple[int, int]] = []
    found = []
    for dtype in ("int4", "bf16"):
        options = ModelOptions(
            dtype=dtype, num_blocks=8, block_size=16, max_model_len=128, kernels=isa
        )
        model = CompiledModel(
            checkpoint, options, ModelLoading(progress=lambda *counts: seen.append(counts))
        )
        found.append(in_chunks(model, [40, 20, 10]))
    assert torch.equal(*found)
    assert seen == 2 * [(i + 1, len(checkpoint.weights)) for i in range(len(checkpoint.weights))]


MIXED = spec_of(hidden_size=256, intermediate_size=512, num_heads=8, num_kv_heads=2, vocab_size=64)


def load_compiled(checkpoint: Checkpoint, dtype: str, isa: str = "plain") -> CompiledModel:
    options = ModelOptions(
        dtype=dtype, num_blocks=8, block_size=16, max_model_len=128, kernels=isa, num_threads=2
    )
    return CompiledModel(checkpoint, options)


def linears_of(model: CompiledModel) -> list[kernels.CLinear]:
    struct = model._model
    layers = [struct.layers[at] for at in range(struct.num_layers)]
    found = [one for layer in layers for one in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return [*found, struct.embedding, struct.head]


def bytes_of(linear: kernels.CLinear) -> bytes:
    size = LIBRARY.hw_packed_bytes(linear.format, linear.num_outputs, linear.num_inputs)
    return ctypes.string_at(linear.data, size)


@every_isa
def test_a_file_of_several_types_has_a_format_for_each_matrix(isa, tmp_path):
    checkpoint = GgufCheckpoint(write_random(tmp_path / "mixed.gguf", MIXED, "Q4_K_M"))
    facts = facts_of(checkpoint)
    assert facts.quantization == "int4"
    model = load_compiled(checkpoint, "int4", isa)
    # The second layer has Q6_K in attn_v and ffn_down, and so has the head.
    int8, int4 = kernels.FORMATS["int8"], kernels.FORMATS["int4"]
    formats = [linear.format for linear in linears_of(model)]
    assert formats == [*(int4, int4, int4, int4), *(int8, int4, int4, int8), *(int4, int8)]
    assert sum(map(len, map(bytes_of, linears_of(model)))) == weight_bytes(facts, "int4")
    expected = in_chunks(load_compiled(checkpoint, "bf16", isa), [40, 20, 10])
    assert_close(in_chunks(model, [40, 20, 10]), expected)


@pytest.mark.parametrize("mixture", ["Q4_K_M", "Q5_0", "F16"])
@pytest.mark.parametrize("dtype", kernels.FORMATS)
def test_pieces_are_packed_as_the_whole_is(mixture, dtype, tmp_path, monkeypatch):
    checkpoint = GgufCheckpoint(write_random(tmp_path / "mixed.gguf", MIXED, mixture))
    whole = load_compiled(checkpoint, dtype)
    monkeypatch.setattr(packing, "_PIECE_WEIGHTS", 1)  # a panel each
    divided = load_compiled(checkpoint, dtype)
    assert [*map(bytes_of, linears_of(divided))] == [*map(bytes_of, linears_of(whole))]


@pytest.mark.parametrize("kind", ["F16", "TQ2_0"])
def test_other_types_are_packed_as_their_values_are_whoever_reads_them(kind, tmp_path):
    stored = GgufCheckpoint(write_random(tmp_path / "stored.gguf", MIXED, kind))
    assert (kind in kernels.SOURCES) == (kind == "F16")
    values = {name: torch.tensor(stored.read(name)) for name in stored.shapes()}
    for dtype in kernels.FORMATS:
        plain = load_compiled(MemoryCheckpoint(stored.spec, values), dtype)
        model = load_compiled(stored, dtype)
        assert [*map(bytes_of, linears_of(model))] == [*map(bytes_of, linears_of(plain))]


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
