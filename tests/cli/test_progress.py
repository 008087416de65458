"""Progress of long work where standard error is no terminal."""

from __future__ import annotations

import pytest

from headway.cli import progress


def test_lines_come_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(progress, "monotonic", lambda: now)
    with progress.progress_bar("measuring, seconds") as show:
        for now in (101.0, 129.0, 131.0, 140.0, 165.0):
            show(now - 100.0, 1800)
    assert capsys.readouterr().err.splitlines() == [
        "measuring, seconds: 31 of 1,800",
        "measuring, seconds: 65 of 1,800",
    ]
