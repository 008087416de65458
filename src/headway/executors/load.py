"""Loads a model in two steps:

checkpoint = open_checkpoint(source)       reads headers; `checkpoint.spec.facts` sizes the rest
load_executor(checkpoint, resolved, ...)   reads weights and allocates the KV store
"""

from __future__ import annotations

from pathlib import Path

from headway.clock import Clock
from headway.errors import ModelLoadError
from headway.executors.executor import ModelExecutor
from headway.executors.step_model import DEFAULT_LOADING, ModelLoading, ModelOptions, StepModel
from headway.executors.weights import Checkpoint, facts_of, open_checkpoint
from headway.resolve import Resolved

__all__ = [
    "ModelExecutor",
    "ModelLoading",
    "ModelOptions",
    "facts_of",
    "has_cuda",
    "load_executor",
    "load_model",
    "open_checkpoint",
    "options_of",
]

_GPU_FILES = ("nvidia[0-9]*", "kfd", "dxg")
"""Device files of NVIDIA, of AMD, and of either in WSL."""


def load_executor(
    checkpoint: Checkpoint,
    resolved: Resolved,
    clock: Clock,
    loading: ModelLoading = DEFAULT_LOADING,
) -> ModelExecutor:
    """Read the weights and allocate the KV store; return the executor."""
    model = load_model(checkpoint, options_of(resolved), loading)
    return ModelExecutor(model, resolved.max_model_len, clock)


def options_of(resolved: Resolved) -> ModelOptions:
    """Return the model options of resolved settings."""
    return ModelOptions(
        dtype=resolved.dtype,
        kv_dtype=resolved.kv_dtype,
        activation_dtype=resolved.activation_dtype,
        kernels=resolved.kernels,
        num_threads=resolved.num_threads,
        device=resolved.device,
        num_blocks=resolved.num_blocks,
        num_slots=resolved.num_slots,
        block_size=resolved.block_size,
        max_model_len=resolved.max_model_len,
    )


def load_model(
    checkpoint: Checkpoint, options: ModelOptions, loading: ModelLoading = DEFAULT_LOADING
) -> StepModel:
    """Return the model, compiled or in plain torch; only the latter needs torch."""
    if options.kernels is not None:
        from headway.executors.cpu.compiled import CompiledModel

        return CompiledModel(checkpoint, options, loading)
    try:
        from headway.executors.torch.eager import load_eager
    except ModuleNotFoundError as error:
        raise ModelLoadError(
            f"{options.dtype} weights on {options.device} run in plain torch here, which is not "
            "installed: pip install 'headway[torch]'; `headway doctor MODEL` says why"
        ) from error
    model = load_eager(checkpoint, options, loading.progress)
    loading.when_packed()
    return model


def has_cuda() -> bool:
    """Whether torch is installed and has a CUDA device.

    Importing torch takes seconds, so only a machine with the device files of a GPU pays for it.
    """
    if not any(path for pattern in _GPU_FILES for path in Path("/dev").glob(pattern)):
        return False
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return torch.cuda.is_available()
