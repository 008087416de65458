"""Loads models with given settings and a KV store, for quality runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.live.perplexity import BLOCK_SIZE, NUM_BLOCKS, WINDOW
from headway.config import CacheConfig, Config, ModelConfig
from headway.executors.hardware import probe_hardware
from headway.executors.load import facts_of, load_model, open_checkpoint, options_of
from headway.executors.source import locate
from headway.executors.step_model import StepModel
from headway.resolve import resolve


@dataclass(frozen=True, slots=True)
class Form:
    """Data types of weights, KV cache and activations."""

    dtype: str
    kv_dtype: str = "auto"
    activation_dtype: str = "auto"

    def __str__(self) -> str:
        return f"{self.dtype:5s} {self.kv_dtype:5s} {self.activation_dtype:5s}"


FP32 = Form("fp32")


def load(model: Path | str, form: Form) -> StepModel:
    """Load a model on the CPU, with the compiled kernels where the settings allow them."""
    checkpoint = open_checkpoint(locate(str(model)))
    config = Config(
        # Torch has the number of threads of this process.
        model=ModelConfig(
            dtype=form.dtype,
            activation_dtype=form.activation_dtype,
            device="cpu",
            num_threads=torch.get_num_threads(),
        ),
        cache=CacheConfig(block_size=BLOCK_SIZE, kv_cache_dtype=form.kv_dtype),
    )
    resolved = resolve(config, facts_of(checkpoint), probe_hardware())
    options = replace(options_of(resolved), num_blocks=NUM_BLOCKS, max_model_len=WINDOW)
    return load_model(checkpoint, options)
