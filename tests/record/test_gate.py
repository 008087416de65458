"""Committed recordings of the real model: every plan of them is the same again."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.record.entries import AbortEntry, AddEntry
from headway.record.kinds import ENGINE
from headway.record.reader import RecordingReader, find_recordings
from tests.record.support import replay

DATA = Path(__file__).parent / "data"
PATHS = find_recordings([DATA])
MIN_STEPS = 1500
AGAIN = """
`headway replay tests/record/data` shows the first plan that differs. If the change is meant:
    rm tests/record/data/*
    python -m benchmarks.live.record_steps "$model" --life 30 --steps 1500 \\
        --folder tests/record/data
"""


def test_every_plan_of_the_real_model_is_the_same_again():
    found = {path.name: replay(path) for path in PATHS}
    different = {name: one.difference for name, one in found.items() if one.difference}
    if different:
        pytest.fail(f"{different}\n{AGAIN}", pytrace=False)
    assert sum(one.num_steps for one in found.values()) > MIN_STEPS


def test_the_recordings_have_what_makes_plans_differ():
    entries = [entry for path in PATHS for entry in RecordingReader.open(path, ENGINE).entries()]
    adds = [entry for entry in entries if isinstance(entry, AddEntry)]
    assert len({entry.terms.weight for entry in adds}) > 1
    assert max(entry.n for entry in adds) > 1
    assert any(entry.terms.targets.ttft_s for entry in adds)
    assert any(entry.terms.is_spot for entry in adds)
    assert any(entry.is_resent for entry in adds)
    assert any(isinstance(entry, AbortEntry) for entry in entries)
