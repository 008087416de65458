"""Values of JSON as dataclasses, checked; without msgspec, so that PyPy can read profiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def from_plain(cls: type[T], value: object, place: str = "") -> T:
    """Return a dataclass of the values in a JSON object; ValueError names the place of a wrong one.

    Unknown names are passed over: a later release may have written them.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"{place or 'the file'} is not an object")
    given: Mapping[str, object] = value
    hints = get_type_hints(cls)
    found: dict[str, Any] = {}
    for field in fields(cls):  # type: ignore[arg-type]  # a dataclass
        path = f"{place}.{field.name}" if place else field.name
        if field.name in given:
            found[field.name] = _convert(hints[field.name], given[field.name], path)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{path} is missing")
    return cls(**found)


def _convert(hint: Any, value: Any, place: str) -> Any:
    if get_origin(hint) in (Union, UnionType):
        if value is None:
            return None
        hint = next(one for one in get_args(hint) if one is not type(None))
    if get_origin(hint) is tuple:  # of any length, of one kind
        kind = get_args(hint)[0]
        return tuple(_convert(kind, one, place) for one in _list(value, place))
    if is_dataclass(hint):
        return from_plain(hint, value, place)  # type: ignore[arg-type]
    if issubclass(hint, tuple):  # a NamedTuple
        kinds = get_type_hints(hint).values()
        parts = _list(value, place)
        if len(parts) != len(kinds):
            raise ValueError(f"{place} has {len(parts)} values, not {len(kinds)}")
        return hint(*(_convert(kind, one, place) for kind, one in zip(kinds, parts, strict=True)))
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if hint is float and is_whole:
        return float(value)
    if not isinstance(value, hint) or (hint is int and not is_whole):
        raise ValueError(f"{place} is not a value of type {hint.__name__}")
    return value


def _list(value: object, place: str) -> list[object]:
    if not isinstance(value, list):
        raise ValueError(f"{place} is not a list")
    return value
