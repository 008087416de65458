"""The decoder of the Llama, Mistral, Qwen2 and Qwen3 families.

It knows tensors and positions, not requests. Query, key and value weights are merged into one
product, and so are gate and up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headway.executors.rope import rope_frequencies
from headway.executors.spec import ModelSpec
from headway.executors.torch.attention import attend
from headway.executors.torch.inputs import BatchInputs
from headway.executors.torch.kv_store import KVStore
from headway.executors.torch.layers import Linear, Norm, linear, rms_norm, rotate, silu_and_mul
from headway.executors.torch.rope import Rotation, rotation
from headway.executors.weights import Checkpoint
from headway.executors.weights.names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ROPE_FACTORS,
    layer_prefix,
)
from headway.executors.weights.reader import Progress, WeightReader


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer."""

    attention_norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    o: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights and the forward pass."""

    def __init__(self, spec: ModelSpec, reader: TensorReader) -> None:
        self.spec = spec
        self.dtype = reader.dtype
        self.device = reader.device
        self._embedding = reader.tensor(EMBEDDING)
        self._layers = [_read_layer(spec, reader, layer) for layer in range(spec.num_layers)]
        self._norm = Norm(reader.tensor(FINAL_NORM), spec.rms_norm_eps)
        head = self._embedding if spec.tie_embeddings else reader.tensor(HEAD)
        self._head = Linear(head)
        self._frequencies = reader.frequencies(spec)

    @staticmethod
    def load(
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None = None,
    ) -> Decoder:
        """Read every weight as `dtype`; calls `progress` with (done, total) tensors."""
        reader = TensorReader(WeightReader(checkpoint, progress), dtype, device)
        return Decoder(checkpoint.spec, reader)

    def forward(self, inputs: BatchInputs, store: KVStore) -> torch.Tensor:
        """Run all layers, write the KV store, return one hidden state per token."""
        turned = rotation(self._frequencies, inputs.positions)
        store.clear(inputs.begun_blocks)
        hidden = F.embedding(inputs.token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = rms_norm(hidden, layer.attention_norm)
            queries, keys, values = self._project(layer, normed, turned)
            store.write(index, inputs.slots, keys, values)
            groups = inputs.groups[self.spec.windows[index]]
            mixed = attend(queries, groups, store, index).flatten(1)
            hidden = hidden + linear(mixed, layer.o)
            normed = rms_norm(hidden, layer.mlp_norm)
            hidden = hidden + linear(silu_and_mul(linear(normed, layer.gate_up)), layer.down)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits; callers pass only the rows that sample."""
        return linear(self.final_norm(hidden), self._head)

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of the head, which is also the embedding of a text."""
        return rms_norm(hidden, self._norm)

    def _project(
        self, layer: DecoderLayer, hidden: torch.Tensor, turned: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        num_heads, num_kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        heads = linear(hidden, layer.qkv).view(hidden.shape[0], -1, self.spec.head_dim)
        rotated, values = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if layer.q_norm and layer.k_norm:
            queries, keys = rotated.split((num_heads, num_kv_heads), dim=1)
            queries, keys = rms_norm(queries, layer.q_norm), rms_norm(keys, layer.k_norm)
            rotated = torch.cat((queries, keys), dim=1)
        queries, keys = rotate(rotated, turned).split((num_heads, num_kv_heads), dim=1)
        return queries, keys, values


class TensorReader:
    """Reads weights as tensors of one data type on one device."""

    def __init__(self, reader: WeightReader, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._reader = reader

    def tensor(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self._reader.read(name)).to(self.device, self.dtype)

    def frequencies(self, spec: ModelSpec) -> torch.Tensor:
        """Return the frequencies of the rotary positions, always in fp32."""
        factors = self._reader.read(ROPE_FACTORS) if self._reader.has(ROPE_FACTORS) else None
        return torch.from_numpy(rope_frequencies(spec, factors)).to(self.device)

    def linear(self, *names: str) -> Linear:
        """Return one linear layer; layers that share their input are merged."""
        weight = torch.cat([self.tensor(f"{name}.weight") for name in names])
        if not self._reader.has(f"{names[0]}.bias"):
            return Linear(weight)
        return Linear(weight, torch.cat([self.tensor(f"{name}.bias") for name in names]))


def _read_layer(spec: ModelSpec, reader: TensorReader, layer: int) -> DecoderLayer:
    prefix = layer_prefix(layer)
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."

    def norm(name: str) -> Norm:
        return Norm(reader.tensor(f"{name}.weight"), spec.rms_norm_eps)

    return DecoderLayer(
        attention_norm=norm(f"{prefix}input_layernorm"),
        qkv=reader.linear(f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj"),
        q_norm=norm(f"{attention}q_norm") if spec.has_qk_norm else None,
        k_norm=norm(f"{attention}k_norm") if spec.has_qk_norm else None,
        o=reader.linear(f"{attention}o_proj"),
        mlp_norm=norm(f"{prefix}post_attention_layernorm"),
        gate_up=reader.linear(f"{mlp}gate_proj", f"{mlp}up_proj"),
        down=reader.linear(f"{mlp}down_proj"),
    )
