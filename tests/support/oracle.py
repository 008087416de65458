"""transformers as the oracle of a GGUF file, read in half the time."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import gguf


@contextmanager
def quick_gguf():
    """Read a file and its tensor names once.

    transformers reads the whole file for the config and again for the weights, and makes the same
    table of tensor names for every module: half of the time that loading takes.
    """
    reader, names = cache(gguf.GGUFReader), cache(gguf.get_tensor_name_map)
    with patch("gguf.GGUFReader", reader), patch("gguf.get_tensor_name_map", names):
        yield
