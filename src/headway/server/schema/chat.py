"""The request body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec.structs import replace
from pydantic import FailFast, Field, WithJsonSchema

from headway.core.params import SamplingParams
from headway.errors import InvalidRequestError
from headway.server.schema.fields import at_most
from headway.server.schema.request import (
    AnswerOptions,
    Fields,
    GenerationRequest,
    MaxTokens,
    NumLogprobs,
    Only,
    RequestLimits,
)
from headway.server.schema.tools import (
    MAX_CALL_ID_CHARS,
    MAX_CALLS,
    MAX_TOOLS,
    TOOL_CHOICE,
    PastCalls,
    ToolChoice,
    Tools,
    check_tools,
    read_choice,
)
from headway.text.tools.dialect import ChatDialect

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_THINKING_TOKENS = 2**31 - 1
ThinkingTokens = Annotated[int, Field(ge=0, le=MAX_THINKING_TOKENS)]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": _TEXT_PART},
        {"type": "null"},
    ]
}


MAX_METADATA = 16
METADATA = {
    "anyOf": [
        {
            "type": "object",
            "maxProperties": MAX_METADATA,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
        {"type": "null"},
    ]
}
_VARIABLES = {"type": "object", "additionalProperties": True}


class Message(Fields):
    """One message; its content is text or a list of text parts.

    Only a message of the assistant with tool calls may have no content.
    """

    role: Annotated[str, WithJsonSchema({"enum": list(ROLES)})]
    content: Annotated[Any, WithJsonSchema(_CONTENT)] = None
    name: str | None = None
    tool_calls: Annotated[PastCalls | None, at_most(MAX_CALLS)] = None
    tool_call_id: Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID_CHARS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: Annotated[Any, Only()] = None
    audio: Annotated[Any, Only()] = None
    annotations: Annotated[Any, Only(([],))] = None
    parsed: Any = None
    """Added by the parser of the official client; the same as the content."""
    provider_specific_fields: dict[str, Any] | None = None
    """Added by litellm: fields of the answer that OpenAI's do not include."""
    function_call: Annotated[Any, Only()] = None

    def check_at(self, location: str) -> None:
        """Refuse unsupported values; `location` names the message."""
        self.refuse_unsupported(f"{location}.")
        if self.role not in ROLES:
            raise InvalidRequestError(
                f"{location}.role must be one of {', '.join(ROLES)}, got {self.role[:40]!r}",
                f"{location}.role",
            )
        for name in ("tool_calls", "reasoning_content", "reasoning", "provider_specific_fields"):
            if getattr(self, name) and self.role != "assistant":
                raise InvalidRequestError(
                    f"{location}.{name} is for messages of the assistant", f"{location}.{name}"
                )
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise InvalidRequestError(
                f"{location}.tool_call_id must be in every message of the role tool, and in no "
                "other",
                f"{location}.tool_call_id",
            )
        for place, call in enumerate(self.tool_calls or ()):
            call.check_at(f"{location}.tool_calls[{place}]")
        if self.content is not None or not self.tool_calls:
            _check_content(self.content, f"{location}.content")

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that the chat template reads."""
        # Templates know the role developer by its older name.
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": "" if self.content is None else self.content}
        if self.name is not None:  # the model's template decides what a name means
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if reasoning := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = reasoning
        return message


MAX_MESSAGES = 2048
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse the first message that is not supported."""
    call_ids: set[str] = set()
    for location, message in enumerate(messages):
        message.check_at(f"messages[{location}]")
        call_ids.update(call.id for call in message.tool_calls or ())
        if message.tool_call_id is not None and message.tool_call_id not in call_ids:
            raise InvalidRequestError(
                f"messages[{location}].tool_call_id is the id of no tool call before it",
                f"messages[{location}].tool_call_id",
            )


class ChatRequest(GenerationRequest):
    """A conversation to answer; without a limit, the output may fill the context."""

    messages: Messages
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: Annotated[Any, WithJsonSchema(METADATA)] = None
    store: bool | None = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, WithJsonSchema({"anyOf": [_VARIABLES, {"type": "null"}]})
    ] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[Tools | None, at_most(MAX_TOOLS)] = None
    tool_choice: Annotated[Any, WithJsonSchema(TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str | None, WithJsonSchema({"enum": [*EFFORTS, None]})] = None
    thinking_token_budget: ThinkingTokens | None = None

    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only(("none",))] = None
    functions: Annotated[Any, Only(([],))] = None
    modalities: Annotated[Any, Only((["text"],))] = None
    moderation: Annotated[Any, Only()] = None
    prediction: Annotated[Any, Only()] = None
    prompt_cache_options: Annotated[Any, Only()] = None
    prompt_cache_retention: Annotated[Any, Only()] = None
    service_tier: Annotated[Any, Only(("auto", "default"))] = None
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
        check_tools(self.tools or ())
        if self.choice().tools:
            self._check_beside_tools()
        if self.reasoning_effort not in (None, *EFFORTS):
            raise InvalidRequestError(
                f"reasoning_effort must be one of {', '.join(EFFORTS)}", "reasoning_effort"
            )
        _check_metadata(self.metadata)
        if self.continue_final_message:
            self._check_continuation()

    def choice(self) -> ToolChoice:
        """Return which tools the reply may call."""
        return read_choice(self.tools or (), self.tool_choice)

    def _check_beside_tools(self) -> None:
        """Refuse fields that contradict the form of a reply with tool calls."""
        if self.structured_outputs is not None:
            raise InvalidRequestError(
                "structured_outputs and tools exclude each other; beside tools, a schema is in "
                "response_format, or in text.format of responses",
                "structured_outputs",
            )
        for name, is_set in (
            ("continue_final_message", self.continue_final_message),
            ("add_generation_prompt", self.add_generation_prompt is False),
        ):
            if is_set:
                raise InvalidRequestError(
                    f"with tools, the reply is a message of its own; leave {name} out", name
                )

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

    def render(self, dialect: ChatDialect) -> str:
        """Return the prompt as text."""
        # With tool_choice none the model does not see the tools; with allowed_tools it sees all.
        tools = self.tools or () if self.choice().tools else ()
        return dialect.render(
            self.conversation(),
            [tool.for_template() for tool in tools],
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            variables={**(self.chat_template_kwargs or {}), **self._effort(dialect)},
        )

    def _effort(self, dialect: ChatDialect) -> dict[str, Any]:
        """Return reasoning_effort as variables of the template, or refuse it."""
        effort = self.reasoning_effort
        if effort is None:
            return {}
        variables = dialect.effort_variables(effort)
        if variables is None:
            raise InvalidRequestError(
                f"reasoning_effort {effort} cannot be honoured: the chat template of this model "
                "has no variable for it; leave it out",
                "reasoning_effort",
            )
        for name in variables:
            if name in (self.chat_template_kwargs or {}):
                raise InvalidRequestError(
                    f"reasoning_effort and chat_template_kwargs.{name} exclude each other",
                    "reasoning_effort",
                )
        return variables

    def params(self) -> SamplingParams:
        return self.sampling(self.output_limit, (self.top_logprobs or 0) if self.logprobs else None)

    @property
    def grammar_field(self) -> str:
        return "tools" if self.choice().tools else super().grammar_field

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
