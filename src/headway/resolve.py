"""What "auto" means: settings, a model and a machine in; values and the reasons for them out.

Pure: it measures nothing and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.config import Config
from headway.errors import ConfigError

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Hardware:
    """What this machine offers."""

    num_cores: int
    available_bytes: int
    isa: tuple[str, ...] = ()
    has_cuda: bool = False


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What resolving needs to know of a model."""

    max_model_len: int
    num_parameters: int
    kv_values_per_token: int
    """Numbers kept per token: layers x 2 x KV heads x head size."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings with nothing left to choose, and why each choice was made."""

    dtype: str
    device: str
    num_threads: int
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    reasons: tuple[str, ...]


_DTYPES = {"fp32": "fp32", "float32": "fp32", "bf16": "bf16", "bfloat16": "bf16"}
_BYTES = {"fp32": 4, "bf16": 2}


def resolve(config: Config, model: ModelFacts, hardware: Hardware) -> Resolved:
    """Turn "auto" into values; the reasons say how."""
    dtype, why_dtype = _resolve_dtype(config.model.dtype, hardware)
    device = config.model.device
    if device == "auto":
        device = "cuda" if hardware.has_cuda else "cpu"
    max_model_len = config.model.max_model_len or model.max_model_len
    if not 1 < max_model_len <= model.max_model_len:
        raise ConfigError(
            f"max_model_len must be between 2 and the model's {model.max_model_len}, "
            f"got {max_model_len}"
        )
    num_blocks, why_blocks = _resolve_blocks(config, model, hardware, dtype, max_model_len)
    block_size = config.cache.block_size
    reasons = [why_dtype, why_blocks]
    in_cache = num_blocks * block_size + 1
    if in_cache < max_model_len:
        if config.model.max_model_len is not None:
            raise ConfigError(
                f"max_model_len {max_model_len} needs more KV cache than the "
                f"{num_blocks * block_size} tokens it holds; lower it or raise "
                f"kv_cache_memory_bytes"
            )
        reasons.append(f"max_model_len {in_cache}, not {max_model_len}: all the KV cache holds")
        max_model_len = in_cache
    return Resolved(
        dtype,
        device,
        config.model.num_threads or hardware.num_cores,
        max_model_len,
        block_size,
        num_blocks,
        num_blocks * _block_bytes(config, model, dtype),
        tuple(reasons),
    )


def _resolve_dtype(asked: str, hardware: Hardware) -> tuple[str, str]:
    if asked == "auto":
        fast = hardware.has_cuda or "amx_bf16" in hardware.isa or "avx512_bf16" in hardware.isa
        if fast:
            return "bf16", "dtype bf16: this machine multiplies bf16 matrices in hardware"
        return "fp32", "dtype fp32: this machine has no bf16 matrix instructions"
    if asked.lower() not in _DTYPES:
        raise ConfigError(f"dtype must be auto, fp32 or bf16, got {asked!r}")
    return _DTYPES[asked.lower()], f"dtype {_DTYPES[asked.lower()]}: as asked"


def _block_bytes(config: Config, model: ModelFacts, dtype: str) -> int:
    return config.cache.block_size * model.kv_values_per_token * _BYTES[dtype]


def _resolve_blocks(
    config: Config, model: ModelFacts, hardware: Hardware, dtype: str, max_model_len: int
) -> tuple[int, str]:
    block_size = config.cache.block_size
    block_bytes = _block_bytes(config, model, dtype)
    asked = config.cache.kv_cache_memory_bytes
    if asked is not None:
        num_blocks = asked // block_bytes
        why = f"KV cache {asked / GIB:.2f} GiB: as asked"
    else:
        free = max(0, hardware.available_bytes - model.num_parameters * _BYTES[dtype])
        per_request = -(-max_model_len // block_size)
        wanted = per_request * config.scheduler.max_num_seqs
        num_blocks = min(free // 2 // block_bytes, wanted)
        limit = "half of the free memory" if num_blocks < wanted else "room for every seat"
        why = (
            f"KV cache {num_blocks * block_bytes / GIB:.2f} GiB: {limit} "
            f"({free / GIB:.1f} GiB free after the weights)"
        )
    if num_blocks < 1:
        raise ConfigError(
            f"the KV cache has room for no block ({block_bytes} bytes each); "
            f"raise kv_cache_memory_bytes or free some memory"
        )
    return num_blocks, f"{why} = {num_blocks} blocks of {block_size} tokens"
