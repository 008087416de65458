"""Percentiles of benchmarks and simulations."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from headway.percentiles import percentile, percentile_if_any, quantile


@pytest.mark.parametrize("percent", [0, 1, 50, 95, 99, 99.9, 100])
def test_percentiles_are_those_of_numpy(percent: float) -> None:
    values = [4.0, 1.0, 2.5, 9.0, 1.0, 7.0]
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))
    assert percentile([5.0], percent) == 5.0


def test_values_may_be_infinite() -> None:
    assert percentile([1.0, inf, inf], 95) == inf
    assert percentile([1.0, 2.0, 3.0, inf], 50) == 2.5
    assert percentile([1.0, inf], 0) == 1.0


def test_no_values_have_no_percentile() -> None:
    assert percentile_if_any([], 95) is None
    assert percentile_if_any([3.0], 95) == 3.0
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)
