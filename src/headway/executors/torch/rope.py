"""Rotary positions: cosines and sines, once per step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines, [tokens, 1, head_dim] each, in fp32 because angles grow with position.

    A pair is (x[i], x[i + half]). `sin` is negative in its first half, so that rotating is x * cos
    + swapped(x) * sin.
    """

    cos: torch.Tensor
    sin: torch.Tensor


def rotation(frequencies: torch.Tensor, positions: torch.Tensor) -> Rotation:
    """Return the rotation for these positions; all layers share it."""
    angles = (positions.float().unsqueeze(1) * frequencies).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
