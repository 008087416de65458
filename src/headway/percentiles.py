"""Percentiles, linear between two values, as numpy computes them by default."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of ordered values; raise ValueError without values."""
    if not ordered:
        raise ValueError("no values have no quantile")
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    if position == low or ordered[low] == ordered[high]:  # values may be infinite
        return ordered[low]
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of values in any order; raise ValueError without values."""
    return quantile(sorted(values), percent / 100)


def percentile_if_any(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile of values in any order; None without values."""
    return percentile(values, percent) if values else None
