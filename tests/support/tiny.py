"""A model small enough to write down, as a checkpoint folder and as a checkpoint in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headway.executors.spec import ModelSpec, spec_from_config
from headway.executors.weights.names import model_shapes
from headway.executors.weights.source_files import SourceFiles

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
}


def tiny_spec(**changes: Any) -> ModelSpec:
    return replace(spec_from_config(CONFIG), **changes)


def tiny_weights(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) * 0.3
        for name, shape in model_shapes(spec).items()
    }


@dataclass
class MemoryCheckpoint:
    spec: ModelSpec
    weights: dict[str, torch.Tensor]
    source: SourceFiles | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.weights.items()}

    def read(self, name: str) -> np.ndarray:
        return self.weights[name].numpy()
