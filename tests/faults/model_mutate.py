"""Makes model files that are nearly right: seeded changes to the fields of small valid models.

Byte-level changes seldom pass a header's own checks; these change one field at a time, so that what
stands behind the header is reached: shapes, types, places and counts that contradict each other.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.support.random_gguf import MIXTURES, quantize
from tests.faults.gguf_mutate import ODD_COUNTS, change_bytes

HIDDEN, INNER, VOCAB, HEAD_DIM = 64, 96, 48, 32
SIZES = {
    "hidden": HIDDEN,
    "inner": INNER,
    "vocab": VOCAB,
    "q": 2 * HEAD_DIM,
    "kv": HEAD_DIM,
    "head": HEAD_DIM,
}
LAYER = {
    "attn_norm.weight": ("hidden",),
    "attn_q.weight": ("q", "hidden"),
    "attn_k.weight": ("kv", "hidden"),
    "attn_v.weight": ("kv", "hidden"),
    "attn_output.weight": ("hidden", "q"),
    "ffn_norm.weight": ("hidden",),
    "ffn_gate.weight": ("inner", "hidden"),
    "ffn_up.weight": ("inner", "hidden"),
    "ffn_down.weight": ("hidden", "inner"),
}
NORMS = {"attn_q_norm.weight": ("head",), "attn_k_norm.weight": ("head",)}
BIASES = {"attn_q.bias": ("q",), "attn_k.bias": ("kv",), "attn_v.bias": ("kv",)}
GLOBAL = {
    "token_embd.weight": ("vocab", "hidden"),
    "output_norm.weight": ("hidden",),
    "output.weight": ("vocab", "hidden"),
}
HF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HF_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
NUM_LAYERS = 2
WIDE = {"hidden": 256, "inner": 256, "q": 256}
"""Sizes that rows of K-quants need: whole blocks of 256."""
ODD_SIZES = (*ODD_COUNTS, 1, 3, 16, 31, 33, 47, 63, 65, 95, 97, 128, 1000)
ODD_VALUES = (
    *(None, True, "", "64", [], [64], {}, -1, -64, 0.5, 64.0, 1e300, float("nan"), float("inf")),
    *ODD_COUNTS,
)
SAFE_DTYPES = (
    *("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"),
    *("I64", "I32", "I8", "U8", "BOOL", "C64", "Q4"),
)


def tensor_shapes(
    extra: dict[str, tuple[str, ...]], sizes: dict[str, int] = SIZES
) -> dict[str, tuple[int, ...]]:
    """Every tensor of the small model, by its GGUF name; the rows come first."""
    layer = LAYER | extra
    named = {f"blk.{at}.{name}": dims for at in range(NUM_LAYERS) for name, dims in layer.items()}
    return {name: tuple(sizes[dim] for dim in dims) for name, dims in (GLOBAL | named).items()}


# ------------------------------------------------------------------------------- GGUF


@dataclass
class GgufTensor:
    """One entry of the header, field by field, and the bytes that it stands for."""

    name: str
    dims: list[int]
    type_id: int
    offset: int
    data: bytes
    num_dims: int | None = None


@dataclass
class GgufFile:
    """A GGUF file whose fields need not agree."""

    metadata: list[tuple[str, int, Any]]
    tensors: list[GgufTensor]
    alignment: int = 32
    version: int = 3
    num_tensors: int | None = None
    num_keys: int | None = None

    def encode(self) -> bytes:
        count = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_keys = len(self.metadata) if self.num_keys is None else self.num_keys
        parts = [b"GGUF", struct.pack("<IQQ", self.version, count, num_keys)]
        for key, kind, value in self.metadata:
            parts += [_string(key), struct.pack("<I", kind), _value(kind, value)]
        for tensor in self.tensors:
            num_dims = len(tensor.dims) if tensor.num_dims is None else tensor.num_dims
            parts += [_string(tensor.name), struct.pack("<I", num_dims)]
            parts += [struct.pack("<Q", dim % 2**64) for dim in reversed(tensor.dims)]
            parts.append(struct.pack("<IQ", tensor.type_id % 2**32, tensor.offset % 2**64))
        header = b"".join(parts)
        header += bytes(-len(header) % self.alignment)
        return header + b"".join(
            tensor.data + bytes(-len(tensor.data) % self.alignment) for tensor in self.tensors
        )


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(kind: int, value: Any) -> bytes:
    if kind == 8:
        return _string(value)
    if kind == 9:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_value(inner, v) for v in items)
    codes = {0: "B", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    return struct.pack(f"<{codes[kind]}", value)


def gguf_model(architecture: str, kind: str, extra: dict[str, tuple[str, ...]]) -> GgufFile:
    """A small whole model; matrices are of `kind` (or that mixture of types), all else F32."""
    draw = np.random.default_rng(3)
    sizes = SIZES | (WIDE if "_K" in kind else {})
    tensors: list[GgufTensor] = []
    offset = 0
    for name, shape in tensor_shapes(extra, sizes).items():
        values = draw.normal(size=shape).astype(np.float32) / 8
        most, more = MIXTURES.get(kind, (kind, kind))
        used = "F32" if len(shape) == 1 else more if name.startswith("blk.1.attn_v") else most
        data = quantize(values, used).tobytes()
        used_id = gguf.GGMLQuantizationType[used].value
        tensors.append(GgufTensor(name, list(shape), used_id, offset, data))
        offset += len(data) + -len(data) % 32
    numbers = {
        "block_count": NUM_LAYERS,
        "context_length": 128,
        "embedding_length": sizes["hidden"],
        "feed_forward_length": sizes["inner"],
        "attention.head_count": sizes["q"] // HEAD_DIM,
        "attention.head_count_kv": 1,
        "attention.key_length": HEAD_DIM,
    }
    metadata: list[tuple[str, int, Any]] = [
        ("general.architecture", 8, architecture),
        ("general.alignment", 4, 32),
        *((f"{architecture}.{key}", 4, value) for key, value in numbers.items()),
        (f"{architecture}.attention.layer_norm_rms_epsilon", 6, 1e-5),
        (f"{architecture}.rope.freq_base", 6, 10_000.0),
        ("tokenizer.ggml.tokens", 9, (8, [f"t{at}" for at in range(VOCAB)])),
    ]
    return GgufFile(metadata, tensors)


GGUF_SEEDS = (
    ("llama", "F32", {}),
    ("llama", "Q4_1", {}),
    ("llama", "Q8_0", BIASES),
    ("qwen2", "Q4_0", BIASES),
    ("llama", "F16", {}),
    ("qwen2", "BF16", BIASES),
    ("qwen3", "Q4_1", NORMS),
    ("llama", "Q4_K_M", {}),
    ("qwen2", "Q5_K_M", BIASES),
    ("llama", "Q5_0", {}),
)


def mutated_gguf(source: random.Random) -> bytes:
    """The bytes of one changed file."""
    file = gguf_model(*source.choice(GGUF_SEEDS))
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        source.choice(GGUF_CHANGES)(file, source)
    data = file.encode()
    if source.random() < 0.15:
        data = change_bytes(data, [data], source)
    return data


def _change_dim(file: GgufFile, source: random.Random) -> None:
    tensor = source.choice(file.tensors)
    tensor.dims[source.randrange(len(tensor.dims) or 1)] = source.choice(ODD_SIZES)


def _swap_dims(file: GgufFile, source: random.Random) -> None:
    tensor = source.choice(file.tensors)
    tensor.dims = source.choice(([*reversed(tensor.dims)], [*tensor.dims, 1], [1, *tensor.dims]))


def _overflow_dims(file: GgufFile, source: random.Random) -> None:
    """Dimensions whose product is small, or right, only in 64 bits."""
    tensor = source.choice(file.tensors)
    tensor.dims = source.choice(
        ([2**32, 2**32], [2**63, 2], [2**32 + 1, 2**32], [0, 2**63], [2**31, 32], [2**62, 4, 64])
    )


def _change_num_dims(file: GgufFile, source: random.Random) -> None:
    source.choice(file.tensors).num_dims = source.choice((0, 1, 2, 3, 4, 5, 255, 2**32 - 1))


def _change_type(file: GgufFile, source: random.Random) -> None:
    source.choice(file.tensors).type_id = source.choice((*range(42), 255, 2**31, 2**32 - 1))


def _change_offset(file: GgufFile, source: random.Random) -> None:
    tensor = source.choice(file.tensors)
    near = (tensor.offset + 1, tensor.offset - 32, tensor.offset + 32, 0, 7)
    tensor.offset = source.choice((*near, *ODD_COUNTS, source.choice(file.tensors).offset))


def _rename(file: GgufFile, source: random.Random) -> None:
    tensor, other = source.choice(file.tensors), source.choice(file.tensors)
    names = ("", other.name, tensor.name.upper(), "blk.99.attn_q.weight", "blk.0.attn_q.bias")
    tensor.name = source.choice((*names, "rope_freqs.weight", "model.norm.weight", "\x00", "ü" * 9))


def _repeat(file: GgufFile, source: random.Random) -> None:
    file.tensors.append(deepcopy(source.choice(file.tensors)))


def _drop(file: GgufFile, source: random.Random) -> None:
    file.tensors.remove(source.choice(file.tensors))


def _cut_data(file: GgufFile, source: random.Random) -> None:
    tensor = source.choice((file.tensors[-1], source.choice(file.tensors)))
    tensor.data = tensor.data[: source.randrange(len(tensor.data) or 1)]


def _odd_data(file: GgufFile, source: random.Random) -> None:
    """All NaN, all infinite or anything: a scale of a block may be any 16 bits."""
    tensor = source.choice(file.tensors)
    size = len(tensor.data)
    tensor.data = source.choice((b"\xff" * size, b"\x00\x7c" * (size // 2), source.randbytes(size)))


def _change_number(file: GgufFile, source: random.Random) -> None:
    at = source.randrange(1, len(file.metadata))
    key, kind, _ = file.metadata[at]
    number = source.choice(ODD_SIZES)
    choices = (
        (10, number % 2**64),
        (4, number % 2**32),
        (5, -(number % 2**31)),
        (11, -(number % 2**63)),
        (6, source.choice((0.0, -1.0, float("nan"), float("inf"), 0.5, 64.0))),
        (12, source.choice((0.0, 1e300, -1e300, 32.0))),
        (7, source.random() < 0.5),
        (8, source.choice(("", "64", "llama", "linear"))),
        (9, (4, [64, 64])),
        (9, (8, ["64"])),
        (9, (6, [])),
    )
    kind, value = source.choice(choices)
    file.metadata[at] = (key, kind, value)


def _change_keys(file: GgufFile, source: random.Random) -> None:
    key = source.choice(file.metadata)
    prefix = source.choice(("llama", "qwen2"))
    extra: tuple[tuple[str, int, Any], ...] = (
        (f"{prefix}.attention.sliding_window", 4, source.choice(ODD_SIZES) % 2**32),
        (f"{prefix}.attention.sliding_window", 5, -5),
        (f"{prefix}.rope.scaling.type", 8, source.choice(("linear", "yarn", "none"))),
        (f"{prefix}.rope.scaling.factor", 6, source.choice((0.0, -1.0, float("nan"), 2.0))),
        (f"{prefix}.vocab_size", 4, source.choice((VOCAB, 0, 47, 2**31, 2**32 - 1))),
        (f"{prefix}.rope.dimension_count", 8, "32"),
        ("split.count", 4, source.choice((2, 3, 0, 2**32 - 1))),
        ("general.architecture", 8, source.choice(("qwen3", "gemma", ""))),
        key,
    )
    if source.random() < 0.4:
        file.metadata.remove(key)
    else:
        file.metadata.insert(source.randrange(len(file.metadata) + 1), source.choice(extra))


def _change_counts(file: GgufFile, source: random.Random) -> None:
    if source.random() < 0.5:
        file.num_tensors = source.choice((*ODD_COUNTS, len(file.tensors) - 1))
    else:
        file.num_keys = source.choice((*ODD_COUNTS, len(file.metadata) - 1))


GGUF_CHANGES: tuple[Callable[[GgufFile, random.Random], None], ...] = (
    *(_change_dim, _swap_dims, _overflow_dims, _change_num_dims, _change_type, _change_offset),
    *(_rename, _repeat, _drop, _cut_data, _odd_data, _change_number, _change_number),
    *(_change_keys, _change_counts),
)


# ------------------------------------------------------------------------- safetensors

SafeEntry = tuple[str, dict[str, Any]]


@dataclass
class SafeFolder:
    """A checkpoint folder whose parts need not agree."""

    config: dict[str, Any]
    entries: list[SafeEntry]
    data: bytes
    index: Any = None
    texts: dict[str, bytes] = field(default_factory=dict)
    """Files that are written as they stand here, whatever the other fields say."""
    header_size: int | None = None

    def write(self, folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        # By hand, as a dict cannot hold a name twice.
        listed = ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in self.entries)
        header = f"{{{listed}}}".encode()
        size = len(header) if self.header_size is None else self.header_size
        files = {
            "config.json": json.dumps(self.config).encode(),
            "model.safetensors": struct.pack("<Q", size % 2**64) + header + self.data,
        }
        if self.index is not None:
            files["model.safetensors.index.json"] = json.dumps(self.index).encode()
        for name, content in (files | self.texts).items():
            (folder / name).write_bytes(content)


def safe_folder(architecture: str, dtype: str, is_indexed: bool) -> SafeFolder:
    """A small whole model; all tensors are of `dtype`."""
    draw = np.random.default_rng(4)
    entries: list[SafeEntry] = []
    parts: list[bytes] = []
    at = 0
    for name, shape in tensor_shapes(BIASES if "Qwen2" in architecture else {}).items():
        values = draw.normal(size=shape).astype(np.float32) / 8
        bits = values.view(np.uint32) >> 16
        stored = {
            "F32": values,
            "F16": values.astype(np.float16),
            "BF16": bits.astype(np.uint16),
        }[dtype]
        parts.append(stored.tobytes())
        offsets = [at, at := at + len(parts[-1])]
        entries.append(
            (_hf_name(name), {"dtype": dtype, "shape": list(shape), "data_offsets": offsets})
        )
    config = {
        "architectures": [architecture],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
    }
    names = [name for name, _ in entries]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")} if is_indexed else None
    return SafeFolder(config, entries, b"".join(parts), index)


def _hf_name(name: str) -> str:
    if name in HF_GLOBAL:
        return HF_GLOBAL[name]
    _, layer, module, kind = name.split(".")
    return f"model.layers.{layer}.{HF_LAYER[module]}.{kind}"


SAFE_SEEDS = (
    ("LlamaForCausalLM", "F32", False),
    ("LlamaForCausalLM", "BF16", True),
    ("Qwen2ForCausalLM", "F16", False),
)


def mutated_folder(source: random.Random) -> SafeFolder:
    """One changed folder."""
    folder = safe_folder(*source.choice(SAFE_SEEDS))
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        source.choice(SAFE_CHANGES)(folder, source)
    return folder


def _entry(folder: SafeFolder, source: random.Random) -> dict[str, Any]:
    return source.choice(folder.entries)[1]


def _safe_shape(folder: SafeFolder, source: random.Random) -> None:
    entry = _entry(folder, source)
    shape = entry["shape"] if isinstance(entry["shape"], list) else [64, 64]
    odd = [*shape] or [64]
    odd[source.randrange(len(odd))] = source.choice((*ODD_SIZES, -1, 1.5, "64", None))
    entry["shape"] = source.choice(
        (odd, odd, shape[::-1], [*shape, 1], [], [2**32, 2**32], [2**63, 2], None, 64)
    )


def _safe_dtype(folder: SafeFolder, source: random.Random) -> None:
    """Another type, with the shape that makes the bytes come out right or without."""
    entry = _entry(folder, source)
    after: Any = source.choice((*SAFE_DTYPES, "", None, 7))
    before, entry["dtype"] = entry["dtype"], after
    widths = {"F64": 8, "I64": 8, "C64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}
    if source.random() < 0.6 and entry["shape"] and isinstance(entry["shape"], list):
        scale = widths.get(before, 1)
        width = widths.get(after, 1)
        last = entry["shape"][-1]
        if isinstance(last, int):
            entry["shape"] = [*entry["shape"][:-1], last * scale // width]


def _safe_offsets(folder: SafeFolder, source: random.Random) -> None:
    entry, other = _entry(folder, source), _entry(folder, source)
    begin, end = entry["data_offsets"] if len(entry["data_offsets"] or ()) == 2 else (0, 0)
    odd = source.choice(ODD_COUNTS)
    near = ([begin + 1, end], [end, begin], [-1, end], [begin], other["data_offsets"])
    entry["data_offsets"] = source.choice((*near, [begin, odd], [odd, end], [], None))


def _safe_names(folder: SafeFolder, source: random.Random) -> None:
    at = source.randrange(len(folder.entries))
    name, entry = folder.entries[at]
    other = source.choice(folder.entries)[0]
    names = ("", other, name.upper(), "__metadata__", "model.layers.99.mlp.up_proj.weight")
    changed = (source.choice(names), entry)
    if source.random() < 0.3:
        folder.entries.append((name, deepcopy(entry)))
    elif source.random() < 0.3:
        del folder.entries[at]
    else:
        folder.entries[at] = changed


def _safe_size(folder: SafeFolder, source: random.Random) -> None:
    folder.header_size = source.choice((*ODD_COUNTS, 2, 100, 10**8))


def _safe_data(folder: SafeFolder, source: random.Random) -> None:
    cut = source.randrange(len(folder.data) or 1)
    folder.data = source.choice(
        (folder.data[:cut], folder.data + b"more", b"\xff" * len(folder.data), b"")
    )


def _safe_config(folder: SafeFolder, source: random.Random) -> None:
    key = source.choice([*folder.config])
    rope = {"rope_type": "linear", "factor": source.choice(ODD_VALUES)}
    extra = {
        "rope_scaling": source.choice((rope, {"rope_type": "llama3"}, "linear", [1])),
        "rope_parameters": source.choice((rope, {"rope_type": 5}, {"rope_theta": "x"}, 3)),
        "sliding_window": source.choice(ODD_VALUES),
        "use_sliding_window": True,
        "layer_types": source.choice((["full_attention"], "full", [["a"]], 3)),
        "quantization_config": source.choice((5, "gptq", {"quant_method": 3})),
        "tie_word_embeddings": source.choice((True, "yes")),
        "architectures": source.choice((3, "LlamaForCausalLM", [3], [["x"]], None)),
        "hidden_act": source.choice((3, ["silu"], "gelu")),
    }
    if source.random() < 0.5:
        folder.config[key] = source.choice(ODD_VALUES)
    elif source.random() < 0.3:
        del folder.config[key]
    else:
        name = source.choice([*extra])
        folder.config[name] = extra[name]


def _safe_index(folder: SafeFolder, source: random.Random) -> None:
    known = dict.fromkeys((name for name, _ in folder.entries), "model.safetensors")
    name = source.choice([*known])
    elsewhere = ("/etc/hostname", "../model.safetensors", "", ".", "no.safetensors", "config.json")
    odd_maps = (None, [1], {}, {name: 5}, {name: None}, {name: [1]})
    changed = known | {name: source.choice((*elsewhere, "\x00"))}
    weight_map = source.choice((changed, changed, source.choice(odd_maps)))
    folder.index = source.choice(({}, [], 5, *[{"weight_map": weight_map}] * 5))


def _safe_text(folder: SafeFolder, source: random.Random) -> None:
    name = source.choice(("config.json", "model.safetensors.index.json", "model.safetensors"))
    deep = b"[" * 100_000
    folder.texts[name] = source.choice(
        (b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", deep, b'{"a":' * 100_000)
    )


SAFE_CHANGES: tuple[Callable[[SafeFolder, random.Random], None], ...] = (
    *(_safe_shape, _safe_shape, _safe_dtype, _safe_dtype, _safe_offsets, _safe_names),
    *(_safe_size, _safe_data, _safe_config, _safe_config, _safe_index, _safe_text),
)


def places(count: int, seed: int) -> Iterator[tuple[int, random.Random]]:
    """The numbers of the files to make, and each one's own source of chance."""
    for place in range(count):
        yield place, random.Random(f"{seed}/{place}")
