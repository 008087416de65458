"""Puts a sanitized build of the kernels in the place of the usual one; a pytest plugin too.

AddressSanitizer guards what malloc hands out. The product packs weights into large mappings and
reads blocks of a file where they are mapped, where nothing is guarded: here each piece gets memory
of its own, of exactly its size.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from headway.executors.cpu import kernels
from headway.executors.cpu.packing import Packer
from headway.executors.weights import Stored
from headway.executors.weights.gguf import GgufCheckpoint

LIBRARY = "HEADWAY_SANITIZED_KERNELS"
read_in_place = GgufCheckpoint.read_stored


def allocate(self: Packer, num_bytes: int) -> int:
    return self.keep(np.empty(num_bytes, dtype=np.uint8))


def read_stored(self: GgufCheckpoint, name: str, first: int, last: int) -> Stored:
    stored = read_in_place(self, name, first, last)
    return Stored(stored.kind, np.array(stored.rows))


kernels.LIBRARY = Path(os.environ[LIBRARY])
kernels.load_kernels.cache_clear()
if kernels.load_kernels() is None:
    raise RuntimeError(f"cannot load {kernels.LIBRARY}")
Packer.allocate = allocate
GgufCheckpoint.read_stored = read_stored
