"""The base of all JSON objects of the API: every field is honoured or refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError

from headway.config import ServerConfig
from headway.core.params import MAX_SAMPLES
from headway.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How much one HTTP request may request."""

    max_num_samples: int
    max_output_tokens: int

    @classmethod
    def of(cls, config: ServerConfig) -> RequestLimits:
        samples = min(config.max_num_samples, MAX_SAMPLES)
        return cls(samples, config.max_output_tokens_per_request)


MAX_DEPTH = 32
"""Deepest nesting of lists and objects in a body."""
DEFAULT_LIMITS = RequestLimits.of(ServerConfig())


@dataclass(frozen=True, slots=True)
class Only:
    """Marks an unsupported field: null and `values` are accepted, other values refused."""

    values: tuple[Any, ...] = ()

    def accepts(self, value: object) -> bool:
        # Compares types too: to Python, 1 and True are equal.
        return value is None or any(
            type(value) is type(harmless) and value == harmless for harmless in self.values
        )

    def refusal(self, name: str) -> InvalidRequestError:
        choices = [msgspec.json.encode(value).decode() for value in self.values]
        instead = f" or send {' or '.join(choices)}" if choices else ""
        return InvalidRequestError(f"{name} is not supported; leave it out{instead}", name)

    def __get_pydantic_json_schema__(
        self, _schema: object, _handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [*self.values, None]}


def at_most(count: int) -> BeforeValidator:
    """Return a check of the length of a list before its items, each of which may be wrong."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > count:
            raise PydanticCustomError("too_long", f"at most {count} items are allowed")  # pyright: ignore
        return value

    return BeforeValidator(check)


class Fields(BaseModel):
    """A JSON object of the API: unknown keys are errors, and values are not converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    def check(self, limits: RequestLimits) -> None:
        """Refuse values that are well formed but not supported."""
        del limits
        self.refuse_unsupported("")

    def refuse_unsupported(self, location: str) -> None:
        for name, only in unsupported_fields(type(self)).items():
            if not only.accepts(getattr(self, name)):
                raise only.refusal(location + name)


@cache
def unsupported_fields(kind: type[Fields]) -> dict[str, Only]:
    """Return the fields that are marked with Only, and their marks."""
    return {
        name: mark
        for name, info in kind.model_fields.items()
        for mark in info.metadata
        if isinstance(mark, Only)
    }


def decode_object(text: bytes | str, name: str, param: str | None = None) -> dict[str, Any]:
    """Return the JSON object of a text; NaN, Infinity and deep nesting are refused."""
    try:
        content = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{name} cannot be read as JSON: {error}", param) from error
    if not isinstance(content, dict):
        raise InvalidRequestError(f"{name} must be a JSON object", param)
    if _is_too_deep(content, text.encode() if isinstance(text, str) else text):
        raise InvalidRequestError(f"{name} has more than {MAX_DEPTH} levels of nesting", param)
    return content


def _is_too_deep(content: dict[str, Any], body: bytes) -> bool:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for outer in level
            for item in (outer.values() if type(outer) is dict else outer)
            if type(item) in (dict, list)
        ]
        if not level:
            return False
    return True
