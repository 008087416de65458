"""Shapes of a model: layers, heads, rotary positions, attention windows.

Read from a Hugging Face config.json or from GGUF metadata into one value. A model that the decoder
would not compute exactly is refused by name. Without tensors: sizes can be planned before torch is
imported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from headway.errors import ModelLoadError
from headway.executors.cpu import kernels
from headway.executors.fields import ModelFields
from headway.gguf_header import SkippedStrings
from headway.resolve import ModelFacts

HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Rotary scaling: one factor divides all frequencies."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rotary scaling of Llama 3: low frequencies divided, high ones unchanged, between
    interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


@dataclass(frozen=True, slots=True)
class TensorScaling:
    """Rotary scaling by the rope_freqs tensor: one divisor per frequency."""


RopeScaling = LinearScaling | Llama3Scaling | TensorScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes of a decoder; `windows` has one entry per layer, None for no limit."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    windows: tuple[int | None, ...]
    tie_embeddings: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.head_dim < 1:
            raise ModelLoadError(
                f"{self.num_heads} attention heads do not fit a hidden size of {self.hidden_size}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"rotary positions need an even head size, not {self.head_dim}")

    @property
    def facts(self) -> ModelFacts:
        """Facts for `resolve`; norms and biases are too small to count."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = 2 * self.hidden_size * (q_size + kv_size)
        mlp = 3 * self.hidden_size * self.intermediate_size
        num_tables = 1 if self.tie_embeddings else 2
        return ModelFacts(
            max_model_len=self.max_model_len,
            num_parameters=self.num_layers * (attention + mlp)
            + num_tables * self.vocab_size * self.hidden_size,
            kv_values_per_token=2 * self.num_layers * kv_size,
            kv_heads_per_token=2 * self.num_layers * self.num_kv_heads,
            kernel_misfit=self._kernel_misfit(),
        )

    def _kernel_misfit(self) -> str | None:
        sizes = {
            "hidden size": (self.hidden_size, kernels.GROUP),
            "inner size": (self.intermediate_size, kernels.GROUP),
            "head size": (self.head_dim, kernels.GROUP),
            "vocabulary": (self.vocab_size, kernels.TILE),
        }
        for name, (size, unit) in sizes.items():
            if size % unit:
                return f"{name} {size} is no multiple of {unit}"
        if self.head_dim > kernels.MAX_HEAD_DIM:
            return f"head size {self.head_dim} is above {kernels.MAX_HEAD_DIM}"
        return None


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a Hugging Face config.json, in either spelling of rotary positions."""
    fields = ModelFields(config)
    architecture = _hf_architecture(fields)
    _refuse_unsupported(fields)
    num_layers = _num_layers(fields, "num_hidden_layers")
    num_heads = fields.size("num_attention_heads")
    hidden_size = fields.size("hidden_size")
    max_model_len = fields.size("max_position_embeddings", 2048)
    theta, scaling = _hf_rope(fields, max_model_len)
    has_bias = bool(fields.raw("attention_bias")) and architecture in ("llama", "qwen3")
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.size("num_key_value_heads", num_heads),
        head_dim=fields.size("head_dim", hidden_size // num_heads),
        intermediate_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        max_model_len=max_model_len,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        windows=_hf_windows(fields, architecture, num_layers),
        tie_embeddings=bool(fields.raw("tie_word_embeddings")),
        has_qkv_bias=has_bias or architecture == "qwen2",
        has_o_bias=has_bias,
        has_mlp_bias=bool(fields.raw("mlp_bias")) and architecture == "llama",
        has_qk_norm=architecture == "qwen3",
    )


def _num_layers(fields: ModelFields, key: str) -> int:
    """Return the number of layers, bounded because names are made for each layer."""
    num_layers = fields.size(key)
    if num_layers > MAX_LAYERS:
        raise ModelLoadError(f"{num_layers} layers are more than the {MAX_LAYERS} supported")
    return num_layers


def _hf_architecture(fields: ModelFields) -> str:
    names = fields.strings("architectures")
    for name in names:
        if name in HF_ARCHITECTURES:
            return HF_ARCHITECTURES[name]
    found = ", ".join(names) or "none named"
    raise ModelLoadError(
        f"unsupported architecture ({found}); supported: {', '.join(HF_ARCHITECTURES)}"
    )


def _refuse_unsupported(fields: ModelFields) -> None:
    activation = fields.raw("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise ModelLoadError(f"unsupported hidden_act {activation!r}; supported: silu")
    if quantization := fields.part("quantization_config"):
        method = quantization.raw("quant_method") or "unknown"
        raise ModelLoadError(
            f"the checkpoint is quantized ({method}); use an unquantized one or a GGUF file"
        )


def _hf_rope(fields: ModelFields, max_len: int) -> tuple[float, RopeScaling | None]:
    rope = fields.part("rope_parameters") or fields.part("rope_scaling") or ModelFields({})
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    for partial in (rope.raw("partial_rotary_factor"), fields.raw("partial_rotary_factor")):
        if partial not in (None, 1.0):
            raise ModelLoadError(f"unsupported partial_rotary_factor {partial}; supported: 1.0")
    kind = rope.raw("rope_type") or rope.raw("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearScaling(rope.number("factor"))
    if kind == "llama3":
        original = rope.size("original_max_position_embeddings", max_len)
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if high <= low:
            raise ModelLoadError(
                f"rope high_freq_factor {high} must be above low_freq_factor {low}"
            )
        return theta, Llama3Scaling(rope.number("factor"), low, high, original)
    raise ModelLoadError(f"unsupported rope scaling {kind!r}; supported: default, linear, llama3")


def _hf_windows(fields: ModelFields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    window = fields.optional_size("sliding_window")
    if architecture == "llama" or window is None:
        return (None,) * num_layers
    if architecture == "mistral":
        return (window,) * num_layers
    if not fields.raw("use_sliding_window"):
        return (None,) * num_layers
    kinds = fields.strings("layer_types")
    if not kinds:
        first = fields.size("max_window_layers", num_layers)
        kinds = tuple(
            "sliding_attention" if layer >= first else "full_attention"
            for layer in range(num_layers)
        )
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise ModelLoadError(f"unsupported layer_types: {', '.join(sorted(unknown))}")
    if len(kinds) != num_layers:
        raise ModelLoadError(f"layer_types names {len(kinds)} layers of {num_layers}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def spec_from_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str]) -> ModelSpec:
    """Return the spec of GGUF metadata.

    Tied embeddings and biases are visible only in the tensor names.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelLoadError(
            f"unsupported GGUF architecture {architecture!r}; "
            f"supported: {', '.join(GGUF_ARCHITECTURES)}"
        )
    fields = ModelFields({key.removeprefix(f"{architecture}."): v for key, v in metadata.items()})
    if fields.raw("expert_count"):
        raise ModelLoadError(f"GGUF {architecture} with experts is not supported, only dense")
    num_layers = _num_layers(fields, "block_count")
    num_heads = fields.size("attention.head_count")
    hidden_size = fields.size("embedding_length")
    head_dim = fields.size("attention.key_length", hidden_size // num_heads)
    if fields.raw("rope.dimension_count") not in (None, head_dim):
        raise ModelLoadError("GGUF rope.dimension_count differs from the head size: unsupported")
    tokens = fields.raw("tokenizer.ggml.tokens")
    if isinstance(tokens, SkippedStrings):
        num_tokens = tokens.count
    else:
        num_tokens = len(fields.strings("tokenizer.ggml.tokens"))
    return ModelSpec(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.size("feed_forward_length"),
        vocab_size=fields.size("vocab_size", num_tokens or None),
        max_model_len=fields.size("context_length"),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.number("rope.freq_base", 10_000.0),
        rope_scaling=_gguf_scaling(fields, tensor_names),
        windows=(fields.optional_size("attention.sliding_window"),) * num_layers,
        tie_embeddings="output.weight" not in tensor_names,
        has_qkv_bias="blk.0.attn_q.bias" in tensor_names,
        has_o_bias="blk.0.attn_output.bias" in tensor_names,
        has_mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        has_qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
    )


def _gguf_scaling(fields: ModelFields, tensor_names: Collection[str]) -> RopeScaling | None:
    if "rope_freqs.weight" in tensor_names:
        return TensorScaling()
    kind = fields.raw("rope.scaling.type") or "none"
    if kind == "none":
        return None
    if kind == "linear":
        return LinearScaling(fields.number("rope.scaling.factor"))
    raise ModelLoadError(f"unsupported GGUF rope scaling {kind!r}; supported: none, linear")
