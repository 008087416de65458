"""The base of all JSON objects of the API: every field is honoured or refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler

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
