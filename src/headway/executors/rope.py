"""Frequencies of the rotary positions."""

from __future__ import annotations

import math

import numpy as np

from headway.executors.spec import LinearScaling, Llama3Scaling, ModelSpec


def rope_frequencies(spec: ModelSpec, factors: np.ndarray | None = None) -> np.ndarray:
    """Return one frequency per pair; `factors` divide them if the checkpoint has factors."""
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float32) / np.float32(spec.head_dim)
    frequencies = np.float32(1.0) / np.float32(spec.rope_theta) ** exponents
    if factors is not None:
        return frequencies / factors
    match spec.rope_scaling:
        case LinearScaling(factor):
            return frequencies / np.float32(factor)
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)
        case _:
            return frequencies


def _llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    # The number of turns within the original context selects the scaling of a frequency.
    turns = scaling.original_max_len * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return (kept * frequencies + (1.0 - kept) * frequencies / scaling.factor).astype(np.float32)
