"""Steal of a run: read from the counters of Linux, and marked when it is high."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.bench.steal import Steal, StealMeter, highest_steal, steal_plain, steal_text

#               user nice system idle iowait irq softirq steal guest guest_nice
BEFORE = "cpu  1000 10 200 90000 50 5 15 100 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n"


def meter_at(stat: Path, content: str) -> StealMeter:
    stat.write_text(content)
    return StealMeter(stat)


@pytest.mark.parametrize(
    ("after", "share", "text"),
    [
        ("cpu  1090 10 200 99999 99 5 15 110 0 0\n", 0.1, "steal 10.0 %: repeat it"),
        ("cpu  1097 10 200 90000 50 5 15 103 0 0\n", 0.03, "steal 3.0 %"),
        ("cpu  1060 15 220 90000 50 8 25 102 0 0\n", 0.02, "steal 2.0 %"),
        ("cpu  1000 10 200 99999 50 5 15 100 0 0\n", 0.0, "steal 0.0 %"),
    ],
)
def test_the_share_is_of_the_busy_time(tmp_path: Path, after: str, share: float, text: str):
    stat = tmp_path / "stat"
    meter = meter_at(stat, BEFORE)
    stat.write_text(after)
    steal = meter.read()
    assert steal is not None
    assert steal.share == pytest.approx(share)
    assert str(steal) == text
    assert steal_plain(steal) == {"share": steal.share, "is_high": share > 0.03}


@pytest.mark.parametrize("content", ["", "cpu", "cpu  1 2 3 4 5 6 7\n", "cpu  a b c d e f g h\n"])
def test_counters_that_cannot_be_read_are_unknown(tmp_path: Path, content: str):
    assert meter_at(tmp_path / "stat", content).read() is None


def test_a_system_without_counters_has_null(tmp_path: Path):
    steal = StealMeter(tmp_path / "missing").read()
    assert steal is None
    assert steal_plain(steal) is None
    assert steal_text(steal) == "steal unknown"


def test_the_highest_of_several_runs():
    runs = [Steal.of(0.01), None, Steal.of(0.05)]
    assert highest_steal(runs) == Steal(0.05, is_high=True)
    assert highest_steal([None]) is None
