"""Fixtures shared by every test folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The real test model. Without it, its tests fail; `-m "not model"` leaves them out."""
    result = subprocess.run(
        [ROOT / "scripts" / "get-test-model"], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        pytest.fail(f"the test model is out of reach: {result.stderr.strip()}")
    return Path(result.stdout.strip().splitlines()[-1])
