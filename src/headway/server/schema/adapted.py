"""Request bodies of other APIs that are read as conversations, and what their answers repeat.

A body of another API becomes the content of a ChatRequest, which is checked like any other. Errors
then name fields of the conversation; `FieldNames` turns them into the fields that the client sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from headway.errors import InvalidRequestError
from headway.server.schema.chat import ChatRequest
from headway.server.schema.request import GenerationRequest, RequestLimits, parse, validate

RequestT = TypeVar("RequestT", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Names of a client's fields, by the fields of the conversation that they became."""

    names: Mapping[str, str] = field(default_factory=dict[str, str])

    def of(self, param: str) -> str:
        """Return the client's name of a field or of a part of one."""
        for size in range(len(param), 0, -1):
            is_part = size == len(param) or param[size] in ".["
            if is_part and (name := self.names.get(param[:size])) is not None:
                return name + param[size:]
        return param

    def rename(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return an error that names the client's field."""
        if error.param is None or not self.names:
            return error
        name = self.of(error.param)
        return type(error)(str(error).replace(error.param, name), name)


@dataclass(frozen=True, slots=True)
class Echo:
    """Fields of a request that its answer repeats."""

    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ignored_tools: tuple[str, ...] = ()
    """Types of tools that were not offered to the model."""
    num_bytes: int = 0
    """Of the body, which bounds the memory."""


NO_NAMES = FieldNames()
NO_ECHO = Echo()


@dataclass(frozen=True, slots=True)
class ReadRequest(Generic[RequestT]):
    """A request body, checked, in the form that endpoints generate from."""

    payload: RequestT
    num_bytes: int
    names: FieldNames = NO_NAMES
    echo: Echo = NO_ECHO

    def named(self, error: InvalidRequestError) -> InvalidRequestError:
        """Return an error of the engine or of the template with the client's name of its field."""
        error.param = self.payload.field_for(error.param)
        return self.names.rename(error)


def read_as(kind: type[RequestT]) -> Callable[[bytes, RequestLimits], ReadRequest[RequestT]]:
    """Return what reads bodies of this kind."""

    def read(body: bytes, limits: RequestLimits) -> ReadRequest[RequestT]:
        return ReadRequest(parse(kind, body, limits), len(body))

    return read


def validate_chat(content: dict[str, Any], names: FieldNames, limits: RequestLimits) -> ChatRequest:
    """Return the content of a conversation as a checked request; errors have the client's names."""
    try:
        return validate(ChatRequest, content, limits)
    except InvalidRequestError as error:
        raise names.rename(error) from error
