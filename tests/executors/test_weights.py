from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.support.random_gguf import add_shapes, write_random
from headway.errors import ConfigError, ModelLoadError
from headway.executors.cpu.compiled import CompiledModel
from headway.executors.load import ModelOptions, facts_of, open_checkpoint
from headway.executors.source import ModelSource, locate
from headway.executors.spec import ModelSpec, TensorScaling
from headway.executors.step_model import Span
from headway.executors.torch.eager import load_decoder
from headway.executors.weights.formats import num_int8_parameters, packed_dtype, quantization
from headway.executors.weights.ggml_types import GGML_TYPES
from headway.executors.weights.gguf import _GLOBAL_NAMES, _LAYER_NAMES
from headway.executors.weights.names import EMBEDDING, HEAD
from headway.gguf_header import read_header
from tests.faults.model_mutate import BIASES, GgufFile, gguf_model
from tests.support.tiny import CONFIG, MemoryCheckpoint, tiny_spec, tiny_weights

CPU = torch.device("cpu")


def write_folder(folder: Path, weights: dict[str, torch.Tensor], num_shards: int = 1) -> str:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if num_shards == 1:
        save_file(weights, folder / "model.safetensors")
        return str(folder)
    names = list(weights)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard}.safetensors"
        save_file({name: weights[name] for name in names[shard::num_shards]}, folder / file)
        weight_map |= dict.fromkeys(names[shard::num_shards], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return str(folder)


def neighbours(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Row order of llama GGUF files: a head's rows i and i + half side by side."""
    rows = []
    for head in weight.view(num_heads, -1, *weight.shape[1:]):
        half = len(head) // 2
        rows += [head[i + part * half] for i in range(half) for part in range(2)]
    return torch.stack(rows)


def write_gguf(
    path: Path, spec: ModelSpec, weights: dict[str, torch.Tensor], architecture: str = "llama"
) -> str:
    writer = gguf.GGUFWriter(path, architecture)
    add_shapes(writer, spec)
    writer.add_token_list([f"token {i}" for i in range(spec.vocab_size)])
    writer.add_token_scores([0.5] * spec.vocab_size)
    short = {name: key for key, name in _LAYER_NAMES.items()}
    globals_ = {name: key for key, name in _GLOBAL_NAMES.items()}
    for name, tensor in weights.items():
        stored = tensor
        if architecture == "llama" and "q_proj" in name:
            stored = neighbours(tensor, spec.num_heads)
        elif architecture == "llama" and "k_proj" in name:
            stored = neighbours(tensor, spec.num_kv_heads)
        key = globals_.get(name)
        if key is None:
            _, _, layer, rest = name.split(".", 3)
            module, kind = rest.rsplit(".", 1)
            key = f"blk.{layer}.{short[module]}.{kind}"
        values = stored.contiguous().numpy()
        if key == "output.weight":
            values = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(key, values, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        elif "ffn_down.weight" in key:
            writer.add_tensor(key, values.astype(np.float16))
        else:
            writer.add_tensor(key, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_safetensors_folder(tmp_path, num_shards):
    weights = tiny_weights(tiny_spec())
    checkpoint = open_checkpoint(locate(write_folder(tmp_path, weights, num_shards)))
    assert checkpoint.spec == tiny_spec()
    assert set(checkpoint.shapes()) == set(weights)
    assert all(np.array_equal(checkpoint.read(name), weights[name]) for name in weights)
    seen: list[tuple[int, int]] = []
    load_decoder(checkpoint, "bf16", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(weights)) for done in range(1, len(weights) + 1)]


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("way", ["absolute", "../outside/x.safetensors", "sub/../x.safetensors"])
def test_a_shard_outside_the_folder_is_refused(tmp_path, way):
    inside, outside = tmp_path / "model", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    weights = tiny_weights(tiny_spec())
    write_folder(inside, weights)
    save_file(weights, outside / "x.safetensors")
    shard = str(outside / "x.safetensors") if way == "absolute" else way
    write_index(inside, dict.fromkeys(weights, shard))
    with pytest.raises(ModelLoadError, match="must be the name of a file beside the index"):
        open_checkpoint(locate(str(inside)))


def test_a_link_out_of_the_folder_is_refused_except_to_blobs_of_the_hub(tmp_path):
    weights = tiny_weights(tiny_spec())
    outside = tmp_path / "elsewhere.safetensors"
    save_file(weights, outside)
    plain, snapshot = tmp_path / "plain", tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    blobs = snapshot.parent.parent / "blobs"
    for folder in (plain, snapshot, blobs):
        folder.mkdir(parents=True)
    save_file(weights, blobs / "abc")
    for folder in (plain, snapshot):
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "model.safetensors").symlink_to(outside)
        with pytest.raises(ModelLoadError, match="outside the model's folder"):
            open_checkpoint(locate(str(folder)))
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/abc"))
    assert open_checkpoint(locate(str(snapshot))).shapes().keys() == set(weights)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 1}, {"a": ""}, {"a": ".."}])
def test_an_index_that_makes_no_sense_is_named(tmp_path, weight_map):
    write_folder(tmp_path, tiny_weights(tiny_spec()))
    write_index(tmp_path, weight_map)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(locate(str(tmp_path)))


def test_a_tensor_that_is_missing_is_named_with_its_file(tmp_path):
    weights = tiny_weights(tiny_spec())
    write_folder(tmp_path, weights, num_shards=2)
    checkpoint = open_checkpoint(locate(str(tmp_path)))
    with pytest.raises(ModelLoadError, match=f"no tensor model.nothing in {tmp_path}"):
        checkpoint.read("model.nothing")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    write_index(tmp_path, {**index, "model.nothing": "model-1.safetensors"})
    with pytest.raises(ModelLoadError, match=r"model\.nothing is in model-1\.safetensors"):
        open_checkpoint(locate(str(tmp_path)))
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="JSON object"):
        open_checkpoint(locate(str(tmp_path)))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_gguf_round_trip(tmp_path, architecture):
    spec = tiny_spec(architecture=architecture, has_qkv_bias=True)
    weights = tiny_weights(spec)
    path = write_gguf(tmp_path / "tiny.gguf", spec, weights, architecture)
    checkpoint = open_checkpoint(locate(path))
    assert set(checkpoint.shapes()) == set(weights)
    for field in ("num_layers", "num_kv_heads", "head_dim", "vocab_size", "has_qkv_bias"):
        assert getattr(checkpoint.spec, field) == getattr(spec, field)
    for name, expected in weights.items():
        tolerance = 1e-2 if name == "lm_head.weight" else 1e-3 if "down_proj" in name else 0.0
        np.testing.assert_allclose(checkpoint.read(name), expected, atol=tolerance, rtol=0)
    load_decoder(checkpoint, "fp32")


def test_gguf_rope_factors_and_tied_embeddings(tmp_path):
    spec = tiny_spec(tie_embeddings=True, rope_scaling=TensorScaling())
    path = write_gguf(tmp_path / "tiny.gguf", spec, tiny_weights(spec))
    checkpoint = open_checkpoint(locate(path))
    assert checkpoint.spec.tie_embeddings
    assert checkpoint.spec.rope_scaling == TensorScaling()
    load_decoder(checkpoint, "fp32")


def test_our_gguf_header_agrees_with_the_package(tmp_path):
    spec = tiny_spec()
    path = write_gguf(tmp_path / "tiny.gguf", spec, tiny_weights(spec))
    checkpoint = open_checkpoint(locate(path))
    reader = gguf.GGUFReader(path)
    assert len(reader.tensors) == len(checkpoint.shapes())
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    ours = checkpoint.read("model.embed_tokens.weight")
    assert np.array_equal(ours, embedding.data)


def test_our_ggml_types_are_those_of_the_package():
    of_package = {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType
    }
    assert of_package == GGML_TYPES


def test_missing_extra_and_misshapen_tensors_are_named():
    spec = tiny_spec()
    weights = tiny_weights(spec)
    lacking = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
    with pytest.raises(ModelLoadError, match=r"lacks tensors model\.norm\.weight"):
        load_decoder(MemoryCheckpoint(spec, lacking), "fp32")
    with pytest.raises(ModelLoadError, match=r"unexpected tensors adapter\.weight"):
        load_decoder(MemoryCheckpoint(spec, {**weights, "adapter.weight": torch.ones(1)}), "fp32")
    bent = {**weights, "model.norm.weight": torch.ones(7)}
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \[7\].*\[32\]"):
        load_decoder(MemoryCheckpoint(spec, bent), "fp32")


def test_a_long_list_of_names_is_cut():
    with pytest.raises(ModelLoadError, match=r"and \d+ more"):
        load_decoder(MemoryCheckpoint(tiny_spec(), {}), "fp32")


def test_repeated_head_and_rotary_buffers_are_not_extra(tmp_path):
    weights = tiny_weights(tiny_spec(tie_embeddings=True))
    stored = {
        **weights,
        "lm_head.weight": weights["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    folder = write_folder(tmp_path, stored)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    assert set(open_checkpoint(locate(folder)).shapes()) == set(weights)


@pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF\x09\x00\x00\x00" + bytes(16)])
def test_broken_gguf(tmp_path, content):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match="not a readable GGUF file"):
        open_checkpoint(locate(str(path)))


def test_truncated_gguf(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_spec(), tiny_weights(tiny_spec()))
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(ModelLoadError, match="truncated"):
        open_checkpoint(locate(str(path)))


def test_folder_without_weights_or_config(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        open_checkpoint(locate(str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelLoadError, match="safetensors"):
        open_checkpoint(locate(str(tmp_path)))
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ModelLoadError, match="cannot read"):
        open_checkpoint(locate(str(tmp_path)))


def test_names_that_lead_nowhere(tmp_path, monkeypatch):
    with pytest.raises(ModelLoadError, match="no such file"):
        locate(str(tmp_path / "nowhere"))
    with pytest.raises(ModelLoadError, match="neither a file"):
        locate("not//an id")
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"not a \.gguf file"):
        locate(str(tmp_path / "model.bin"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match=r"cannot be downloaded.*give the path"):
        locate("headway-tests/no-such-model")


def test_unknown_dtype():
    with pytest.raises(ConfigError, match="fp32, bf16"):
        load_decoder(MemoryCheckpoint(tiny_spec(), {}), "int3")


def test_heads_that_are_not_all_there(tmp_path):
    spec = tiny_spec()
    weights = tiny_weights(spec)
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = weights[name][: len(weights[name]) // 2]
    checkpoint = open_checkpoint(locate(write_gguf(tmp_path / "tiny.gguf", spec, weights)))
    with pytest.raises(ModelLoadError, match=r"q_proj.weight has shape \[16, 32\]"):
        load_decoder(checkpoint, "fp32")


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("Q4_1", "int4"),
        ("Q4_0 Q4_1", "int4"),
        ("Q4_K Q6_K", "int4"),
        ("Q4_0 Q8_0", "int4"),
        ("Q5_K Q6_K", "int8"),
        ("IQ4_XS", "int8"),
        ("Q4_0 F16", None),
        ("BF16", None),
        ("", None),
    ],
)
def test_four_bits_are_chosen_for_blocks_that_stay_as_they_are(kinds: str, expected: str | None):
    named = {f"model.layers.{at}.mlp.up_proj.weight": k for at, k in enumerate(kinds.split())}
    assert quantization({**named, EMBEDDING: "F32"}) == expected


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("Q4_K", "int4"),
        ("Q4_K Q4_0 Q4_1", "int4"),
        ("Q4_K Q4_K Q6_K", "int8"),
        ("Q5_0", "int8"),
        ("Q8_0", "int8"),
        ("IQ4_XS", "int8"),
        ("F16", "int4"),
        ("Q4_K BF16", "int4"),
    ],
)
def test_int4_holds_only_what_loses_nothing_or_was_asked_for(kinds: str, expected: str):
    parts = {f"part {at}": kind for at, kind in enumerate(kinds.split())}
    assert packed_dtype("int4", [*parts], parts) == expected
    assert packed_dtype("int8", [*parts], parts) == "int8"
    assert packed_dtype("bf16", [*parts], parts) == "bf16"


@pytest.mark.parametrize(
    ("kind", "expected"), [("Q4_K", "int4"), ("Q6_K", "int8"), ("F16", "int8")]
)
def test_tables_are_int4_only_if_the_file_has_them_so(kind: str, expected: str):
    assert packed_dtype("int4", [EMBEDDING], {EMBEDDING: kind}) == expected
    assert packed_dtype("int4", [HEAD], {HEAD: kind}) == expected


def test_the_parameters_in_int8_are_counted():
    spec = tiny_spec()  # tables of 61 x 32; q, k and v have 32, 16 and 16 rows
    assert num_int8_parameters(spec, {}) == 2 * 61 * 32
    wide = {"model.layers.1.self_attn.v_proj.weight": "Q6_K", EMBEDDING: "Q4_K"}
    assert num_int8_parameters(spec, wide) == 61 * 32 + (32 + 16 + 16) * 32


# ------------------------------------------------------------------ files in several parts

PARTED = tiny_spec(hidden_size=64, intermediate_size=96, head_dim=32, vocab_size=48)


def write_parts(folder: Path) -> list[Path]:
    write_random(folder / "model.gguf", PARTED, "Q8_0", part_tensors=8)
    return sorted(folder.glob("model-*.gguf"))


def rewrite(path: Path, key: str, value: int) -> None:
    """Change a number of 16 bits in the metadata."""
    data = path.read_bytes()
    at = data.index(key.encode()) + len(key) + 4
    path.write_bytes(data[:at] + value.to_bytes(2, "little") + data[at + 2 :])


def test_a_model_in_several_parts_is_read_as_one(tmp_path):
    parts = write_parts(tmp_path)
    assert len(parts) == 3
    checkpoint = open_checkpoint(locate(str(parts[0])))
    assert checkpoint.source is not None
    assert [*checkpoint.source.files] == parts
    whole = open_checkpoint(locate(str(write_random(tmp_path / "whole.gguf", PARTED, "Q8_0"))))
    assert checkpoint.spec == whole.spec
    assert checkpoint.shapes() == whole.shapes()
    for name in whole.shapes():
        assert np.array_equal(checkpoint.read(name), whole.read(name))


def test_a_missing_part_is_named(tmp_path):
    parts = write_parts(tmp_path)
    parts[1].unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003\.gguf is missing"):
        open_checkpoint(locate(str(parts[0])))


def test_another_part_than_the_first_is_refused(tmp_path):
    parts = write_parts(tmp_path)
    with pytest.raises(ModelLoadError, match=r"give model-00001-of-00003\.gguf"):
        open_checkpoint(locate(str(parts[1])))
    parts[0].rename(tmp_path / "other.gguf")
    with pytest.raises(ModelLoadError, match="one of 3 parts, but its name"):
        open_checkpoint(locate(str(tmp_path / "other.gguf")))


@pytest.mark.parametrize(
    ("part", "key", "value", "words"),
    [
        (1, "split.no", 2, "split.no is 2, not 1"),
        (2, "split.count", 4, "split.count is 4, not 3"),
        (0, "split.count", 4, "its name"),
        (0, "split.count", 60_000, "its name"),
        (0, "split.no", 1, "not the first part"),
        (0, "split.tensors.count", 7, "tensors, not 7"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(tmp_path, part, key, value, words):
    parts = write_parts(tmp_path)
    rewrite(parts[part], key, value)
    with pytest.raises(ModelLoadError, match=words):
        open_checkpoint(locate(str(parts[0])))


def test_a_part_of_another_model_is_refused(tmp_path):
    parts = write_parts(tmp_path)
    count = {"split.no": 1, "split.count": 3}
    writer = gguf.GGUFWriter(parts[1], "qwen2")
    for key, value in count.items():
        writer.add_uint16(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="another architecture"):
        open_checkpoint(locate(str(parts[0])))


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    parts = write_parts(tmp_path)
    data = parts[1].read_bytes()
    rewrite(parts[1], "split.no", 2)
    parts[1].rename(parts[2])
    parts[1].write_bytes(data)
    total = len(read_header(parts[0]).tensors) + 2 * len(read_header(parts[1]).tensors)
    rewrite(parts[0], "split.tensors.count", total)
    with pytest.raises(ModelLoadError, match="there twice"):
        open_checkpoint(locate(str(parts[0])))


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_a_folder_of_bf16_is_packed_as_its_values_are(tmp_path, dtype):
    weights = {name: values.bfloat16() for name, values in tiny_weights(PARTED).items()}
    save_file(weights, tmp_path / "model.safetensors")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "vocab_size": 48}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **sizes}))
    checkpoint = open_checkpoint(locate(str(tmp_path)))
    assert facts_of(checkpoint).quantization is None
    plain = MemoryCheckpoint(checkpoint.spec, {n: v.float() for n, v in weights.items()})
    options = ModelOptions(
        dtype=dtype, num_blocks=2, block_size=16, max_model_len=32, kernels="plain"
    )
    spans = [Span(range(16), 0, [0])]
    stored, values = (
        CompiledModel(one, options).logits(spans, range(16)) for one in (checkpoint, plain)
    )
    assert np.array_equal(stored, values)


# ------------------------------------------------------------------ files from a stranger


def changed_gguf(tmp_path: Path, change: Callable[[GgufFile], object]) -> ModelSource:
    file = gguf_model("llama", "Q8_0", BIASES)
    change(file)
    (tmp_path / "changed.gguf").write_bytes(file.encode())
    return locate(str(tmp_path / "changed.gguf"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda file: file.tensors.append(file.tensors[-1]), "repeated"),
        (lambda file: file.metadata.append(file.metadata[-1]), "repeated"),
        (lambda file: file.tensors[0].dims.insert(0, 0), "no rows of whole Q8_0 blocks"),
        (lambda file: file.tensors[0].dims.__setitem__(1, 63), "no rows of whole Q8_0 blocks"),
        (lambda file: file.tensors[0].dims.clear(), "no rows of whole"),
        (lambda file: setattr(file.tensors[1], "type_id", 8), "a vector of Q8_0"),
        (lambda file: setattr(file.tensors[1], "name", "model.embed_tokens.weight"), "two names"),
        (lambda file: setattr(file.tensors[1], "dims", [2**32, 2**32]), "truncated"),
        (lambda file: setattr(file.tensors[1], "offset", 2**63), "truncated"),
    ],
)
def test_gguf_tensors_that_contradict_themselves_are_refused(tmp_path, change, words):
    with pytest.raises(ModelLoadError, match=words):
        open_checkpoint(changed_gguf(tmp_path, change))


def test_a_size_that_no_tensor_has_is_refused_before_it_is_allocated(tmp_path):
    def widen(file: GgufFile) -> None:
        file.metadata = [
            (key, kind, 2**31 - 32 if key.endswith("feed_forward_length") else value)
            for key, kind, value in file.metadata
        ]

    checkpoint = open_checkpoint(changed_gguf(tmp_path, widen))
    options = ModelOptions(dtype="int8", num_blocks=1, block_size=16, max_model_len=16)
    with pytest.raises(ModelLoadError, match=r"gate_proj.weight has shape \[96, 64\]"):
        CompiledModel(checkpoint, options)


@pytest.mark.parametrize("content", ["[]", "3", "{", "[" * 100_000, '{"a":' * 100_000])
def test_json_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        open_checkpoint(locate(str(tmp_path)))


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/hostname", "", ".", "a\0b", 5])
def test_an_index_names_files_of_its_folder_only(tmp_path, shard):
    weights = tiny_weights(tiny_spec())
    write_folder(tmp_path, weights)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, shard)}))
    with pytest.raises(ModelLoadError):
        open_checkpoint(locate(str(tmp_path)))
    for odd in ({}, {"weight_map": None}, {"weight_map": [1]}):
        index.write_text(json.dumps(odd))
        with pytest.raises(ModelLoadError, match="weight_map"):
            open_checkpoint(locate(str(tmp_path)))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    weights = tiny_weights(tiny_spec())
    write_folder(tmp_path, weights)
    save_file({"model.norm.weight": weights["model.norm.weight"]}, tmp_path / "more.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight is in"):
        open_checkpoint(locate(str(tmp_path)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_weights_that_are_no_real_numbers_are_refused(tmp_path, dtype):
    weights = tiny_weights(tiny_spec())
    weights["model.norm.weight"] = weights["model.norm.weight"].to(dtype)
    checkpoint = open_checkpoint(locate(write_folder(tmp_path, weights)))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight is stored as"):
        load_decoder(checkpoint, "fp32")
