"""A slice of the fault battery: one fault of most kinds, with the real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults.engine_faults import KINDS, failures_in, run

pytestmark = pytest.mark.model

LEFT_OUT = ("SIGSTOP", "100x slow step", "MemoryError in the step")
"""The first two take their time, the last is much like an exception; the whole battery has them."""


async def test_one_fault_of_most_kinds(model_path: Path, tmp_path: Path) -> None:
    kinds = [kind for kind in KINDS if kind not in LEFT_OUT]
    report = await run(model_path, 1, 6, tmp_path, kinds, num_jobs=8)
    assert not failures_in(report), report
    assert report["answers_the_same"] > 0
    assert all(report["kinds"][kind]["injected"] == 1 for kind in kinds)
