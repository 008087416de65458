"""Packs the weights of a checkpoint for the kernels, or reads them packed from the cache."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
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
from headway.executors.step_model import ModelLoading, ModelOptions
from headway.executors.weights import Checkpoint, StoredRows, kinds_of
from headway.executors.weights.formats import packed_dtype
from headway.executors.weights.reader import WeightReader

_ARENA_BYTES = 64 * 1024**2
_CACHE_LINE = 64
_MAX_THREADS = 8
"""Each thread may have a whole matrix in fp32, over a gigabyte in the largest models."""
_PIECE_WEIGHTS = 2**21
"""Weights of one job: a few milliseconds, so that all threads end at about the same time."""
STORING = "store packed weights"
"""Name of the thread that writes the cache."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A matrix that threads fill; the results say whether it came from the cache."""

    packed: PackedMatrix
    fillings: Sequence[Future[bool]]


@dataclass(frozen=True, slots=True)
class _Place:
    """The panels of a layer within a merged one."""

    first_panel: int
    panel_step: int

    def columns(self, num_outputs: int) -> np.ndarray:
        """Return the merged columns of the outputs."""
        outputs = np.arange(num_outputs)
        panels = self.first_panel + outputs // kernels.TILE * self.panel_step
        return panels * kernels.TILE + outputs % kernels.TILE


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a tensor that one thread packs, and the place of the tensor."""

    name: str
    first: int
    last: int
    place: _Place


class Packer:
    """Packs the tensors of a checkpoint, on several threads, and owns the packed memory."""

    def __init__(
        self,
        library: ctypes.CDLL,
        checkpoint: Checkpoint,
        options: ModelOptions,
        loading: ModelLoading,
    ) -> None:
        self.checkpoint = checkpoint
        self.reader = WeightReader(checkpoint, loading.progress)
        self._library = library
        self._dtype = options.dtype
        self._kinds = kinds_of(checkpoint)
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

    def linear(
        self, prefix: str, modules: Sequence[str], is_interleaved: bool = False
    ) -> kernels.CLinear:
        """Pack linear layers that share their input as one layer.

        With `is_interleaved`, panels of the layers alternate.
        """
        names = [prefix + module for module in modules]
        packed = self.matrix([f"{name}.weight" for name in names], is_interleaved)
        if self.reader.has(f"{names[0]}.bias"):
            biases = [self.reader.read(f"{name}.bias") for name in names]
            merged = np.empty(packed.num_outputs, dtype=np.float32)
            places = _places([len(bias) for bias in biases], is_interleaved)
            for bias, place in zip(biases, places, strict=True):
                merged[place.columns(len(bias))] = bias
            packed.bias = self.keep(merged)
        return packed

    def matrix(self, names: Sequence[str], is_interleaved: bool = False) -> kernels.CLinear:
        """Pack matrices that share their input as one."""
        shapes = [self.reader.shape(name) for name in names]
        kind = kernels.FORMATS[packed_dtype(self._dtype, names, self._kinds)]
        num_outputs, num_inputs = sum(rows for rows, _ in shapes), shapes[0][1]
        size = self._library.hw_packed_bytes(kind, num_outputs, num_inputs)
        target = self.allocate(size)
        packed = PackedMatrix(
            Matrix(tuple(names), kind, is_interleaved, size),
            memoryview((ctypes.c_uint8 * size).from_address(target)).cast("B"),
        )
        places = _places([rows for rows, _ in shapes], is_interleaved)
        pieces = [
            piece
            for name, place in zip(names, places, strict=True)
            for piece in self._pieces(name, place)
        ]
        try:
            if self._cached:
                fillings = [self._pool.submit(self._fill, packed, target, pieces)]
            else:
                fillings = [self._pool.submit(self._pack, target, kind, one) for one in pieces]
        except RuntimeError as error:
            self._pool.shutdown(cancel_futures=True)
            raise no_threads(self._num_threads) from error
        self._jobs.append(_Job(packed, fillings))
        return kernels.CLinear(target, None, num_outputs, num_inputs, kind, 0)

    def finish(self) -> None:
        """Wait until every matrix is packed; store the matrices that the cache did not have."""
        with self._pool:
            try:
                is_cached = True
                for job in self._jobs:
                    is_cached &= all([filling.result() for filling in job.fillings])
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

    def _pieces(self, name: str, place: _Place) -> list[_Piece]:
        """Divide a tensor into pieces of whole panels, for several threads."""
        num_rows, num_inputs = self.reader.shape(name)
        # What numpy has to convert is converted as a whole.
        is_divisible = self._kinds.get(name) in kernels.SOURCES
        step = _PIECE_WEIGHTS // num_inputs // kernels.TILE * kernels.TILE
        step = max(kernels.TILE, step) if is_divisible else num_rows
        return [
            _Piece(name, first, min(first + step, num_rows), place)
            for first in range(0, num_rows, step)
        ]

    def _fill(self, packed: PackedMatrix, target: int, pieces: Sequence[_Piece]) -> bool:
        """Fill a matrix from the cache, else from the checkpoint; True if from the cache."""
        if self._cached and self._cached.read(packed.matrix, packed.data):
            return True
        for piece in pieces:
            self._pack(target, packed.matrix.format, piece)
        return False

    def _pack(self, target: int, kind: int, piece: _Piece) -> bool:
        """Pack a piece; False, as it does not come from the cache."""
        name, checkpoint = piece.name, self.checkpoint
        if isinstance(checkpoint, StoredRows) and self._kinds.get(name) in kernels.SOURCES:
            stored = checkpoint.read_stored(name, piece.first, piece.last)
            rows, source = np.ascontiguousarray(stored.rows), stored.kind
        else:
            rows, source = self.reader.load(name), "F32"
        num_inputs = self.reader.shape(name)[1]
        described = kernels.Rows(
            rows.ctypes.data, piece.last - piece.first, num_inputs, kernels.SOURCES[source], 0
        )
        place = piece.place
        panel = place.first_panel + piece.first // kernels.TILE * place.panel_step
        self._library.hw_pack(target, kind, described, panel, place.panel_step)
        return False


def no_threads(num_threads: int) -> ModelLoadError:
    """Return the error for a system that refuses to start threads."""
    return ModelLoadError(
        f"cannot start {num_threads} threads; set --num-threads lower or raise the pids limit"
    )


def _places(sizes: Sequence[int], is_interleaved: bool) -> list[_Place]:
    """Return the place of each merged layer; sizes are whole panels."""
    if is_interleaved:
        return [_Place(turn, len(sizes)) for turn in range(len(sizes))]
    starts = accumulate((size // kernels.TILE for size in sizes[:-1]), initial=0)
    return [_Place(start, 1) for start in starts]
