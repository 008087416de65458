"""Waiting time by cause: the columns hold every second once, where it was waited."""

from __future__ import annotations

import random

import pytest

from headway.dashboard.waits import (
    INTERVAL_S,
    NUM_INTERVALS,
    SecondsSeries,
    WaitHistory,
    open_waits,
)
from headway.observe.trace.account import CauseShare

WINDOW_S = INTERVAL_S * NUM_INTERVALS


def naive(waits: list[tuple[float, float, float]], now: float) -> list[float]:
    """The same columns, wait by wait and interval by interval."""
    newest = int(now // INTERVAL_S)
    columns = []
    for number in range(newest - NUM_INTERVALS + 1, newest + 1):
        low, high = number * INTERVAL_S, (number + 1) * INTERVAL_S
        total = 0.0
        for start, end, seconds in waits:
            overlap = max(0.0, min(high, end) - max(low, start))
            total += seconds * overlap / (end - start)
        columns.append(total)
    return columns


@pytest.mark.parametrize("seed", range(5))
def test_columns_equal_those_of_a_plain_sum(seed: int) -> None:
    draw = random.Random(seed)
    now, waits = 1000.0, list[tuple[float, float, float]]()
    series = SecondsSeries(int(now // INTERVAL_S))
    for _ in range(400):
        # Some waits are longer than the window, and some pauses as well.
        now += draw.expovariate(1 / 4) + (2 * WINDOW_S if draw.random() < 0.002 else 0)
        series.advance(int(now // INTERVAL_S))
        length = draw.choice((0.001, 1.0, 30.0, 900.0)) * draw.uniform(0.5, 1.5)
        seconds = length * draw.random()
        series.add(now - length, now, seconds)
        waits.append((now - length, now, seconds))
    assert series.column() == pytest.approx(naive(waits, now), abs=1e-6)


def test_causes_add_up_to_the_waits_and_the_height_is_the_number_that_waited() -> None:
    history = WaitHistory()
    now = 2000.0
    history.advance(int(now // INTERVAL_S))
    shares = (CauseShare("kv_blocks", 30.0), CauseShare("tenant_share", 10.0))
    assert history.add(shares, now) == 40.0
    assert history.add(shares[1:], now) == 10.0
    columns = history.columns()
    assert sum(columns["kv_blocks"]) == pytest.approx(30.0)
    assert sum(columns["tenant_share"]) == pytest.approx(20.0)
    heights = [sum(column) / INTERVAL_S for column in zip(*columns.values(), strict=True)]
    # One request waited for 40 s, and another beside it for the last 10 s.
    assert heights[-10:-1] == pytest.approx([0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0])


def test_waits_that_have_not_ended() -> None:
    now = 5000.0
    column = open_waits([now - 12.0, now - 2 * WINDOW_S, now], now)
    assert sum(column) == pytest.approx(12.0 + (WINDOW_S - INTERVAL_S))
    assert sum(open_waits([], now)) == 0.0
