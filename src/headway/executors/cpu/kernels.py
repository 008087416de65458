"""ctypes bindings of kernels/headway.h."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

LIBRARY = Path(__file__).with_name("libheadway_kernels.so")
ABI_VERSION = 9
TILE = 16
"""Outputs per panel and tokens per KV tile; sizes must be multiples."""
GROUP = 32
"""Inputs that share a scale."""
MAX_HEAD_DIM = 128
MAX_LOGPROBS = 20
ISA = ("plain", "avx2", "avx512", "avx512_vnni", "amx")
FORMATS = {"bf16": 0, "int8": 1, "int4": 2}
_SOURCES = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K"
SOURCES = {name: number for number, name in enumerate(_SOURCES.split())}
"""Formats of rows that the packer reads, by ggml type name."""
STATUSES = {"DONE": 0, "NO_MEMORY": 1, "MISFIT": 2, "NO_THREADS": 3}
PARTS = ("linear", "attention", "norm and rotary", "head", "sampling", "wait")


class CLinear(Structure):
    """Struct HwLinear."""

    _fields_ = [
        ("data", c_void_p),
        ("bias", c_void_p),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
        ("format", c_int32),
        ("unused", c_int32),
    ]


class Rows(Structure):
    """Struct HwRows."""

    _fields_ = [
        ("data", c_void_p),
        ("num_rows", c_int64),
        ("num_inputs", c_int64),
        ("source", c_int32),
        ("unused", c_int32),
    ]


class Layer(Structure):
    """Struct HwLayer."""

    _fields_ = [
        ("attention_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", CLinear),
        ("o", CLinear),
        ("gate_up", CLinear),
        ("down", CLinear),
        ("window", c_int32),
        ("unused", c_int32),
    ]


class Model(Structure):
    """Struct HwModel."""

    _fields_ = [
        ("hidden_size", c_int32),
        ("inner_size", c_int32),
        ("num_layers", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab_size", c_int32),
        ("max_positions", c_int32),
        ("norm_eps", c_float),
        ("kv_format", c_int32),
        ("block_size", c_int32),
        ("num_blocks", c_int32),
        ("activation_format", c_int32),
        ("unused", c_int32),
        ("layers", POINTER(Layer)),
        ("embedding", CLinear),
        ("head", CLinear),
        ("final_norm", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("kv", c_void_p),
    ]


class Sampling(Structure):
    """Struct HwSampling."""

    _fields_ = [
        ("draw", c_double),
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("repetition_penalty", c_float),
        ("presence_penalty", c_float),
        ("frequency_penalty", c_float),
        ("top_k", c_int32),
        ("num_logprobs", c_int32),
        ("num_banned", c_int32),
        ("num_biases", c_int32),
        ("num_seen", c_int32),
        ("banned_ids", c_void_p),
        ("bias_ids", c_void_p),
        ("biases", c_void_p),
        ("seen_ids", c_void_p),
        ("output_counts", c_void_p),
    ]


class Logprobs(Structure):
    """Struct HwLogprobs."""

    _fields_ = [
        ("logprob", c_float),
        ("rank", c_int32),
        ("top_ids", c_int32 * MAX_LOGPROBS),
        ("top_logprobs", c_float * MAX_LOGPROBS),
    ]


class Scored(Structure):
    """Struct HwScored."""

    _fields_ = [("row", c_int32), ("next_id", c_int32), ("num_top", c_int32)]


class Step(Structure):
    """Struct HwStep."""

    _fields_ = [
        ("num_spans", c_int32),
        ("num_tokens", c_int32),
        ("num_rows", c_int32),
        ("num_sampled", c_int32),
        ("token_ids", c_void_p),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("block_tables", c_void_p),
        ("rows", c_void_p),
        ("samplings", POINTER(Sampling)),
        ("logits", c_void_p),
        ("chosen_ids", c_void_p),
        ("best", c_void_p),
        ("logprobs", POINTER(Logprobs)),
        ("masks", c_void_p),
        ("masks_ready", POINTER(c_int32)),
        ("scored", POINTER(Scored)),
        ("scores", POINTER(Logprobs)),
        ("num_scored", c_int32),
        ("num_hidden", c_int32),
        ("hidden_rows", c_void_p),
        ("hidden", c_void_p),
    ]


@lru_cache(maxsize=1)
def load_kernels() -> ctypes.CDLL | None:
    """Return the library; None if it is not built or has another ABI version."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        version: int = library.hw_abi_version()
    except (OSError, AttributeError):
        return None
    if version != ABI_VERSION:
        return None
    pointer, size = c_void_p, c_int64
    library.hw_best_isa.restype = c_int32
    library.hw_packed_bytes.argtypes = [c_int32, size, size]
    library.hw_packed_bytes.restype = size
    library.hw_block_bytes.argtypes = [POINTER(Model)]
    library.hw_block_bytes.restype = size
    library.hw_pack.argtypes = [pointer, c_int32, POINTER(Rows), size, size]
    library.hw_unpack.argtypes = [POINTER(CLinear), c_int32, pointer]
    library.hw_create.argtypes = [POINTER(Model), c_int32, c_int32, POINTER(pointer)]
    library.hw_destroy.argtypes = [pointer]
    library.hw_step.argtypes = [pointer, POINTER(Step)]
    library.hw_set_ready.argtypes = [POINTER(c_int32)]
    library.hw_set_ready.restype = None
    library.hw_sample.argtypes = [
        c_int32,
        POINTER(Sampling),
        pointer,
        pointer,
        c_int32,
        POINTER(c_int32),
        POINTER(c_float),
        POINTER(Logprobs),
    ]
    library.hw_copy_blocks.argtypes = [pointer, pointer, pointer, c_int32]
    library.hw_checksum_blocks.argtypes = [pointer, pointer, pointer, c_int32, pointer]
    library.hw_forget_blocks.argtypes = [pointer, pointer, c_int32]
    library.hw_clear_tails.argtypes = [pointer, pointer, pointer, c_int32]
    library.hw_profile.argtypes = [pointer, POINTER(c_double)]
    return library


def best_isa() -> str | None:
    """Return the best instruction set of the kernels on this machine; None without kernels."""
    library = load_kernels()
    return None if library is None else ISA[library.hw_best_isa()]
