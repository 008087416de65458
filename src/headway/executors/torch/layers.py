"""Arithmetic of a layer apart from attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headway.executors.torch.rope import Rotation


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight of [out, in] and an optional bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """Weight and epsilon of an RMS norm."""

    weight: torch.Tensor
    eps: float


def linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """Return the product with the weight, plus the bias."""
    return F.linear(x, layer.weight, layer.bias)


def rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return the RMS norm over the last axis; mean square in fp32 for any dtype."""
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Return [tokens, heads, head_dim] rotated to the positions, rounded once."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * rotation.cos, swapped, rotation.sin).to(x.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
