"""The request body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec.structs import replace
from pydantic import FailFast, Field, WithJsonSchema

from headway.core.params import SamplingParams
from headway.errors import InvalidRequestError
from headway.server.schema.request import (
    AnswerOptions,
    Fields,
    GenerationRequest,
    MaxTokens,
    NumLogprobs,
    Only,
    RequestLimits,
)
from headway.text import ChatTemplate

ROLES = ("system", "developer", "user", "assistant")

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TEXT_PART}]}


MAX_METADATA = 16
_METADATA = {
    "type": "object",
    "maxProperties": MAX_METADATA,
    "propertyNames": {"maxLength": 64},
    "additionalProperties": {"type": "string", "maxLength": 512},
}
_VARIABLES = {"type": "object", "additionalProperties": True}


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
    prompt_cache_key: str | None = None
    metadata: Annotated[Any, WithJsonSchema({"anyOf": [_METADATA, {"type": "null"}]})] = None
    store: bool | None = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, WithJsonSchema({"anyOf": [_VARIABLES, {"type": "null"}]})
    ] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only(("none",))] = None
    functions: Annotated[Any, Only(([],))] = None
    modalities: Annotated[Any, Only((["text"],))] = None
    moderation: Annotated[Any, Only()] = None
    parallel_tool_calls: Annotated[Any, Only((True,))] = None
    prediction: Annotated[Any, Only()] = None
    prompt_cache_options: Annotated[Any, Only()] = None
    prompt_cache_retention: Annotated[Any, Only()] = None
    reasoning_effort: Annotated[Any, Only(("none",))] = None
    service_tier: Annotated[Any, Only(("auto", "default"))] = None
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
        _check_metadata(self.metadata)
        if self.continue_final_message:
            self._check_continuation()

    def _check_continuation(self) -> None:
        if self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                "continue_final_message",
            )
        if self.messages[-1].role != "assistant":
            raise InvalidRequestError(
                "continue_final_message needs a last message of the assistant",
                "continue_final_message",
            )

    @property
    def answer_options(self) -> AnswerOptions:
        return replace(
            super().answer_options,
            names_tier=self.service_tier is not None,
            names_store=bool(self.store),
        )

    def render(self, template: ChatTemplate) -> str:
        """Return the prompt as text."""
        return template.render(
            self.conversation(),
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            variables=self.chat_template_kwargs,
        )

    def params(self) -> SamplingParams:
        return self.sampling(self.output_limit, (self.top_logprobs or 0) if self.logprobs else None)

    def field_for(self, param: str | None) -> str | None:
        if param == "max_tokens" and self.max_tokens is None:
            return "max_completion_tokens" if self.max_completion_tokens is not None else "messages"
        return "messages" if param == "prompt" else param

    def conversation(self) -> list[dict[str, Any]]:
        return [message.for_template() for message in self.messages]


def _check_metadata(metadata: Any) -> None:
    is_valid = metadata is None or (
        isinstance(metadata, dict)
        and len(metadata) <= MAX_METADATA
        and all(
            len(key) <= 64 and isinstance(value, str) and len(value) <= 512
            for key, value in metadata.items()
        )
    )
    if not is_valid:
        raise InvalidRequestError(
            f"metadata must have at most {MAX_METADATA} names of 64 characters, with texts of 512",
            "metadata",
        )


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
