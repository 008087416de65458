from __future__ import annotations

import pytest

from headway.errors import ModelLoadError
from headway.executors.spec import (
    LinearScaling,
    Llama3Scaling,
    TensorScaling,
    spec_from_config,
    spec_from_gguf,
)
from tests.support.tiny import CONFIG

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GGUF = {
    "general.architecture": "qwen3",
    "qwen3.block_count": 2,
    "qwen3.context_length": 256,
    "qwen3.embedding_length": 32,
    "qwen3.feed_forward_length": 48,
    "qwen3.attention.head_count": 4,
    "qwen3.attention.head_count_kv": 2,
    "qwen3.attention.key_length": 16,
    "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen3.rope.freq_base": 1e6,
    "tokenizer.ggml.tokens": ["a", "b", "c"],
}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    ],
)
def test_both_spellings_of_rope(rope):
    spec = spec_from_config({**CONFIG, **rope})
    assert spec.rope_theta == 5e5
    assert spec.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)


def test_older_name_of_the_rope_type():
    spec = spec_from_config({**CONFIG, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert spec.rope_scaling == LinearScaling(2.0)


def test_windows_by_family():
    mistral = {**CONFIG, "architectures": ["MistralForCausalLM"], "sliding_window": 9}
    assert spec_from_config(mistral).windows == (9, 9)
    assert spec_from_config({**mistral, "sliding_window": None}).windows == (None, None)
    qwen = {**CONFIG, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 9}
    assert spec_from_config(qwen).windows == (None, None)
    windowed = {**qwen, "use_sliding_window": True, "max_window_layers": 1}
    assert spec_from_config(windowed).windows == (None, 9)
    kinds = ["sliding_attention", "full_attention"]
    assert spec_from_config({**windowed, "layer_types": kinds}).windows == (9, None)


def test_facts_size_the_kv_store():
    facts = spec_from_config(CONFIG).facts
    assert facts.max_model_len == 128
    assert facts.kv_values_per_token == 2 * 2 * 2 * 8
    assert facts.num_parameters == 2 * (2 * 32 * (32 + 16) + 3 * 32 * 48) + 2 * 61 * 32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM"),
        ({"architectures": None}, "none named"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
    ],
)
def test_refusals_name_what_is_wrong(changes, words):
    with pytest.raises(ModelLoadError, match=words):
        spec_from_config({**CONFIG, **changes})


def test_gguf_metadata():
    spec = spec_from_gguf(GGUF, {"blk.0.attn_q_norm.weight", "output.weight"})
    assert (spec.vocab_size, spec.head_dim, spec.max_model_len) == (3, 16, 256)
    assert spec.has_qk_norm and not spec.tie_embeddings and not spec.has_qkv_bias
    assert spec_from_gguf(GGUF, {"rope_freqs.weight"}).rope_scaling == TensorScaling()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "gemma3"}, "gemma3.*llama, qwen2, qwen3"),
        ({"qwen3.expert_count": 8}, "experts"),
        ({"qwen3.rope.scaling.type": "yarn"}, "yarn"),
        ({"qwen3.rope.dimension_count": 8}, "dimension_count"),
        ({"qwen3.block_count": None}, "block_count"),
    ],
)
def test_gguf_refusals_name_what_is_wrong(changes, words):
    with pytest.raises(ModelLoadError, match=words):
        spec_from_gguf({**GGUF, **changes}, set())


ODD = (True, "64", [64], {"a": 1}, -64, 0.5, float("nan"), 2**31, 2**63)
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "head_dim")


@pytest.mark.parametrize("key", [*SIZES, "max_position_embeddings", "num_key_value_heads"])
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_sizes_of_another_type_or_range_are_refused(key, value):
    with pytest.raises(ModelLoadError, match=f"'{key}' of the model's configuration must be"):
        spec_from_config({**CONFIG, key: value})


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
@pytest.mark.parametrize("value", ["1", [1.0], 0, -1.0, float("nan"), float("inf"), 10**400])
def test_numbers_of_another_type_or_range_are_refused(key, value):
    with pytest.raises(ModelLoadError, match=f"'{key}' of the model's configuration"):
        spec_from_config({**CONFIG, key: value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": 3}, "list of strings"),
        ({"architectures": [3]}, "list of strings"),
        ({"rope_scaling": "linear"}, "not a mapping"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks 'factor'"),
        ({"rope_scaling": {"rope_type": ["x"]}}, "unsupported rope scaling"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "above"),
        ({"quantization_config": "gptq"}, "not a mapping"),
        ({"num_hidden_layers": 2**30}, "more than the 4096"),
        ({"hidden_size": 3, "head_dim": None}, "4 attention heads do not fit"),
    ],
)
def test_fields_of_another_type_are_refused(changes, words):
    with pytest.raises(ModelLoadError, match=words):
        spec_from_config({**CONFIG, **changes})


def test_layer_types_name_every_layer():
    windowed = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9}
    windowed |= {"use_sliding_window": True, "layer_types": ["full_attention"]}
    with pytest.raises(ModelLoadError, match="names 1 layers of 2"):
        spec_from_config({**CONFIG, **windowed})


@pytest.mark.parametrize("value", [*ODD, 0], ids=repr)
def test_gguf_sizes_of_another_type_or_range_are_refused(value):
    with pytest.raises(ModelLoadError, match="'embedding_length' of the model's configuration"):
        spec_from_gguf({**GGUF, "qwen3.embedding_length": value}, set())


def test_a_gguf_vocabulary_of_another_type_is_refused():
    with pytest.raises(ModelLoadError, match="list of strings"):
        spec_from_gguf({**GGUF, "tokenizer.ggml.tokens": 3}, set())
