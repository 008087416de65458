"""Loads a model in two steps:

checkpoint = open_checkpoint(source)       reads headers; `checkpoint.spec.facts` sizes the rest
load_executor(checkpoint, resolved, ...)   reads weights and allocates the KV store
"""

from __future__ import annotations

import torch

from headway.clock import Clock
from headway.errors import ConfigError
from headway.executors.cpu.compiled import CompiledModel
from headway.executors.torch.eager import EagerModel
from headway.executors.torch.executor import TorchExecutor
from headway.executors.torch.model import Decoder, Progress
from headway.executors.torch.step_model import ModelOptions, StepModel
from headway.executors.torch.weights import Checkpoint, facts_of, open_checkpoint
from headway.resolve import Resolved

__all__ = [
    "ModelOptions",
    "TorchExecutor",
    "facts_of",
    "load_decoder",
    "load_executor",
    "load_model",
    "open_checkpoint",
    "options_of",
]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_executor(
    checkpoint: Checkpoint, resolved: Resolved, clock: Clock, progress: Progress | None = None
) -> TorchExecutor:
    """Read the weights and allocate the KV store; return the executor."""
    model = load_model(checkpoint, options_of(resolved), progress)
    return TorchExecutor(model, resolved.max_model_len, clock)


def options_of(resolved: Resolved) -> ModelOptions:
    """Return the model options of resolved settings."""
    return ModelOptions(
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        kernels=resolved.kernels,
        num_threads=resolved.num_threads,
        device=resolved.device,
        num_blocks=resolved.num_blocks,
        num_slots=resolved.num_slots,
        block_size=resolved.block_size,
        max_model_len=resolved.max_model_len,
    )


def load_model(
    checkpoint: Checkpoint, options: ModelOptions, progress: Progress | None = None
) -> StepModel:
    """Return the model, compiled or in plain torch."""
    if options.kernels is not None:
        return CompiledModel(checkpoint, options, progress)
    decoder = load_decoder(checkpoint, options.dtype, options.device, progress)
    return EagerModel(decoder, options.num_blocks, options.block_size, options.num_slots)


def load_decoder(
    checkpoint: Checkpoint, dtype: str, device: str = "cpu", progress: Progress | None = None
) -> Decoder:
    """Return the plain torch model; `dtype` also applies to the KV store."""
    if dtype not in _DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; known: {', '.join(_DTYPES)}")
    with torch.inference_mode():
        return Decoder.load(checkpoint, _DTYPES[dtype], torch.device(device), progress)
