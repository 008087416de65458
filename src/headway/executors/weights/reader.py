"""Reads the tensors of a model in order, checked against its spec."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headway.executors.weights import Checkpoint, check_shapes
from headway.executors.weights.names import model_shapes

Progress = Callable[[int, int], None]


class WeightReader:
    """Reads tensors by name as fp32; calls `progress` with (done, total) tensors."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
        self.spec = checkpoint.spec
        self._checkpoint = checkpoint
        self._shapes = model_shapes(checkpoint.spec)
        self._progress = progress
        self._num_read = 0
        check_shapes(self._shapes, checkpoint.shapes())

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> np.ndarray:
        """Return a tensor and count it as read."""
        values = self.load(name)
        self.count_read()
        return values

    def load(self, name: str) -> np.ndarray:
        """Return a tensor, never as a view of the file; any thread may call this."""
        return np.require(self._checkpoint.read(name), np.float32, ["C", "O", "W"])

    def count_read(self) -> None:
        """Report one more tensor as read."""
        self._num_read += 1
        if self._progress is not None:
            self._progress(self._num_read, len(self._shapes))
