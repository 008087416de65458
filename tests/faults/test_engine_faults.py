"""A slice of the fault battery: one fault of most kinds, with the real model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.faults.engine_faults import KINDS, failures_in, run
from benchmarks.faults.streams import make_jobs

pytestmark = pytest.mark.model

LEFT_OUT = ("SIGSTOP", "100x slow step", "MemoryError in the step", "corrupt command frame")
"""The first two take long, the others are much like those that stay; the whole battery has all."""


async def test_one_fault_of_most_kinds(model_path: Path, tmp_path: Path) -> None:
    kinds = [kind for kind in KINDS if kind not in LEFT_OUT]
    report = await run(model_path, 1, 4, tmp_path, kinds, make_jobs(4, max_output=32))
    # As text, because pytest cuts a dictionary short.
    assert not failures_in(report), json.dumps(report, indent=2)
    assert report["answers_the_same"] > 0
    assert all(report["kinds"][kind]["injected"] == 1 for kind in kinds)
