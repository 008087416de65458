"""Fixtures shared by every test folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The real test model; tests that need it are marked `model`."""
    script = ROOT / "scripts" / "get-test-model"
    if not script.is_file():
        pytest.skip("scripts/get-test-model is missing")
    result = subprocess.run([script], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.skip(f"the test model is out of reach: {result.stderr.strip()}")
    return Path(result.stdout.strip().splitlines()[-1])
