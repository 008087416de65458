"""GGUF checkpoints: parts, tensor names, row order and dequantization by the gguf package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from headway.errors import ModelLoadError
from headway.executors.spec import ModelSpec, spec_from_gguf
from headway.executors.weights import Stored
from headway.executors.weights.ggml_types import GGML_TYPES, GgmlType
from headway.executors.weights.names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ROPE_FACTORS,
)
from headway.executors.weights.source_files import SourceFiles
from headway.gguf_header import GgufHeader, TensorEntry, read_header

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
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor and the bytes of its file."""

    entry: TensorEntry
    file: np.ndarray

    @property
    def kind(self) -> GgmlType:
        return GGML_TYPES[self.entry.type_id]


class GgufCheckpoint:
    """A GGUF file of a llama, qwen2 or qwen3 model, or the first of several parts."""

    def __init__(self, path: Path) -> None:
        self.source = SourceFiles.of(path, _part_paths(path))
        header = read_header(path, has_strings=False)
        parts = {path: header, **dict(_other_parts(path, header))}
        self._tensors: dict[str, _Tensor] = {}
        for part, one in parts.items():
            self._add(part, one)
        names = {name for one in parts.values() for name in one.tensors}
        self._spec = spec_from_gguf(header.metadata, names)

    def _add(self, path: Path, header: GgufHeader) -> None:
        """Check the tensors of a part and add them."""
        data = np.memmap(path, mode="r")
        for name, entry in header.tensors.items():
            _check_entry(name, entry)
        end = max((e.offset + _num_bytes(e) for e in header.tensors.values()), default=0)
        if end > len(data):
            raise ModelLoadError(f"{path} is truncated: {len(data)} of {end} bytes")
        for name, entry in header.tensors.items():
            if _canonical(name) in self._tensors:
                raise ModelLoadError(f"{path}: {name} is there twice, or under two names")
            self._tensors[_canonical(name)] = _Tensor(entry, data)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.entry.shape for name, tensor in self._tensors.items()}

    def kinds(self) -> dict[str, str]:
        return {name: tensor.kind.name for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        stored = self.read_stored(name, 0, tensor.entry.shape[0])
        if stored.kind == "F32":
            return np.ascontiguousarray(stored.rows).view(np.float32).reshape(tensor.entry.shape)
        from gguf.constants import GGMLQuantizationType  # takes long
        from gguf.quants import dequantize

        try:
            values = dequantize(stored.rows, GGMLQuantizationType(tensor.entry.type_id))
        except NotImplementedError as error:
            raise ModelLoadError(f"{name}: {stored.kind} is not supported") from error
        return values.reshape(tensor.entry.shape)

    def read_stored(self, name: str, first: int, last: int) -> Stored:
        tensor = self._tensors[name]
        start = tensor.entry.offset
        raw = tensor.file[start : start + _num_bytes(tensor.entry)]
        rows = raw.reshape(tensor.entry.shape[0], -1)
        order = self._row_order(name)
        rows = rows[first:last] if order is None else rows[order[first:last]]
        return Stored(tensor.kind.name, rows)

    def _row_order(self, name: str) -> np.ndarray | None:
        """Return where llama files have each row: their rotary pairs are adjacent rows."""
        if self._spec.architecture != "llama":
            return None
        if ".q_proj." in name:
            num_heads = self._spec.num_heads
        elif ".k_proj." in name:
            num_heads = self._spec.num_kv_heads
        else:
            return None
        rows = np.arange(num_heads * self._spec.head_dim)
        return rows.reshape(num_heads, -1, 2).transpose(0, 2, 1).reshape(-1)


def _part_paths(path: Path) -> list[Path]:
    """Return the files that may be parts of the model, by their names."""
    match = _PART.fullmatch(path.name)
    return sorted(path.parent.glob(f"*-of-{match[3]}.gguf")) if match else [path]


def _other_parts(path: Path, first: GgufHeader) -> Iterator[tuple[Path, GgufHeader]]:
    """Yield the parts after the first; none if the file is whole."""
    count = first.metadata.get("split.count", 1)
    if count in (0, 1):
        return
    named = _PART.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise ModelLoadError(
            f"{path} is one of {count} parts, but its name does not end as theirs do: "
            f"-00001-of-0000N.gguf"
        )
    if first.metadata.get("split.no") != 0 or int(named[2]) != 1:
        raise ModelLoadError(f"{path} is not the first part; give {_part_name(named, 1)}")
    num_tensors = len(first.tensors)
    for number in range(1, int(named[3])):
        part = path.with_name(_part_name(named, number + 1))
        if not part.is_file():
            raise ModelLoadError(f"{part} is missing: {path} is the first of {count} parts")
        header = read_header(part, has_strings=False)
        for key, expected in (("split.no", number), ("split.count", count)):
            if header.metadata.get(key) != expected:
                raise ModelLoadError(
                    f"{part}: {key} is {header.metadata.get(key)}, not {expected} as its name says"
                )
        architecture = first.metadata.get("general.architecture")
        if header.metadata.get("general.architecture", architecture) != architecture:
            raise ModelLoadError(f"{part} is of another architecture than {path}")
        num_tensors += len(header.tensors)
        yield part, header
    if first.metadata.get("split.tensors.count", num_tensors) != num_tensors:
        raise ModelLoadError(
            f"the parts of {path} have {num_tensors} tensors, "
            f"not {first.metadata['split.tensors.count']}"
        )


def _part_name(named: re.Match[str], number: int) -> str:
    return f"{named[1]}-{number:05}-of-{named[3]}.gguf"


def _check_entry(name: str, entry: TensorEntry) -> None:
    """Refuse a tensor whose rows are not whole blocks of its type."""
    kind = GGML_TYPES.get(entry.type_id)
    if kind is None:
        raise ModelLoadError(f"{name}: ggml type {entry.type_id} is not known")
    block_elements = kind.block_elements
    if not entry.shape or min(entry.shape) < 1 or entry.shape[-1] % block_elements:
        raise ModelLoadError(
            f"{name}: shape {list(entry.shape)} has no rows of whole {kind.name} blocks "
            f"of {block_elements}"
        )
    if len(entry.shape) == 1 and block_elements > 1:
        raise ModelLoadError(f"{name}: a vector of {kind.name} is not supported")


def _num_bytes(entry: TensorEntry) -> int:
    kind = GGML_TYPES[entry.type_id]
    return prod(entry.shape) // kind.block_elements * kind.block_bytes


def _canonical(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return name
