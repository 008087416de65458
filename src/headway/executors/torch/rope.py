"""Rotary positions: frequencies at load, cosines and sines once per step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headway.executors.spec import LinearScaling, Llama3Scaling, ModelSpec


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


def rope_frequencies(spec: ModelSpec, factors: torch.Tensor | None = None) -> torch.Tensor:
    """Return one frequency per pair; `factors` divide them if the checkpoint has factors."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    if factors is not None:
        return frequencies / factors
    match spec.rope_scaling:
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)
        case _:
            return frequencies


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    # The number of turns within the original context selects the scaling of a frequency.
    turns = scaling.original_max_len * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor
