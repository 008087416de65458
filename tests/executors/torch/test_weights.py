from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headway.errors import ConfigError, ModelLoadError
from headway.executors.source import locate
from headway.executors.torch.load import load_decoder, open_checkpoint
from headway.executors.torch.spec import ModelSpec, TensorScaling
from headway.executors.torch.weights.gguf import _GLOBAL_NAMES, _LAYER_NAMES, GgufCheckpoint
from headway.gguf_header import TensorEntry
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
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_model_len)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(spec.rope_theta)
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
    assert checkpoint.names() == set(weights)
    assert all(torch.equal(checkpoint.read(name), weights[name]) for name in weights)
    seen: list[tuple[int, int]] = []
    load_decoder(checkpoint, "bf16", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, len(weights)) for done in range(1, len(weights) + 1)]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_gguf_round_trip(tmp_path, architecture):
    spec = tiny_spec(architecture=architecture, has_qkv_bias=True)
    weights = tiny_weights(spec)
    path = write_gguf(tmp_path / "tiny.gguf", spec, weights, architecture)
    checkpoint = open_checkpoint(locate(path))
    assert checkpoint.names() == set(weights)
    for field in ("num_layers", "num_kv_heads", "head_dim", "vocab_size", "has_qkv_bias"):
        assert getattr(checkpoint.spec, field) == getattr(spec, field)
    for name, expected in weights.items():
        tolerance = 1e-2 if name == "lm_head.weight" else 1e-3 if "down_proj" in name else 0.0
        torch.testing.assert_close(checkpoint.read(name), expected, atol=tolerance, rtol=0)
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
    assert len(reader.tensors) == len(checkpoint.names())
    embedding = next(tensor for tensor in reader.tensors if tensor.name == "token_embd.weight")
    ours = checkpoint.read("model.embed_tokens.weight")
    assert np.array_equal(ours.numpy(), embedding.data)


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
    assert open_checkpoint(locate(folder)).names() == set(weights)


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
    with pytest.raises(ModelLoadError, match="not one row a head"):
        load_decoder(checkpoint, "fp32")


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("Q4_1", "int4"),
        ("Q4_0 Q4_1", "int4"),
        ("Q4_K Q6_K", "int8"),
        ("Q4_0 Q8_0", "int8"),
        ("IQ4_XS", "int8"),
        ("Q4_0 F16", None),
        ("BF16", None),
    ],
)
def test_four_bits_are_chosen_for_blocks_that_stay_as_they_are(kinds: str, expected: str | None):
    checkpoint = GgufCheckpoint.__new__(GgufCheckpoint)
    checkpoint._tensors = {
        f"model.layers.{at}.mlp.up_proj.weight": TensorEntry(
            (64, 64), gguf.GGMLQuantizationType[kind].value, 0
        )
        for at, kind in enumerate(kinds.split())
    }
    checkpoint._tensors["token_embd.weight"] = TensorEntry((64, 64), 0, 0)
    assert checkpoint.quantization == expected
