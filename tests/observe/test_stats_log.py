"""The statistics line from hand-made events."""

from __future__ import annotations

from headway.core.events import Admitted, Arrived, Finished, Forked, TokensEmitted
from headway.core.request import FinishReason
from headway.observe import RequestTable, StatsLog
from tests.observe.test_metrics import step


def test_one_line_sums_up_an_interval() -> None:
    table = RequestTable()
    stats = StatsLog(table)
    stats.consume(
        table.consume(
            [
                Arrived("a", 1.0, 40),
                Arrived("b", 1.0, 10),
                Admitted("a", 1.0, 0.0, 30, 40, False),
                TokensEmitted("a", (1, 2, 3, 4, 5), None),
                step(2.0, num_waiting=1),
            ]
        )
    )
    assert stats.line(10.0) == (
        "running 1, waiting 1, KV 25.0%, prompt 4.0 tok/s, output 0.5 tok/s, prefix hits 75.0%"
    )


def test_the_first_line_begins_at_the_start() -> None:
    table = RequestTable()
    stats = StatsLog(table)
    stats.start(8.0)
    stats.consume(table.consume([Arrived("a", 9.0, 4), TokensEmitted("a", (1, 2), None)]))
    assert "output 1.0 tok/s" in (stats.line(10.0) or "")


def test_silent_when_idle_after_one_last_line() -> None:
    table = RequestTable()
    stats = StatsLog(table)
    assert stats.line(10.0) is None
    stats.consume(table.consume([Arrived("a", 11.0, 4), Forked("a#1", 12.0, "a"), step(12.0)]))
    assert stats.line(20.0) is not None
    # Nothing happens in a whole interval, but requests are there: that is worth a line.
    assert "running 1" in (stats.line(30.0) or "")
    stats.consume(
        table.consume(
            [
                Finished("a", 31.0, FinishReason.ABORT, 0),
                Finished("a#1", 31.0, FinishReason.ABORT, 0),
            ]
        )
    )
    assert (stats.line(40.0) or "").startswith("running 0, waiting 0, KV 0.0%")
    assert (stats.line(50.0) or "").startswith("running 0, waiting 0, KV 0.0%")
    assert stats.line(60.0) is None


def test_a_resumed_request_is_no_new_prompt() -> None:
    table = RequestTable()
    stats = StatsLog(table)
    stats.consume(table.consume([Arrived("a", 0.0, 10), Admitted("a", 0.0, 0.0, 0, 10, True)]))
    assert "prompt 0.0 tok/s" in (stats.line(1.0) or "")
