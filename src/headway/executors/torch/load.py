"""The way in, in steps a caller can stop between:

checkpoint = open_checkpoint(source)       headers only; `checkpoint.spec.facts` sizes the rest
decoder = load_decoder(checkpoint, ...)    weights
TorchExecutor(decoder, num_blocks, ...)    KV store
"""

from __future__ import annotations

import torch

from headway.errors import ConfigError
from headway.executors.torch.executor import TorchExecutor
from headway.executors.torch.model import Decoder, Progress
from headway.executors.torch.weights import Checkpoint, open_checkpoint

__all__ = ["TorchExecutor", "load_decoder", "open_checkpoint"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_decoder(
    checkpoint: Checkpoint, dtype: str, device: str = "cpu", progress: Progress | None = None
) -> Decoder:
    """Read the weights; `dtype` is also that of the KV store."""
    if dtype not in _DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; known: {', '.join(_DTYPES)}")
    with torch.inference_mode():
        return Decoder.load(checkpoint, _DTYPES[dtype], torch.device(device), progress)
