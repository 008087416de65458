"""The base class of messages: msgspec's, or on PyPy a dataclass with the same fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from msgspec import Meta, Struct
except ImportError:
    if not TYPE_CHECKING:
        from dataclasses import dataclass

        class Meta:
            """What msgspec would check in a message; nothing is sent without it."""

            def __init__(self, **_checks: Any) -> None: ...

        class Struct:
            """A class whose fields are those of its annotations."""

            def __init_subclass__(cls, **_options: Any) -> None:
                dataclass(cls)


__all__ = ["Meta", "Struct"]
