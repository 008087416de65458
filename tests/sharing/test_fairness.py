"""A slice of the battery on fair shares: the same scenarios, shorter, one seed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.sim.fair_load import equal, flood, short_against_long
from benchmarks.sim.fair_rig import ServiceLog, jain, widest_gap
from benchmarks.sim.fairness import failures_in, run_scenario, worst_of


@pytest.mark.parametrize(
    ("scenario", "missed_by_fcfs"),
    [(equal(2, 96), None), (short_against_long(), "Jain"), (flood(10, 10), "TTFT")],
    ids=lambda value: getattr(value, "name", ""),
)
def test_fair_shares_keep_the_bars(scenario: Any, missed_by_fcfs: str | None) -> None:
    row = run_scenario(scenario, [1], 60.0)
    assert failures_in([row], "fair") == []
    missed = failures_in([row], "fcfs")
    if missed_by_fcfs is None:
        assert missed == []
    else:
        assert any(missed_by_fcfs in failure for failure in missed)
    assert failures_in([row], "priority") != []
    assert worst_of(row, "fair")["gap"], "nobody was ever measured against anybody"


def test_the_widest_gap_is_within_one_stretch_of_waiting() -> None:
    service = [[0.0, 0.0], [5.0, 1.0], [6.0, 9.0], [60.0, 9.0], [61.0, 9.0], [62.0, 11.0]]
    is_waiting = [[True, True]] * 3 + [[True, False]] + [[True, True]] * 2
    log = ServiceLog(list(map(float, range(6))), service, is_waiting)
    # Between the second and the third step: 4 ahead, then 3 behind.
    assert widest_gap(log) == 7.0


def test_jain() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0]) == pytest.approx(0.5)
