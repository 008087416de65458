"""Decides the data type of each packed matrix from the types in the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from headway.executors.spec import ModelSpec
from headway.executors.weights.names import EMBEDDING, HEAD, matrices, model_shapes

_AS_INT4 = frozenset({"Q4_0", "Q4_1", "Q4_K"})
"""Types that are packed as int4 without requantization.

Other quantized types would be quantized a second time, which loses little in 8 bits and much in 4.
"""


def packed_dtype(dtype: str, names: Sequence[str], kinds: Mapping[str, str]) -> str:
    """Return the data type of tensors that are packed as one matrix, for a model in `dtype`.

    int4 is for 4-bit types, and for unquantized layers if it was asked for. Tables that are not
    quantized are int8 at least: each row is a whole token. A matrix has one format: the most bits
    that a part of it needs.
    """
    if dtype != "int4":
        return dtype
    for name in names:
        kind = kinds.get(name, "F32")
        is_table = name in (EMBEDDING, HEAD)
        if kind not in _AS_INT4 and (is_table or _is_quantized(kind)):
            return "int8"
    return "int4"


def quantization(kinds: Mapping[str, str]) -> str | None:
    """Return the data type nearest to the linear layers; None if one is not quantized.

    int4 stands for the types of the file: matrices of more bits are packed as int8.
    """
    found = {kind for name, kind in kinds.items() if name.endswith("_proj.weight")}
    if not found or not all(map(_is_quantized, found)):
        return None
    return "int4" if found & _AS_INT4 else "int8"


def num_int8_parameters(spec: ModelSpec, kinds: Mapping[str, str]) -> int:
    """Count the parameters that a model in int4 has in int8."""
    shapes = model_shapes(spec)
    return sum(
        prod(shapes[name])
        for names in matrices(spec)
        for name in names
        if packed_dtype("int4", names, kinds) == "int8"
    )


def _is_quantized(kind: str) -> bool:
    return kind.startswith(("Q", "IQ"))
