"""Reads the fields of a model's configuration, with checks of type and range.

A configuration is untrusted: a size may be a string, a list, negative or larger than any memory.
Values that pass are safe to multiply, and safe to allocate by once the tensor shapes match them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headway.errors import ModelLoadError

MAX_SIZE = 2**31 - 1
"""The kernels count in 32 bits."""


class ModelFields:
    """A mapping from a model file; an absent, null or zero field takes its default."""

    def __init__(self, values: object, name: str = "the model's configuration") -> None:
        if not isinstance(values, Mapping):
            raise ModelLoadError(f"{name} is {_shown(values)}, not a mapping")
        self._values: Mapping[str, Any] = values

    def raw(self, key: str) -> Any:
        """Return the value unchecked; None if absent."""
        return self._values.get(key)

    def size(self, key: str, default: int | None = None) -> int:
        """Return an integer from 1 to MAX_SIZE; required without a default."""
        value = self._values.get(key)
        if not value and default is not None and not isinstance(value, (str, list, dict)):
            return default
        if value is None:
            raise ModelLoadError(f"the model's configuration lacks {key!r}")
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
            raise ModelLoadError(
                f"{key!r} of the model's configuration must be a whole number from 1 to "
                f"{MAX_SIZE}, not {_shown(value)}"
            )
        return value

    def optional_size(self, key: str) -> int | None:
        """Return a size; None if absent."""
        return self.size(key, 0) or None

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0; required without a default."""
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if value is None:
            raise ModelLoadError(f"the model's configuration lacks {key!r}")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ModelLoadError(
                f"{key!r} of the model's configuration must be a number above 0, "
                f"not {_shown(value)}"
            )
        return float(value) if value < MAX_SIZE else _as_float(key, value)

    def strings(self, key: str) -> tuple[str, ...]:
        """Return a list of strings; empty if absent."""
        value = self._values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise ModelLoadError(
                f"{key!r} of the model's configuration must be a list of strings, "
                f"not {_shown(value)}"
            )
        return tuple(value)

    def part(self, key: str) -> ModelFields | None:
        """Return a nested mapping; None if absent or empty."""
        value = self._values.get(key)
        return ModelFields(value, f"{key!r} of the model's configuration") if value else None


def _as_float(key: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise ModelLoadError(f"{key!r} of the model's configuration is too large") from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
