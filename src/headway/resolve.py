"""Resolves "auto": settings, model and hardware in; values and reasons out.

Pure: nothing here measures the machine or changes a setting.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.config import Config
from headway.errors import ConfigError

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Hardware:
    """Cores, memory and instruction sets of this machine."""

    num_cores: int
    available_bytes: int
    isa: tuple[str, ...] = ()
    has_cuda: bool = False
    kernels: str | None = None
    """Best instruction set of the compiled kernels here; None if they were not built."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `resolve` needs to know about a model."""

    max_model_len: int
    num_parameters: int
    kv_values_per_token: int
    """Values in the KV cache per token: layers x 2 x KV heads x head size."""
    kv_heads_per_token: int = 0
    """Layers x 2 x KV heads; an int8 cache has one scale for each."""
    quantization: str | None = None
    """int8 or int4, the nearest to quantized weights of the file; else None."""
    num_int8_parameters: int = 0
    """Parameters that int4 has in int8: tables, and matrices of more than 4 bits in the file."""
    kernel_misfit: str | None = None
    """Why the compiled kernels cannot run the model; None if they can."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings without "auto", and the reason for each choice."""

    dtype: str
    kv_dtype: str
    activation_dtype: str
    """Of the inputs of matrix products."""
    kernels: str | None
    """Instruction set of the compiled kernels; None means plain torch."""
    device: str
    num_threads: int
    max_model_len: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    num_slots: int
    """Blocks that the offload store has room for."""
    reasons: tuple[str, ...]


_DTYPES = {
    "fp32": "fp32",
    "float32": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "int8": "int8",
    "int4": "int4",
}
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0625, "int4": 0.625}
_KV_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
KERNELS = ("plain", "avx2", "avx512", "avx512_vnni", "amx")
_INT8_KERNELS = ("avx2", "avx512", "avx512_vnni")
"""Kernels that multiply int8 activations faster than bf16 ones."""
_KERNEL_TILE = 16
_STORE_SHARE = 16


@dataclass(frozen=True, slots=True)
class _NumberForm:
    """Data types of weights, KV cache and activations, and the kernels to use."""

    dtype: str
    kv_dtype: str
    activation_dtype: str
    kernels: str | None
    reasons: tuple[str, ...]


def resolve(config: Config, model: ModelFacts, hardware: Hardware) -> Resolved:
    """Return values for every "auto", with reasons."""
    device = config.model.device
    if device == "auto":
        device = "cuda" if hardware.has_cuda else "cpu"
    form = _resolve_form(config, model, hardware, device)
    max_model_len = config.model.max_model_len or model.max_model_len
    if not 1 < max_model_len <= model.max_model_len:
        raise ConfigError(
            f"max_model_len must be between 2 and the model's {model.max_model_len}, "
            f"got {max_model_len}"
        )
    num_blocks, why_blocks = _resolve_blocks(config, model, hardware, form, max_model_len)
    block_size = config.cache.block_size
    block_bytes = _block_bytes(config, model, form.kv_dtype)
    num_slots, why_slots = _resolve_slots(config, hardware, block_bytes, num_blocks)
    reasons = [*form.reasons, why_slots, why_blocks]
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
        form.dtype,
        form.kv_dtype,
        form.activation_dtype,
        form.kernels,
        device,
        config.model.num_threads or hardware.num_cores,
        max_model_len,
        block_size,
        num_blocks,
        num_blocks * block_bytes,
        num_slots,
        tuple(reasons),
    )


def weight_bytes(model: ModelFacts, dtype: str) -> int:
    """Return the memory of the weights in a data type."""
    num_bytes = model.num_parameters * WEIGHT_BYTES[dtype]
    if dtype == "int4":
        num_bytes += model.num_int8_parameters * (WEIGHT_BYTES["int8"] - WEIGHT_BYTES["int4"])
    return int(num_bytes)


def _resolve_form(
    config: Config, model: ModelFacts, hardware: Hardware, device: str
) -> _NumberForm:
    kernels, why_not = _usable_kernels(config, model, hardware, device)
    dtype, why = _resolve_dtype(config.model.dtype, model, hardware, kernels)
    if dtype == "fp32":
        kernels = None
    if dtype in ("int8", "int4") and kernels is None:
        raise ConfigError(
            f"dtype {dtype} needs the compiled kernels, and {why_not}; use bf16 or fp32"
        )
    reasons = [f"dtype {dtype}: {why}"]
    if kernels is not None:
        reasons.append(f"compiled kernels: {kernels}")
    else:
        reasons.append(f"plain torch, no compiled kernels: {why_not or 'they have no fp32'}")
    if config.model.deterministic:
        if kernels is None:
            raise ConfigError(
                f"deterministic needs the compiled kernels, and {why_not or f'{dtype} has none'}"
            )
        reasons.append("deterministic: the compiled kernels compute every row by itself")
    asked = config.cache.kv_cache_dtype.lower()
    kv_dtype = ("bf16" if kernels else dtype) if asked == "auto" else _DTYPES.get(asked, asked)
    if kv_dtype not in (("bf16", "int8") if kernels else (dtype,)):
        raise ConfigError(
            f"kv_cache_dtype must be auto, bf16 or int8 with the compiled kernels and follows "
            f"dtype without them ({why_not or dtype}); got {asked!r}"
        )
    activation_dtype, why = _resolve_activations(config.model.activation_dtype, dtype, kernels)
    reasons.append(f"activations {activation_dtype}: {why}")
    return _NumberForm(dtype, kv_dtype, activation_dtype, kernels, tuple(reasons))


def _resolve_activations(asked: str, dtype: str, kernels: str | None) -> tuple[str, str]:
    is_quantized = dtype in ("int8", "int4")
    asked = asked.lower()
    if asked == "auto":
        if kernels is None:
            return dtype, "as the weights"
        if is_quantized and kernels in _INT8_KERNELS:
            return "int8", "this machine multiplies int8 faster than bf16"
        return "bf16", "the compiled kernels' default"
    found = _DTYPES.get(asked, asked)
    if found not in (("bf16", "int8") if is_quantized else (dtype,)):
        raise ConfigError(
            f"activation_dtype must be auto, bf16 or int8 with int8 or int4 weights and follows "
            f"dtype with {dtype} weights; got {asked!r}"
        )
    return found, "as set"


def _usable_kernels(
    config: Config, model: ModelFacts, hardware: Hardware, device: str
) -> tuple[str | None, str]:
    """Return the instruction set for the compiled kernels, or why none is usable."""
    asked, best = config.model.kernels.lower(), hardware.kernels
    if asked not in ("auto", "none", *KERNELS):
        raise ConfigError(
            f"kernels must be auto, none, {', '.join(KERNELS[:-1])} or {KERNELS[-1]}, got {asked!r}"
        )
    if asked == "none":
        return None, "they are turned off"
    if best is None:
        return None, "they were not built (reinstall where a C++ compiler is found)"
    if asked != "auto" and KERNELS.index(asked) > KERNELS.index(best):
        raise ConfigError(f"kernels is {asked}, which this machine lacks; use at most {best}")
    if device != "cpu":
        return None, f"they compute on the CPU, not on {device}"
    if model.kernel_misfit is not None:
        return None, f"the model does not fit them ({model.kernel_misfit})"
    if config.cache.block_size % _KERNEL_TILE:
        return None, f"block_size {config.cache.block_size} is no multiple of {_KERNEL_TILE}"
    return (best if asked == "auto" else asked), ""


def _resolve_dtype(
    asked: str, model: ModelFacts, hardware: Hardware, kernels: str | None
) -> tuple[str, str]:
    if asked.lower() in _DTYPES:
        return _DTYPES[asked.lower()], "as set"
    if asked != "auto":
        raise ConfigError(f"dtype must be auto, fp32, bf16, int8 or int4, got {asked!r}")
    if kernels is not None and model.quantization == "int4":
        share = model.num_int8_parameters / model.num_parameters
        return "int4", f"4-bit blocks of the file stay as they are; {share:.0%} of it is int8"
    if kernels is not None and model.quantization is not None:
        return model.quantization, "nearest to the file"
    if hardware.has_cuda or "amx_bf16" in hardware.isa or "avx512_bf16" in hardware.isa:
        return "bf16", "this machine multiplies bf16 matrices in hardware"
    return "fp32", "this machine has no bf16 matrix instructions"


def _block_bytes(config: Config, model: ModelFacts, kv_dtype: str) -> int:
    num_bytes = model.kv_values_per_token * _KV_BYTES[kv_dtype]
    if kv_dtype == "int8":
        num_bytes += 4 * model.kv_heads_per_token
    return config.cache.block_size * num_bytes


def _resolve_blocks(
    config: Config, model: ModelFacts, hardware: Hardware, form: _NumberForm, max_model_len: int
) -> tuple[int, str]:
    block_size = config.cache.block_size
    block_bytes = _block_bytes(config, model, form.kv_dtype)
    asked = config.cache.kv_cache_memory_bytes
    if asked is not None:
        num_blocks = asked // block_bytes
        why = f"KV cache {asked / GIB:.2f} GiB: as set"
    else:
        num_copies = 2 if config.supervision.standby else 1
        needed = num_copies * weight_bytes(model, form.dtype)
        free = max(0, hardware.available_bytes - needed)
        per_request = -(-max_model_len // block_size)
        wanted = per_request * config.scheduler.max_num_seqs
        num_blocks = min(free // 2 // block_bytes, wanted)
        limit = "half of the free memory" if num_blocks < wanted else "room for every sequence"
        why = (
            f"KV cache {num_blocks * block_bytes / GIB:.2f} GiB: {limit} "
            f"({free / GIB:.1f} GiB free after the weights"
            f"{' of engine and standby' if config.supervision.standby else ''})"
        )
    if num_blocks < 1:
        raise ConfigError(
            f"the KV cache has room for no block ({block_bytes} bytes each); "
            f"raise kv_cache_memory_bytes or free some memory"
        )
    return num_blocks, f"{why} = {num_blocks} blocks of {block_size} tokens"


def _resolve_slots(
    config: Config, hardware: Hardware, block_bytes: int, num_blocks: int
) -> tuple[int, str]:
    """Return the size of the offload store, and the reason.

    The default is a quarter of the KV cache, bounded by a share of the free memory.
    """
    asked = config.cache.preemption_store_bytes
    if asked is not None:
        num_slots, why = asked // block_bytes, "as set"
    else:
        in_memory = hardware.available_bytes // _STORE_SHARE // block_bytes
        num_slots, why = min(num_blocks // 4, in_memory), "a quarter of the KV cache"
        if num_slots == in_memory:
            why = f"1/{_STORE_SHARE} of the free memory"
    size = f"{num_slots * block_bytes / GIB:.2f} GiB"
    return num_slots, f"offload store {size}: {why} = {num_slots} blocks"
