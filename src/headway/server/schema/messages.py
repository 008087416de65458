"""The request bodies of /v1/messages, and the conversation that they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field, WithJsonSchema

from headway.errors import InvalidRequestError
from headway.server.schema.adapted import FieldNames, ReadRequest, validate_chat
from headway.server.schema.chat import MAX_MESSAGES, ChatRequest
from headway.server.schema.conversation import (
    Conversation,
    Json,
    as_content,
    kind_of,
    read_list,
    read_object,
    read_part,
    read_parts,
)
from headway.server.schema.fields import Fields, Only, RequestLimits, at_most
from headway.server.schema.request import MaxTokens, parse
from headway.server.schema.sampling import SharedFields
from headway.server.schema.tools import MAX_TOOLS

BILLING_HEADER = "x-anthropic-billing-header"
"""Begins a block of system text that differs in every request, and so would defeat the cache."""
KEEP_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
ERROR_PREFIX = "Error: "
THINKING = ("adaptive", "disabled", "enabled")
_TEXT = {"text": ("text", "cache_control", "citations")}
_USER = {**_TEXT, "tool_result": ("tool_use_id", "content", "is_error", "cache_control")}
_THOUGHTS = {"thinking": ("thinking", "signature"), "redacted_thinking": ("data",)}
_CALL = {"tool_use": ("id", "name", "input", "cache_control")}
_OBJECT = {"anyOf": [{"type": "object"}, {"type": "null"}]}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": _TEXTS},
    "required": ["role", "content"],
    "additionalProperties": False,
}
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "continue_final_message": "messages",
    "thinking_token_budget": "thinking.budget_tokens",
}


class ThinkingOptions(Fields):
    """Whether the model reasons, and for how many tokens at most."""

    type: Annotated[str, WithJsonSchema({"enum": list(THINKING)})]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Annotated[Any, Only(("summarized",))] = None


class OutputFormat(Fields):
    """A schema that the text must follow."""

    type: Annotated[str, WithJsonSchema({"const": "json_schema"})]
    schema_: Annotated[Any, Field(alias="schema"), WithJsonSchema({"type": "object"})]


class OutputConfig(Fields):
    """The form of the answer, and how much the model reasons."""

    effort: str | None = None
    format: OutputFormat | None = None


class PromptFields(Fields):
    """Fields that decide what the prompt is."""

    messages: Annotated[
        list[Any],
        at_most(MAX_MESSAGES),
        WithJsonSchema({"type": "array", "minItems": 1, "items": _MESSAGE}),
    ]
    system: Annotated[Any, WithJsonSchema({"anyOf": [*_TEXTS["anyOf"], {"type": "null"}]})] = None
    tools: Annotated[
        list[Any] | None,
        at_most(MAX_TOOLS),
        WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "object"}}, _OBJECT]}),
    ] = None
    tool_choice: Annotated[Any, WithJsonSchema(_OBJECT)] = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    cache_control: Annotated[Any, WithJsonSchema(_OBJECT)] = None

    speed: Annotated[Any, Only(("standard",))] = None
    context_management: Annotated[Any, Only(({"edits": []}, KEEP_THINKING))] = None
    mcp_servers: Annotated[Any, Only(([],))] = None
    user_profile_id: Annotated[Any, Only()] = None
    workspace_id: Annotated[Any, Only()] = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        if not isinstance(self.cache_control, dict | None):
            raise InvalidRequestError("cache_control must be an object", "cache_control")
        if self.thinking is None:
            return
        self.thinking.refuse_unsupported("thinking.")
        if self.thinking.type not in THINKING:
            raise InvalidRequestError(
                f"thinking.type must be one of {', '.join(THINKING)}", "thinking.type"
            )
        if (self.thinking.type == "enabled") != (self.thinking.budget_tokens is not None):
            raise InvalidRequestError(
                "thinking.budget_tokens must be there for enabled thinking, and for no other",
                "thinking.budget_tokens",
            )

    def to_chat(self) -> tuple[Json, dict[str, str]]:
        """Return the fields of the same request to chat, and the client's names of them."""
        conversation = Conversation()
        if self.system is not None:
            _read_system(self.system, conversation)
        for place, message in enumerate(self.messages):
            _read_message(message, f"messages[{place}]", conversation)
        names = {**_NAMES, **conversation.names}
        content: Json = {
            "messages": conversation.messages,
            "tools": _read_tools(self.tools or (), names) or None,
            "reasoning_effort": self._effort(names),
            "thinking_token_budget": None if self.thinking is None else self.thinking.budget_tokens,
            "response_format": self._format(),
            **_read_choice(self.tool_choice),
        }
        last = conversation.messages[-1] if conversation.messages else {}
        if "tool_calls" in last:
            raise InvalidRequestError(
                "messages must not end with a tool_use block; its tool_result must follow",
                "messages",
            )
        # The answer continues a last message of the assistant.
        content["continue_final_message"] = True if last.get("role") == "assistant" else None
        return content, names

    def _effort(self, names: dict[str, str]) -> str | None:
        effort = None if self.output_config is None else self.output_config.effort
        names["reasoning_effort"] = "output_config.effort"
        if self.thinking is None or self.thinking.type != "disabled":
            return effort
        if effort is not None:
            raise InvalidRequestError(
                "output_config.effort and disabled thinking exclude each other",
                "output_config.effort",
            )
        names["reasoning_effort"] = "thinking"
        return "none"

    def _format(self) -> Json | None:
        given = None if self.output_config is None else self.output_config.format
        if given is None:
            return None
        schema = {"name": "output", "schema": given.schema_}
        return {"type": given.type, "json_schema": schema}


class MessageMetadata(Fields):
    """Who the client's own user is; has no effect."""

    user_id: str | None = None


class MessagesRequest(PromptFields, SharedFields):
    """A conversation to answer."""

    max_tokens: MaxTokens
    stop_sequences: Annotated[
        list[Any] | None,
        WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, _OBJECT]}),
    ] = None
    metadata: MessageMetadata | None = None

    service_tier: Annotated[Any, Only(("auto", "standard_only"))] = None
    container: Annotated[Any, Only()] = None
    diagnostics: Annotated[Any, Only()] = None
    inference_geo: Annotated[Any, Only()] = None


class CountTokensRequest(PromptFields):
    """A conversation whose tokens are to be counted."""

    model: str | None = None


def read_messages(body: bytes, limits: RequestLimits) -> ReadRequest[ChatRequest]:
    """Return a body of /v1/messages as a conversation."""
    request = parse(MessagesRequest, body, limits)
    content, names = request.to_chat()
    content |= {**request.shared(), "max_tokens": request.max_tokens}
    content["stop"] = request.stop_sequences
    return _read(content, names, len(body), limits)


def read_prompt(body: bytes, limits: RequestLimits) -> ReadRequest[ChatRequest]:
    """Return a body of /v1/messages/count_tokens as a conversation."""
    request = parse(CountTokensRequest, body, limits)
    content, names = request.to_chat()
    content["model"] = request.model
    return _read(content, names, len(body), limits)


def _read(
    content: Json, names: dict[str, str], num_bytes: int, limits: RequestLimits
) -> ReadRequest[ChatRequest]:
    given = FieldNames(names)
    return ReadRequest(validate_chat(content, given, limits), num_bytes, given)


def _read_system(system: Any, conversation: Conversation) -> None:
    texts = read_parts(system, "system", _TEXT)
    texts = [text for text in texts if not text.startswith(BILLING_HEADER)]
    if texts:
        conversation.add_system(texts, "system")


def _read_message(message: Any, location: str, conversation: Conversation) -> None:
    read_object(message, location, ("role", "content"))
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise InvalidRequestError(f"{location}.role must be user or assistant", f"{location}.role")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    blocks = read_list(blocks, f"{location}.content")
    read = _read_user if role == "user" else _read_assistant
    read(blocks, location, conversation)


def _read_user(blocks: Sequence[Any], location: str, conversation: Conversation) -> None:
    texts: list[str] = []
    for place, block in enumerate(blocks):
        where = f"{location}.content[{place}]"
        if kind_of(block) != "tool_result":
            texts.append(read_part(block, where, {**_TEXT, "tool_result": ("content",)}))
            continue
        if texts:
            conversation.add({"role": "user", "content": as_content(texts)}, location)
            texts = []
        _read_result(block, where, conversation)
    if texts or not blocks:
        conversation.add({"role": "user", "content": as_content(texts)}, location)


def _read_result(block: Any, location: str, conversation: Conversation) -> None:
    read_object(block, location, ("type", *_USER["tool_result"]))
    content = "" if block.get("content") is None else block["content"]
    texts = read_parts(content, f"{location}.content", _TEXT)
    if block.get("is_error"):
        texts = [ERROR_PREFIX + "\n".join(texts)]
    names = {"id": f"{location}.tool_use_id", "content": location}
    conversation.add_result(block.get("tool_use_id"), texts, names)


def _read_assistant(blocks: Sequence[Any], location: str, conversation: Conversation) -> None:
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[Json] = []
    at = f"messages[{len(conversation.messages)}].tool_calls"
    for place, block in enumerate(blocks):
        where, kind = f"{location}.content[{place}]", kind_of(block)
        if kind == "tool_use":
            conversation.names[f"{at}[{len(calls)}].function"] = where
            conversation.names[f"{at}[{len(calls)}]"] = where
            calls.append(_read_call(block, where))
        elif kind in _THOUGHTS:
            thought = read_part(block, where, _THOUGHTS)
            thoughts += [thought] if kind == "thinking" else ()
        else:
            texts.append(read_part(block, where, {**_TEXT, **_CALL, **_THOUGHTS}))
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    conversation.add(message, location)


def _read_call(block: Any, location: str) -> Json:
    read_object(block, location, ("type", *_CALL["tool_use"]))
    if not isinstance(block.get("input"), dict):
        raise InvalidRequestError(f"{location}.input must be an object", f"{location}.input")
    arguments = msgspec.json.encode(block["input"]).decode()
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


_TOOL_KEYS = ("type", "name", "description", "input_schema", "strict", "cache_control")


def _read_tools(tools: Sequence[Any], names: dict[str, str]) -> list[Json]:
    read: list[Json] = []
    for place, tool in enumerate(tools):
        location = f"tools[{place}]"
        if isinstance(tool, dict) and tool.get("type") not in (None, "custom"):
            raise InvalidRequestError(
                f"{location}.type must be custom: no tool is run or defined here",
                f"{location}.type",
            )
        read_object(tool, location, _TOOL_KEYS)
        if not isinstance(tool.get("input_schema"), dict):
            raise InvalidRequestError(
                f"{location}.input_schema must be a JSON schema", f"{location}.input_schema"
            )
        names[f"{location}.function"] = location
        names[f"{location}.function.parameters"] = f"{location}.input_schema"
        function = {name: tool.get(name) for name in ("name", "description", "strict")}
        function["parameters"] = tool["input_schema"]
        read.append({"type": "function", "function": function})
    return read


_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": ""}


def _read_choice(choice: Any) -> Json:
    """Return tool_choice as fields of chat."""
    if choice is None:
        return {}
    kind = kind_of(choice)
    known = ("type", "disable_parallel_tool_use", *(("name",) if kind == "tool" else ()))
    read_object(choice, "tool_choice", known)
    if kind not in _CHOICES:
        raise InvalidRequestError(
            f"tool_choice.type must be one of {', '.join(_CHOICES)}", "tool_choice.type"
        )
    is_single = choice.get("disable_parallel_tool_use")
    if not isinstance(is_single, bool | None):
        name = "tool_choice.disable_parallel_tool_use"
        raise InvalidRequestError(f"{name} must be true or false", name)
    named = {"type": "function", "function": {"name": choice.get("name")}}
    return {"tool_choice": _CHOICES[kind] or named, "parallel_tool_calls": not is_single}
