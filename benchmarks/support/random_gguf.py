"""Writes GGUF files of random weights, in the mixtures of types that people use.

    python -m benchmarks.support.random_gguf SHAPE MIXTURE FILE --tokenizer-of MODEL.gguf

With the tokenizer of another file, padded to the vocabulary of the shape, every engine can serve
the model. The gguf package quantizes no K-quants, so that this module does: simply, with the
format's own arithmetic. Weights are drawn from a pool of blocks, because drawing each would take
minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from headway.executors.spec import ModelSpec, spec_from_config
from headway.executors.weights.names import model_shapes

POOL_BLOCKS = 4096
MIXTURES = {
    "Q4_K_M": ("Q4_K", "Q6_K"),
    "Q5_K_M": ("Q5_K", "Q6_K"),
    "Q5_0": ("Q5_0", "Q5_1"),
}
"""Types of most matrices, and of those that llama.cpp gives more bits."""
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    "llama-1.2b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
}
"""Configurations of published models, in the words of config.json."""
_UNUSED_TOKEN = 5
_FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K_M": 15, "Q5_K_M": 17}
_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def quantize(values: np.ndarray, kind: str) -> np.ndarray:
    """Return rows of blocks of a ggml type."""
    if kind in ("Q4_K", "Q5_K"):
        return _quantize_offset(values, int(kind[1])).reshape(len(values), -1)
    if kind == "Q6_K":
        return _quantize_q6_k(values).reshape(len(values), -1)
    return gguf.quants.quantize(values, GGMLQuantizationType[kind]).view(np.uint8)


def kind_of(name: str, mixture: str, spec: ModelSpec) -> str:
    """Return the type of a matrix (GGUF name) in a mixture, as llama.cpp chooses it."""
    most, more = MIXTURES.get(mixture, (mixture, mixture))
    if not name.startswith("blk."):
        return more if spec.tie_embeddings or name == "output.weight" else most
    _, number, module, _ = name.split(".")
    layer, count = int(number), spec.num_layers
    has_more_bits = layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2
    return more if has_more_bits and module in ("attn_v", "ffn_down") else most


def write_random(
    path: Path,
    spec: ModelSpec,
    mixture: str,
    seed: int = 0,
    part_tensors: int = 0,
    tokenizer_of: Path | None = None,
) -> Path:
    """Write a model and return the path of its first part; all matrices are of `mixture`."""
    draw = np.random.default_rng(seed)
    pools: dict[str, np.ndarray] = {}
    writer = gguf.GGUFWriter(path, spec.architecture, split_max_tensors=part_tensors)
    _add_metadata(writer, spec, mixture)
    if tokenizer_of is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _copy_tokenizer(writer, tokenizer_of, spec.vocab_size)
    for canonical, shape in model_shapes(spec).items():
        name = _gguf_name(canonical)
        if len(shape) == 1:
            values = draw.normal(1.0, 0.1, size=shape).astype(np.float32)
            writer.add_tensor(name, values)
            continue
        kind = kind_of(name, mixture, spec)
        if kind not in pools:
            pools[kind] = _pool(kind, draw)
        num_blocks = shape[0] * shape[1] // GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
        blocks = pools[kind][draw.integers(0, POOL_BLOCKS, size=num_blocks)]
        rows = blocks.reshape(shape[0], -1)
        writer.add_tensor(name, rows, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first = sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))
    return first[0] if part_tensors and first else path


def _pool(kind: str, draw: np.random.Generator) -> np.ndarray:
    num_weights = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    values = draw.normal(size=(POOL_BLOCKS, num_weights)).astype(np.float32) / 50
    return quantize(values, kind)


def add_shapes(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    """Add the metadata of a decoder that every GGUF file has."""
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_model_len)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_layer_norm_rms_eps(spec.rms_norm_eps)
    writer.add_rope_freq_base(spec.rope_theta)


def _add_metadata(writer: gguf.GGUFWriter, spec: ModelSpec, mixture: str) -> None:
    add_shapes(writer, spec)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.head_dim)
    writer.add_vocab_size(spec.vocab_size)
    # OpenVINO wants these.
    writer.add_name("random")
    writer.add_file_type(_FILE_TYPES.get(mixture, _FILE_TYPES["Q8_0"]))


def _copy_tokenizer(writer: gguf.GGUFWriter, source: Path, vocab_size: int) -> None:
    """Copy the tokenizer of another file; add unused tokens up to a vocabulary size."""
    fields = gguf.GGUFReader(source).fields
    values = {
        name: field.contents()
        for name, field in fields.items()
        if name.startswith("tokenizer.") and field.types
    }
    tokens: list[str] = values.pop("tokenizer.ggml.tokens")
    kinds: list[int] = values.pop("tokenizer.ggml.token_type")
    if len(tokens) > vocab_size:
        raise ValueError(f"{source} has {len(tokens)} tokens, more than {vocab_size}")
    missing = range(len(tokens), vocab_size)
    writer.add_token_list([*tokens, *(f"<|unused_{number}|>" for number in missing)])
    writer.add_token_types([*kinds, *(_UNUSED_TOKEN for _ in missing)])
    for name, value in values.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, fields[name].types[0])


def _gguf_name(canonical: str) -> str:
    if canonical in _NAMES:
        return _NAMES[canonical]
    _, _, layer, rest = canonical.split(".", 3)
    module, part = rest.rsplit(".", 1)
    return f"blk.{layer}.{_NAMES[module]}.{part}"


def _quantize_offset(values: np.ndarray, num_bits: int) -> np.ndarray:
    """Return Q4_K or Q5_K blocks: eight groups with a scale and an offset of 6 bits each."""
    groups = values.reshape(-1, 8, 32)
    low = np.minimum(groups.min(axis=2), 0)
    steps = (groups.max(axis=2) - low) / (2**num_bits - 1)
    unit, scales = _factors(steps, 63)
    low_unit, lows = _factors(-low, 63)
    offset = (low_unit * lows)[:, :, None]
    step = (unit * scales)[:, :, None]
    numbers = np.divide(groups + offset, step, out=np.zeros_like(groups), where=step > 0)
    numbers = np.clip(np.rint(numbers), 0, 2**num_bits - 1).astype(np.uint8)
    pairs = numbers.reshape(-1, 4, 2, 32) & 15
    parts = [_bytes(unit), _bytes(low_unit), _six_bits(scales, lows)]
    if num_bits == 5:
        parts.append(np.packbits(numbers >> 4, axis=1, bitorder="little").reshape(-1, 32))
    parts.append((pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128))
    return np.concatenate(parts, axis=1)


def _quantize_q6_k(values: np.ndarray) -> np.ndarray:
    """Return Q6_K blocks: a signed scale of 8 bits for every 16 weights."""
    groups = values.reshape(-1, 16, 16)
    unit, scales = _factors(np.abs(groups).max(axis=2) / 31, 127)
    step = (unit * scales)[:, :, None]
    numbers = np.divide(groups, step, out=np.zeros_like(groups), where=step > 0)
    shifted = (np.clip(np.rint(numbers), -32, 31) + 32).astype(np.uint8)
    # [half][quarter][32]: quarters 0 and 2 share the low bits, all four the high bits.
    quarters = shifted.reshape(-1, 2, 4, 32)
    low = quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce(
        [quarters[:, :, at] >> 4 << 2 * at for at in range(4)], axis=0, dtype=np.uint8
    )
    parts = [low.reshape(-1, 128), high.reshape(-1, 64), scales.astype(np.uint8), _bytes(unit)]
    return np.concatenate(parts, axis=1)


def _factors(steps: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the fp16 unit of each block, and each step as a multiple of it."""
    unit = (steps.max(axis=1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    scales = np.divide(steps, unit, out=np.zeros_like(steps), where=unit > 0)
    return unit, np.clip(np.rint(scales), 0, most)


def _bytes(unit: np.ndarray) -> np.ndarray:
    return unit.astype(np.float16).view(np.uint8)


def _six_bits(scales: np.ndarray, lows: np.ndarray) -> np.ndarray:
    """Return 12 bytes of each block: eight scales and eight offsets."""
    a, b = scales.astype(np.uint8), lows.astype(np.uint8)
    first = a[:, :4] | a[:, 4:] >> 4 << 6
    second = b[:, :4] | b[:, 4:] >> 4 << 6
    return np.concatenate([first, second, a[:, 4:] & 15 | (b[:, 4:] & 15) << 4], axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a GGUF file of random weights.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("mixture", help=f"{', '.join(MIXTURES)}, or one type such as Q4_1 or Q8_0")
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokenizer-of", type=Path, help="GGUF file whose tokenizer is copied")
    args = parser.parse_args()
    spec = spec_from_config(SHAPES[args.shape])
    print(write_random(args.file, spec, args.mixture, tokenizer_of=args.tokenizer_of))


if __name__ == "__main__":
    main()
