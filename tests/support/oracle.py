"""transformers as the oracle of a GGUF file, read once and without a memmap."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import gguf
import numpy as np

_reader, _tensor_names = cache(gguf.GGUFReader), cache(gguf.get_tensor_name_map)


def _read(path: Path | str, dtype: type = np.uint8, mode: str = "r") -> np.ndarray:
    """Read what gguf would map: each of a million views of a memmap costs microseconds."""
    assert mode == "r"
    return np.fromfile(path, dtype)


@contextmanager
def quick_gguf():
    """Read a file and its tensor names once.

    transformers reads the whole file for the config and again for the weights, and makes the same
    table of tensor names for every module.
    """
    with (
        patch("gguf.GGUFReader", _reader),
        patch("gguf.get_tensor_name_map", _tensor_names),
        patch("numpy.memmap", _read),
    ):
        yield
