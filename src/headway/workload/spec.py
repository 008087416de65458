"""Text form of a distribution: `name:value,value,key=value`.

Only the syntax; arrivals, lengths and contents bring their own forms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Generic, TypeVar

from headway.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Form(Generic[T]):
    """One accepted form: its usage, and the function that makes its value."""

    usage: str
    make: Callable[..., T]
    num_values: int | None = 1
    """Number of values; None for one or more."""
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    takes_text: bool = False
    """Whether the values are texts, such as a file name, instead of numbers."""


def parse_form(text: str, forms: Mapping[str, Form[T]]) -> T:
    """Return the value of `text`; ConfigError lists every accepted form."""
    name, _, rest = text.partition(":")
    form = forms.get(name.strip())
    if form is None:
        accepted = ", ".join(form.usage for form in forms.values())
        raise ConfigError(f"{text!r} is not understood; accepted: {accepted}")
    return parse_parts(text, rest, form)


def parse_parts(text: str, rest: str, form: Form[T]) -> T:
    """Return the value of a form without its name; errors quote `text`."""
    parts = [part.strip() for part in rest.split(",") if part.strip()]
    values = [part for part in parts if "=" not in part]
    options = dict(part.split("=", 1) for part in parts if "=" in part)
    known = (*form.required, *form.optional)
    is_complete = all(name in options for name in form.required)
    is_counted = bool(values) if form.num_values is None else len(values) == form.num_values
    if not is_complete or not is_counted or any(name not in known for name in options):
        raise ConfigError(f"{text!r} is not understood; accepted: {form.usage}")
    try:
        given = values if form.takes_text else [number(value) for value in values]
        return form.make(*given, **{name: number(value) for name, value in options.items()})
    except ConfigError as error:
        raise ConfigError(f"{text!r}: {error}; accepted: {form.usage}") from error


def number(text: str) -> float:
    """Parse a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise ConfigError(f"{text!r} is not a number")
    return value


def check_positive(**values: float) -> None:
    """Refuse a number that is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise ConfigError(f"{name} must be above 0, not {value:g}")


def check_whole(least: int, **values: float) -> None:
    """Refuse a number that is not an integer of at least `least`."""
    for name, value in values.items():
        if value != int(value) or value < least:
            raise ConfigError(f"{name} must be a whole number of at least {least}, not {value:g}")
