"""Managed fleets of fake engines; what a test starts ends with it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.support.managed_fleets import ManagedFleet

STEP_S = 0.01
FAKE = {"step_s": STEP_S, "num_blocks": 2048}

MakeFleet = Callable[..., ManagedFleet]


@pytest.fixture
def make_fleet(
    tmp_path: Path, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeFleet]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    fleets: list[ManagedFleet] = []
    folder = Path(tempfile.mkdtemp(prefix="fleet-", dir=tmp_path))
    model = Path(shutil.copy(tokenizer_path, folder / "tokenizer.gguf"))

    def make(**given: object) -> ManagedFleet:
        fleet = ManagedFleet(folder, model, fake=FAKE, **given)  # pyright: ignore
        fleets.append(fleet)
        return fleet

    yield make
    for fleet in fleets:
        if fleet.client.has_state:
            fleet.down(is_forced=True)
