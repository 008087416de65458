"""The arithmetic of a layer apart from attention: the seams where compiled kernels can go."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from headway.executors.torch.rope import Rotation


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight of [out, in] and perhaps a bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm's weight and epsilon."""

    weight: torch.Tensor
    eps: float


def linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """The product with the layer's weight, plus its bias."""
    return F.linear(x, layer.weight, layer.bias)


def rms_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Over the last axis; the mean of squares is taken in fp32 for any dtype."""
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.eps)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate [tokens, heads, head_dim] to the positions of `rotation`, rounding once at the end."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * rotation.cos, swapped, rotation.sin).to(x.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
