"""GGUF checkpoints: tensor names, row order and dequantization by the gguf package."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from headway.errors import ModelLoadError
from headway.executors.spec import ModelSpec, spec_from_gguf
from headway.executors.weights import Quantized
from headway.executors.weights.names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ROPE_FACTORS,
)
from headway.executors.weights.source_files import SourceFiles
from headway.gguf_header import TensorEntry, read_header

_GLOBAL_NAMES = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": FINAL_NORM,
    "output.weight": HEAD,
    "rope_freqs.weight": ROPE_FACTORS,
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_AS_INT4 = frozenset({"Q4_0", "Q4_1"})
"""Types that are packed as int4 without requantization.

Other types would be quantized a second time, which loses little in 8 bits and much in 4.
"""
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufCheckpoint:
    """One GGUF file of a llama, qwen2 or qwen3 model."""

    def __init__(self, path: Path) -> None:
        self.source = SourceFiles.of(path, [path])
        header = read_header(path)
        self._data = np.memmap(path, mode="r")
        for name, entry in header.tensors.items():
            _check_entry(name, entry)
        end = max((e.offset + _num_bytes(e) for e in header.tensors.values()), default=0)
        if end > len(self._data):
            raise ModelLoadError(f"{path} is truncated: {len(self._data)} of {end} bytes")
        if header.metadata.get("split.count", 1) not in (0, 1):
            raise ModelLoadError(f"{path} is one of several parts; merge them with gguf-split")
        self._spec = spec_from_gguf(header.metadata, header.tensors)
        self._tensors = {_canonical(name): entry for name, entry in header.tensors.items()}
        if len(self._tensors) != len(header.tensors):
            raise ModelLoadError(f"{path} has a tensor under two names")

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: entry.shape for name, entry in self._tensors.items()}

    @property
    def quantization(self) -> str | None:
        """Return the data type that loses least against the types of the linear layers."""
        kinds = {
            GGMLQuantizationType(entry.type_id).name
            for name, entry in self._tensors.items()
            if name.endswith("_proj.weight")
        }
        if kinds and kinds <= _AS_INT4:
            return "int4"
        is_quantized = kinds and all(kind.startswith(("Q", "IQ")) for kind in kinds)
        return "int8" if is_quantized else None

    def read(self, name: str) -> np.ndarray:
        quantized = self.read_quantized(name)
        kind = GGMLQuantizationType[quantized.kind]
        try:
            values = dequantize(quantized.rows, kind)
        except NotImplementedError as error:
            raise ModelLoadError(f"{name}: {kind.name} is not supported") from error
        return values.reshape(self._tensors[name].shape)

    def read_quantized(self, name: str) -> Quantized:
        entry = self._tensors[name]
        raw = self._data[entry.offset : entry.offset + _num_bytes(entry)]
        rows = self._unpermuted(name, raw.reshape(*entry.shape[:-1], -1))
        return Quantized(GGMLQuantizationType(entry.type_id).name, rows, entry.shape)

    def _unpermuted(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Undo the row order of llama files, whose rotary pairs are adjacent rows."""
        if self._spec.architecture != "llama":
            return rows
        if ".q_proj." in name:
            num_heads = self._spec.num_heads
        elif ".k_proj." in name:
            num_heads = self._spec.num_kv_heads
        else:
            return rows
        if rows.ndim == 1:  # a bias: one value per row
            rows = rows.reshape(num_heads * self._spec.head_dim, -1)
        pairs = rows.reshape(num_heads, self._spec.head_dim // 2, 2, -1)
        return pairs.transpose(0, 2, 1, 3).reshape(rows.shape)


def _check_entry(name: str, entry: TensorEntry) -> None:
    """Refuse a tensor whose rows are not whole blocks of its type."""
    try:
        kind = GGMLQuantizationType(entry.type_id)
    except ValueError as error:
        raise ModelLoadError(f"{name}: ggml type {entry.type_id} is not known") from error
    block_elements, _ = GGML_QUANT_SIZES[kind]
    if not entry.shape or min(entry.shape) < 1 or entry.shape[-1] % block_elements:
        raise ModelLoadError(
            f"{name}: shape {list(entry.shape)} has no rows of whole {kind.name} blocks "
            f"of {block_elements}"
        )
    if len(entry.shape) == 1 and block_elements > 1:
        raise ModelLoadError(f"{name}: a vector of {kind.name} is not supported")


def _num_bytes(entry: TensorEntry) -> int:
    block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(entry.type_id)]
    return prod(entry.shape) // block_elements * block_bytes


def _canonical(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return name
