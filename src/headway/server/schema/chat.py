"""The request body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import FailFast, Field, WithJsonSchema

from headway.core.params import SamplingParams
from headway.errors import InvalidRequestError
from headway.server.schema.request import (
    Fields,
    GenerationRequest,
    MaxTokens,
    NumLogprobs,
    Only,
    RequestLimits,
)

ROLES = ("system", "developer", "user", "assistant")

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TEXT_PART}]}


class Message(Fields):
    """One message; its content is text or a list of text parts."""

    role: Annotated[str, WithJsonSchema({"enum": list(ROLES)})]
    content: Annotated[Any, WithJsonSchema(_CONTENT)]
    name: str | None = None
    refusal: Annotated[Any, Only()] = None
    audio: Annotated[Any, Only()] = None
    tool_calls: Annotated[Any, Only(([],))] = None
    tool_call_id: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only()] = None

    def check_at(self, location: str) -> None:
        """Refuse unsupported values; `location` names the message."""
        self.refuse_unsupported(f"{location}.")
        if self.role not in ROLES:
            raise InvalidRequestError(
                f"{location}.role must be one of {', '.join(ROLES)}, got {self.role[:40]!r}",
                f"{location}.role",
            )
        _check_content(self.content, f"{location}.content")

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that the chat template reads."""
        # Templates know the role developer by its older name.
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self.content}
        # The model's template decides what a name means.
        return message if self.name is None else {**message, "name": self.name}


MAX_MESSAGES = 2048
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse the first message that is not supported."""
    for location, message in enumerate(messages):
        message.check_at(f"messages[{location}]")


class ChatRequest(GenerationRequest):
    """A conversation to answer; without a limit, the output may fill the context."""

    messages: Messages
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    safety_identifier: str | None = None

    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only(("none",))] = None
    functions: Annotated[Any, Only(([],))] = None
    metadata: Annotated[Any, Only(({},))] = None
    modalities: Annotated[Any, Only((["text"],))] = None
    moderation: Annotated[Any, Only()] = None
    parallel_tool_calls: Annotated[Any, Only((True,))] = None
    prediction: Annotated[Any, Only()] = None
    prompt_cache_key: Annotated[Any, Only()] = None
    prompt_cache_options: Annotated[Any, Only()] = None
    prompt_cache_retention: Annotated[Any, Only()] = None
    reasoning_effort: Annotated[Any, Only(("none",))] = None
    response_format: Annotated[Any, Only(({"type": "text"},))] = None
    service_tier: Annotated[Any, Only(("auto", "default"))] = None
    store: Annotated[Any, Only((False,))] = None
    tool_choice: Annotated[Any, Only(("none",))] = None
    tools: Annotated[Any, Only(([],))] = None
    verbosity: Annotated[Any, Only(("medium",))] = None
    web_search_options: Annotated[Any, Only()] = None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        limits_given = (self.max_tokens, self.max_completion_tokens)
        if None not in limits_given and limits_given[0] != limits_given[1]:
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens differ; set one of them", "max_tokens"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs; set logprobs to true", "top_logprobs"
            )
        try:
            self.check_output(1, self.output_limit, limits)
        except InvalidRequestError as error:
            error.param = self.field_for(error.param)
            raise
        check_messages(self.messages)

    def params(self) -> SamplingParams:
        return self.sampling(self.output_limit, (self.top_logprobs or 0) if self.logprobs else None)

    def field_for(self, param: str | None) -> str | None:
        if param == "max_tokens" and self.max_tokens is None:
            return "max_completion_tokens" if self.max_completion_tokens is not None else "messages"
        return "messages" if param == "prompt" else param

    def conversation(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]


def _check_content(content: Any, location: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise InvalidRequestError(f"{location} must be text or a list of text parts", location)
    for index, part in enumerate(content):
        _check_part(part, f"{location}[{index}]")


def _check_part(part: Any, location: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        raise InvalidRequestError(
            f"{location}: only parts of type 'text' are supported, got {str(kind)[:40]!r}", location
        )
    if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
        raise InvalidRequestError(f"{location} must have a type and a text, nothing else", location)
