"""Packed weights from the cache are those of the checkpoint, whatever happened to the file."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from headway.executors.cpu import kernels
from headway.executors.cpu.compiled import CompiledModel
from headway.executors.cpu.packed_cache import (
    CacheKey,
    Matrix,
    PackedCache,
    PackedMatrix,
    make_key,
)
from headway.executors.cpu.packing import STORING
from headway.executors.step_model import ModelLoading, ModelOptions, Span
from headway.executors.weights.source_files import SourceFiles
from tests.support.tiny import MemoryCheckpoint, tiny_spec, tiny_weights

pytestmark = pytest.mark.skipif(
    kernels.best_isa() is None, reason="the compiled kernels are not built"
)

SPEC = tiny_spec(hidden_size=64, intermediate_size=96, head_dim=32, vocab_size=48)
MIB = 1024**2


@dataclass
class CountedCheckpoint(MemoryCheckpoint):
    """Counts the matrices that are read."""

    reads: list[str] = field(default_factory=list[str])

    def read(self, name: str) -> np.ndarray:
        if self.weights[name].ndim == 2:
            self.reads.append(name)
        return super().read(name)


@dataclass
class Loader:
    """Loads a model of one file through a cache."""

    file: Path
    cache: PackedCache
    seed: int = 0

    def load(self, dtype: str = "int4") -> tuple[np.ndarray, int]:
        """Return logits, and the number of matrices that came from the checkpoint."""
        source = SourceFiles.of(self.file, [self.file])
        checkpoint = CountedCheckpoint(SPEC, tiny_weights(SPEC, self.seed), source)
        options = ModelOptions(
            dtype=dtype, num_blocks=4, block_size=16, max_model_len=64, kernels="plain"
        )
        model = CompiledModel(checkpoint, options, ModelLoading(cache=self.cache))
        wait_stored()
        return model.logits([Span([1, 2, 3], 0, [0])], [2]), len(checkpoint.reads)

    @property
    def entry(self) -> Path:
        (entry,) = self.cache.entries()
        return entry.path


def wait_stored() -> None:
    for thread in threading.enumerate():
        if thread.name == STORING:
            thread.join(30.0)


@pytest.fixture
def loader(tmp_path: Path) -> Loader:
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(1000))
    return Loader(file, PackedCache(tmp_path / "a" / "cache", 100 * MIB))


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int4"])
def test_the_second_load_reads_no_matrix(loader: Loader, dtype: str) -> None:
    first, num_packed = loader.load(dtype)
    assert num_packed == 2 + 7 * SPEC.num_layers  # embedding and head
    again, num_packed = loader.load(dtype)
    assert num_packed == 0
    assert np.array_equal(first, again)
    assert (loader.cache.folder.stat().st_mode & 0o777, loader.entry.stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )


def flip(at: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(at * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return damage


def cut(share: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(share * path.stat().st_size))


def fill(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


@pytest.mark.parametrize(
    "damage",
    [
        *(flip(at / 40) for at in range(41)),
        *(flip(at / 100_000) for at in range(0, 1_000, 50)),
        *(cut(share) for share in (0, 0.0001, 0.01, 0.5, 0.999)),
        fill,
    ],
)
def test_a_damaged_file_is_never_served(loader: Loader, damage: Callable[[Path], None]) -> None:
    expected, _ = loader.load()
    damage(loader.entry)
    found, num_packed = loader.load()
    assert np.array_equal(found, expected)
    # The flip may have hit a byte between matrices, which nobody reads.
    if num_packed:
        found, num_packed = loader.load()
        assert np.array_equal(found, expected)
    assert num_packed == 0


def test_another_file_under_the_same_name_size_and_time_is_packed(loader: Loader) -> None:
    loader.load()
    times = loader.file.stat()
    content = loader.file.read_bytes()
    loader.file.write_bytes(content)  # the same bytes: only the ctime tells
    os.utime(loader.file, ns=(times.st_atime_ns, times.st_mtime_ns))
    loader.seed = 1
    found, num_packed = loader.load()
    assert num_packed > 0
    loader.cache = PackedCache(loader.cache.folder / "other", 100 * MIB)
    assert np.array_equal(found, loader.load()[0])


def test_data_type_files_and_library_are_part_of_the_key(loader: Loader, tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"one build")
    source = SourceFiles.of(tmp_path, [loader.file])
    keys = [make_key(source, dtype, library) for dtype in ("int4", "int8")]
    keys.append(make_key(SourceFiles.of(tmp_path, [loader.file, library]), "int4", library))
    keys.append(make_key(SourceFiles.of(tmp_path, [tmp_path / "missing"]), "int4", library))
    library.write_bytes(b"another build")
    keys.append(make_key(source, "int4", library))
    assert len({key.digest for key in keys if key}) == 5
    assert make_key(source, "int4", tmp_path / "missing") is None


def test_weights_of_a_file_that_is_replaced_meanwhile_are_not_stored(loader: Loader) -> None:
    source = SourceFiles.of(loader.file, [loader.file])
    loader.file.write_bytes(b"new")
    checkpoint = CountedCheckpoint(SPEC, tiny_weights(SPEC), source)
    options = ModelOptions(
        dtype="int4", num_blocks=4, block_size=16, max_model_len=64, kernels="plain"
    )
    CompiledModel(checkpoint, options, ModelLoading(cache=loader.cache))
    wait_stored()
    assert loader.cache.entries() == []


def test_a_file_of_another_model_under_this_name_is_not_used(loader: Loader) -> None:
    expected, _ = loader.load()
    path = loader.entry
    content = path.read_bytes()
    loader.file.write_bytes(b"another model")
    loader.seed = 1
    loader.load()
    (other,) = [entry.path for entry in loader.cache.entries() if entry.path != path]
    other.write_bytes(content)
    found, num_packed = loader.load()
    assert num_packed > 0
    assert not np.array_equal(found, expected)


def test_a_folder_that_others_may_write_is_not_used(
    loader: Loader, caplog: pytest.LogCaptureFixture
) -> None:
    loader.load()
    loader.cache.folder.chmod(0o770)
    assert loader.load()[1] > 0
    assert "writable by others" in caplog.text


def test_a_file_that_others_may_write_is_not_read(loader: Loader, tmp_path: Path) -> None:
    loader.load()
    path = loader.entry
    path.chmod(0o620)
    assert loader.load()[1] > 0
    assert loader.entry.stat().st_mode & 0o777 == 0o600, "it was replaced"
    assert loader.load()[1] == 0
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert loader.load()[1] > 0


def test_a_folder_that_cannot_be_written_costs_only_the_cache(
    loader: Loader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = loader.load()
    loader.cache = PackedCache(loader.file / "cache", 100 * MIB)
    assert np.array_equal(loader.load()[0], expected)
    assert "cannot store packed weights" in caplog.text


WRITER = """
import resource, sys
from pathlib import Path
from headway.executors.cpu.packed_cache import CacheKey, Matrix, PackedCache, PackedMatrix

data = memoryview(bytes(2**20) * 8)
matrices = [PackedMatrix(Matrix((str(i),), 0, False, len(data)), data) for i in range(8)]
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
print("begin", flush=True)
for _ in range(int(sys.argv[2])):
    PackedCache(Path(sys.argv[1]), 2**30).store(CacheKey("model", "int4", "0" * 32), matrices)
"""


def writer(
    folder: Path, count: int, max_file_bytes: int = resource.RLIM_INFINITY
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), str(count), str(max_file_bytes)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_processes_that_write_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    children = [writer(tmp_path, 5) for _ in range(4)]
    for child in children:
        _, errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors
    (path,) = tmp_path.iterdir()
    packed = PackedCache(tmp_path, 2**30).open(CacheKey("model", "int4", "0" * 32))
    assert packed is not None
    target = memoryview(bytearray(8 * MIB))
    for number in range(8):
        assert packed.read(Matrix((str(number),), 0, False, len(target)), target)
    packed.close()
    assert path.stat().st_size > 64 * MIB


def test_what_a_killed_process_left_is_deleted(tmp_path: Path, loader: Loader) -> None:
    loader.cache = PackedCache(tmp_path / "cache", 100 * MIB)
    left = 0
    for _ in range(20):
        child = writer(loader.cache.folder, 1000)
        assert child.stdout is not None and child.stdout.readline() == "begin\n"
        while not list(loader.cache.folder.glob("*.unfinished")) and child.poll() is None:
            pass
        child.kill()
        child.communicate(timeout=30)
        left += len(list(loader.cache.folder.glob("*.unfinished")))
        if left:
            break
    assert left
    loader.load()
    assert not list(loader.cache.folder.glob("*.unfinished"))


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    child = writer(tmp_path, 1, max_file_bytes=20 * MIB)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 0
    assert "cannot store packed weights" in errors
    assert not list(tmp_path.iterdir())


def stored(cache: PackedCache, name: str, num_bytes: int) -> None:
    data = memoryview(bytes(num_bytes))
    cache.store(
        CacheKey(name, "int4", name * 32),
        [PackedMatrix(Matrix((name,), 0, False, num_bytes), data)],
    )


def test_the_least_recently_used_file_goes_first(tmp_path: Path) -> None:
    cache = PackedCache(tmp_path, 4 * MIB)
    for age, name in enumerate("abc"):
        stored(cache, name, MIB)
        path = next(path for path in tmp_path.iterdir() if path.name.startswith(name))
        os.utime(path, (1000 + age, 1000 + age))
    packed = cache.open(CacheKey("a", "int4", "a" * 32))
    assert packed is not None
    packed.close()
    stored(cache, "d", MIB)
    assert {entry.model for entry in cache.entries()} == {"a", "c", "d"}
    stored(cache, "e", 5 * MIB)  # more than the cache may hold: nothing goes for it
    assert {entry.model for entry in cache.entries()} == {"a", "c", "d"}
    assert cache.clear() == sum(MIB + 4096 for _ in "acd")
    assert cache.entries() == []
