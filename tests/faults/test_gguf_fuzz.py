"""A model file is input from a stranger: a broken one is refused, quickly and in bounded memory."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from headway.errors import ModelLoadError
from headway.gguf_header import read_header
from headway.text import Tokenizer
from tests.faults.gguf_mutate import ODD_COUNTS, mutated_files, seed_files

NUM_FILES = 2000
SEED = 1
MAX_S = 1.0
MAX_BYTES = 64 * 1024**2


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return seed_files(tmp_path_factory.mktemp("gguf"))


def load(path: Path) -> bool:
    """Whether the file was good after all; whatever else is raised is a defect."""
    try:
        read_header(path)
        tokenizer = Tokenizer.from_gguf(path)
    except ModelLoadError:
        return False
    tokenizer.decode(tokenizer.encode("hi 1234 \u4f60"))
    return True


@pytest.mark.timing
def test_mutated_files_are_refused_or_good(seeds: list[bytes], tmp_path: Path) -> None:
    path, num_good, slowest_s = tmp_path / "mutated.gguf", 0, 0.0
    for place, data in enumerate(mutated_files(seeds, NUM_FILES, SEED)):
        path.write_bytes(data)
        started_at = time.monotonic()
        try:
            num_good += load(path)
        except Exception as error:
            pytest.fail(f"file {place} of seed {SEED}: {error!r}")
        slowest_s = max(slowest_s, time.monotonic() - started_at)
    assert 0 < num_good < NUM_FILES / 2
    assert slowest_s < MAX_S


def test_no_count_becomes_an_allocation(seeds: list[bytes], tmp_path: Path) -> None:
    """Every place where a count can stand, with every odd count, one at a time."""
    path, data = tmp_path / "counted.gguf", seeds[0]
    tracemalloc.start()
    try:
        for at in (8, 16, *range(24, 200)):
            for count in ODD_COUNTS:
                path.write_bytes(data[:at] + struct.pack("<Q", count) + data[at + 8 :])
                load(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MAX_BYTES


def test_every_cut_is_refused(seeds: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for data in seeds:
        ends = {*range(400), *range(400, len(data) - 64, 97)}
        for end in sorted(ends):
            path.write_bytes(data[:end])
            with pytest.raises(ModelLoadError):
                read_header(path)
