"""Fleets of fake engines; what a test starts ends with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.support.fleets import Fleet


@pytest.fixture
def fleet(tmp_path: Path, tokenizer_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, tokenizer_path)
    yield fleet
    fleet.close()
