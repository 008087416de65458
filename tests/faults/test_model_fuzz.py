"""A model file that is nearly right is loaded or refused; scripts/test-sanitizers runs more."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.faults.model_fuzz import check_seeds, run

NUM_FILES = 100
SEED = 2
MAX_BYTES = 256 * 1024**2


def test_unchanged_files_load_in_every_form(tmp_path: Path) -> None:
    check_seeds(tmp_path)


def test_changed_files_are_loaded_or_refused(tmp_path: Path) -> None:
    with np.errstate(all="ignore"):  # files full of NaN
        report = run(tmp_path, NUM_FILES, SEED)
    assert report.defects == []
    assert 0 < report.num_good < report.num_refused
    # Shapes that would fill the memory are refused before they are allocated.
    assert report.grown_bytes < MAX_BYTES
