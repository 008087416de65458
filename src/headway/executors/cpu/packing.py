"""Packs the weights of a checkpoint for the kernels, or reads them packed from the cache."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Thread
from uuid import uuid4

import numpy as np

from headway.errors import ModelLoadError
from headway.executors.cpu import kernels
from headway.executors.cpu.large_pages import LARGE_PAGE
from headway.executors.cpu.packed_cache import (
    CacheKey,
    Matrix,
    PackedCache,
    PackedMatrix,
    make_key,
)
from headway.executors.step_model import LoadOptions, ModelOptions
from headway.executors.weights import Checkpoint, QuantizedRows
from headway.executors.weights.reader import WeightReader

_ARENA_BYTES = 64 * 1024**2
_CACHE_LINE = 64
_MAX_THREADS = 8
"""Each thread may have a whole matrix in fp32, over a gigabyte in the largest models."""
STORING = "store packed weights"
"""Name of the thread that writes the cache."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A matrix that a thread fills; the result says whether it came from the cache."""

    packed: PackedMatrix
    filling: Future[bool]


class Packer:
    """Packs the tensors of a checkpoint, on several threads, and owns the packed memory."""

    def __init__(
        self,
        library: ctypes.CDLL,
        checkpoint: Checkpoint,
        options: ModelOptions,
        loading: LoadOptions,
    ) -> None:
        self.checkpoint = checkpoint
        self.reader = WeightReader(checkpoint, loading.progress)
        self._library = library
        self._dtype = options.dtype
        self._num_threads = options.num_threads
        self._pool = ThreadPoolExecutor(min(max(1, options.num_threads), _MAX_THREADS))
        self._jobs: list[_Job] = []
        self.kept: list[object] = []
        self._next = self._end = 0
        self._cache = loading.cache
        self._key = self._make_key()
        self._cached = self._cache.open(self._key) if self._cache and self._key else None

    @property
    def identity(self) -> str:
        """Return a digest of the weights' files, or a new one for weights without files."""
        return self._key.digest if self._key else uuid4().hex

    def keep(self, values: np.ndarray) -> int:
        """Return the address of an array, valid as long as this packer."""
        self.kept.append(values)
        return values.ctypes.data

    def allocate(self, num_bytes: int) -> int:
        """Return the address of fresh memory.

        Uses huge pages where available: kernels read blocks and weights at random, and lookups of
        small pages would cost a large part of the time.
        """
        if num_bytes > self._end - self._next:
            size = max(num_bytes, _ARENA_BYTES) + LARGE_PAGE
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # an operating system without huge pages
                    memory.madvise(mmap.MADV_HUGEPAGE)
            view = (ctypes.c_char * 1).from_buffer(memory)
            self.kept += (memory, view)
            address = ctypes.addressof(view)
            self._next = -(-address // LARGE_PAGE) * LARGE_PAGE
            self._end = address + size
        taken = self._next
        self._next += -(-num_bytes // _CACHE_LINE) * _CACHE_LINE
        return taken

    def values(self, name: str) -> int:
        """Return the address of an unpacked tensor."""
        return self.keep(self.reader.read(name))

    def linear(self, *names: str, is_interleaved: bool = False) -> kernels.CLinear:
        """Pack linear layers that share their input as one layer.

        With `is_interleaved`, panels of the layers alternate.
        """
        weights = [f"{name}.weight" for name in names]
        packed = self.matrix(weights, self._dtype, is_interleaved)
        if self.reader.has(f"{names[0]}.bias"):
            biases = [self.reader.read(f"{name}.bias") for name in names]
            merged = np.empty(packed.num_outputs, dtype=np.float32)
            for bias, columns in zip(
                biases, _columns([len(bias) for bias in biases], is_interleaved), strict=True
            ):
                merged[columns] = bias
            packed.bias = self.keep(merged)
        return packed

    def table(self, name: str) -> kernels.CLinear:
        """Pack the embedding or the head, in int8 at least: each row is a whole token."""
        return self.matrix([name], "bf16" if self._dtype == "bf16" else "int8")

    def matrix(
        self, names: Sequence[str], dtype: str, is_interleaved: bool = False
    ) -> kernels.CLinear:
        """Pack matrices that share their input as one."""
        shapes = [self.reader.shape(name) for name in names]
        num_outputs, num_inputs = sum(rows for rows, _ in shapes), shapes[0][1]
        kind = kernels.FORMATS[dtype]
        size = self._library.hw_packed_bytes(kind, num_outputs, num_inputs)
        target = self.allocate(size)
        packed = PackedMatrix(
            Matrix(tuple(names), kind, is_interleaved, size),
            memoryview((ctypes.c_uint8 * size).from_address(target)).cast("B"),
        )
        columns = _columns([rows for rows, _ in shapes], is_interleaved)
        try:
            filling = self._pool.submit(self._fill, packed, target, columns)
        except RuntimeError as error:
            self._pool.shutdown(cancel_futures=True)
            raise no_threads(self._num_threads) from error
        self._jobs.append(_Job(packed, filling))
        return kernels.CLinear(target, None, num_outputs, num_inputs, kind, 0)

    def finish(self) -> None:
        """Wait until every matrix is packed; store the matrices that the cache did not have."""
        with self._pool:
            try:
                is_cached = True
                for job in self._jobs:
                    is_cached &= job.filling.result()
                    for _ in job.packed.matrix.tensors:
                        self.reader.count_read()
            finally:
                self._pool.shutdown(cancel_futures=True)
                if self._cached:
                    self._cached.close()
        # Weights of files that changed while they were read are of no key.
        is_storable = self.checkpoint.source and self.checkpoint.source.is_unchanged()
        if self._cache and self._key and not is_cached and is_storable:
            matrices = [job.packed for job in self._jobs]
            # The first step need not wait for a disk.
            args = (self._cache, self._key, matrices)
            Thread(target=self._store, name=STORING, args=args, daemon=True).start()
        self._jobs.clear()

    def _store(self, cache: PackedCache, key: CacheKey, matrices: list[PackedMatrix]) -> None:
        """Write the cache. A method, so that the running thread keeps the packed memory."""
        cache.store(key, matrices)

    def _make_key(self) -> CacheKey | None:
        source = self.checkpoint.source
        return None if source is None else make_key(source, self._dtype, kernels.LIBRARY)

    def _fill(self, packed: PackedMatrix, target: int, columns: Sequence[np.ndarray]) -> bool:
        """Fill a matrix from the cache, else from the checkpoint; True if from the cache."""
        matrix = packed.matrix
        if self._cached and self._cached.read(matrix, packed.data):
            return True
        for name, outputs in zip(matrix.tensors, columns, strict=True):
            self._pack(target, matrix.format, name, outputs)
        return False

    def _pack(self, target: int, kind: int, name: str, columns: np.ndarray) -> None:
        quantized = None
        if isinstance(self.checkpoint, QuantizedRows):
            quantized = self.checkpoint.read_quantized(name)
        num_rows, num_inputs = self.reader.shape(name)
        if quantized is not None and quantized.kind in kernels.SOURCES:
            rows, source = np.ascontiguousarray(quantized.rows), quantized.kind
        else:
            rows, source = self.reader.load(name), "F32"
        self._library.hw_pack(
            target,
            kind,
            kernels.SOURCES[source],
            rows.ctypes.data,
            num_rows,
            num_inputs,
            columns.ctypes.data,
        )


def no_threads(num_threads: int) -> ModelLoadError:
    """Return the error for a system that refuses to start threads."""
    return ModelLoadError(
        f"cannot start {num_threads} threads; set --num-threads lower or raise the pids limit"
    )


def _columns(sizes: Sequence[int], is_interleaved: bool) -> list[np.ndarray]:
    """Return the output columns of each merged layer."""
    columns = []
    start = 0
    for turn, size in enumerate(sizes):
        outputs = np.arange(size, dtype=np.int32)
        if is_interleaved:
            panel = outputs // kernels.TILE * len(sizes) + turn
            columns.append(panel * kernels.TILE + outputs % kernels.TILE)
        else:
            columns.append(outputs + start)
        start += size
    return columns
