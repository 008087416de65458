"""The request body of /v1/responses, and the conversation that it means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from headway.errors import InvalidRequestError
from headway.server.schema.adapted import Echo, FieldNames, ReadRequest, validate_chat
from headway.server.schema.chat import EFFORTS, METADATA, ChatRequest, ThinkingTokens
from headway.server.schema.conversation import Conversation, Json, kind_of, read_object
from headway.server.schema.fields import Fields, Only, RequestLimits, at_most
from headway.server.schema.request import MaxTokens, NumLogprobs, parse
from headway.server.schema.response_items import INPUT, read_input
from headway.server.schema.sampling import SamplingFields
from headway.server.schema.tools import MAX_TOOLS

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
HOSTED_TOOLS = frozenset(
    (
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "namespace",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    )
)
"""Types of tools that their provider runs. None is run here, so none is offered to the model."""
CUSTOM_FIELD = "input"
"""The one argument of a custom tool, which the model calls as a function."""
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_FIELD: {"type": "string"}},
    "required": [CUSTOM_FIELD],
    "additionalProperties": False,
}
_OBJECTS = {"type": "array", "maxItems": MAX_TOOLS, "items": {"type": "object"}}
_CHOICE = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}
_INCLUDE = {"type": "array", "maxItems": 32, "items": {"enum": list(INCLUDABLE)}}
_OBJECT = {"anyOf": [{"type": "object"}, {"type": "null"}]}
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "include",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


class TextFormat(Fields):
    """The form of the text; a schema is always enforced, with `strict` or without."""

    type: Annotated[str, WithJsonSchema({"enum": ["text", "json_object", "json_schema"]})]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Any, Field(alias="schema"), WithJsonSchema(_OBJECT)] = None
    strict: bool | None = None


class TextOptions(Fields):
    """What the text of the answer looks like."""

    format: TextFormat | None = None
    verbosity: Annotated[Any, Only(("medium",))] = None


class ReasoningOptions(Fields):
    """How much the model reasons; reasoning is in the answer as text, so it has no summary."""

    effort: Annotated[str | None, WithJsonSchema({"enum": [*EFFORTS, None]})] = None
    summary: Annotated[Any, Only(("auto",))] = None
    generate_summary: Annotated[Any, Only(("auto",))] = None


class ResponseStreamOptions(Fields):
    """Options of a stream."""

    include_obfuscation: Annotated[Any, Only((False,))] = None


class ResponsesRequest(SamplingFields):
    """Items to answer. Every request has its whole conversation; only background ones are kept."""

    input: Annotated[Any, WithJsonSchema(INPUT)]
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    top_logprobs: NumLogprobs | None = None
    include: Annotated[
        list[Any] | None, at_most(32), WithJsonSchema({"anyOf": [_INCLUDE, {"type": "null"}]})
    ] = None
    tools: Annotated[
        list[Any] | None,
        at_most(MAX_TOOLS),
        WithJsonSchema({"anyOf": [_OBJECTS, {"type": "null"}]}),
    ] = None
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Annotated[Any, WithJsonSchema(METADATA)] = None
    client_metadata: Annotated[Any, WithJsonSchema(_OBJECT)] = None
    background: bool | None = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, WithJsonSchema(_OBJECT)] = None
    thinking_token_budget: ThinkingTokens | None = None

    service_tier: Annotated[Any, Only(("auto", "default"))] = None
    truncation: Annotated[Any, Only(("disabled",))] = None
    access_programs: Annotated[Any, Only()] = None
    context_management: Annotated[Any, Only()] = None
    conversation: Annotated[Any, Only()] = None
    image: Annotated[Any, Only()] = None
    max_tool_calls: Annotated[Any, Only()] = None
    moderation: Annotated[Any, Only()] = None
    previous_response_id: Annotated[Any, Only()] = None
    prompt: Annotated[Any, Only()] = None
    prompt_cache_options: Annotated[Any, Only()] = None
    prompt_cache_retention: Annotated[Any, Only()] = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        for name in ("text", "reasoning", "stream_options"):
            part: Fields | None = getattr(self, name)
            if part is not None:
                part.refuse_unsupported(f"{name}.")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is only allowed when stream is true", "stream_options"
            )
        if self.background and self.store is False:
            raise InvalidRequestError(
                "a background response is kept for its client; store must be true or left out",
                "store",
            )
        for place, name in enumerate(self.include or ()):
            if name not in INCLUDABLE:
                raise InvalidRequestError(
                    f"include[{place}] must be one of {', '.join(INCLUDABLE)}", f"include[{place}]"
                )
        if not isinstance(self.client_metadata, dict | None):
            raise InvalidRequestError("client_metadata must be an object", "client_metadata")

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def to_chat(self) -> tuple[Json, FieldNames, Echo]:
        """Return the body of the same request to chat, its names, and what its answer repeats."""
        conversation = Conversation()
        if self.instructions is not None:
            conversation.add_system([self.instructions], "instructions")
        read_input(self.input, conversation)
        names = {**_NAMES, **conversation.names}
        tools = _Tools(self.tools or (), names)
        content = {
            **self.shared(),
            "messages": conversation.messages,
            "max_tokens": self.max_output_tokens,
            "logprobs": self.has_logprobs or None,
            "top_logprobs": self.top_logprobs,
            "tools": tools.offered or None,
            "tool_choice": _to_chat_choice(self.tool_choice),
            "response_format": self._format(),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            **{name: getattr(self, name) for name in _SAME},
        }
        return content, FieldNames(names), Echo(self._echo(tools.shown), tuple(tools.ignored))

    def _format(self) -> Json | None:
        given = None if self.text is None else self.text.format
        if given is None:
            return None
        schema = {"name": given.name, "description": given.description, "strict": given.strict}
        schema["schema"] = given.schema_
        if all(value is None for value in schema.values()):
            return {"type": given.type}
        return {"type": given.type, "json_schema": schema}

    def _echo(self, tools: list[Json]) -> Json:
        given = None if self.text is None else self.text.format
        text = given or TextFormat(type="text")
        effort = None if self.reasoning is None else self.reasoning.effort
        return {
            "background": bool(self.background),
            "store": bool(self.background),
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": effort, "summary": None},
            "safety_identifier": self.safety_identifier,
            "text": {
                "format": text.model_dump(by_alias=True, exclude_none=True),
                "verbosity": "medium",
            },
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": tools,
            "top_logprobs": self.top_logprobs or 0,
            "user": self.user,
        }


_SAME = (
    "parallel_tool_calls",
    "metadata",
    "store",
    "prompt_cache_key",
    "safety_identifier",
    "user",
    "chat_template_kwargs",
    "thinking_token_budget",
    "service_tier",
)
"""Fields that chat has with the same meaning."""


class _Tools:
    """The tools of a request: as chat has them, as the answer shows them, and those left out."""

    def __init__(self, tools: list[Any] | tuple[()], names: dict[str, str]) -> None:
        self.offered: list[Json] = []
        self.shown: list[Json] = []
        self.ignored: dict[str, None] = {}
        for place, tool in enumerate(tools):
            location, kind = f"tools[{place}]", kind_of(tool)
            if kind in HOSTED_TOOLS:
                self.ignored.setdefault(kind)
                continue
            if kind not in ("function", "custom"):
                raise InvalidRequestError(
                    f"{location}.type must be function or custom, got {kind[:40]!r}",
                    f"{location}.type",
                )
            names[f"tools[{len(self.offered)}].function"] = location
            read = _read_function if kind == "function" else _read_custom
            function, shown = read(tool, location)
            self.offered.append({"type": "function", "function": function})
            self.shown.append({"type": kind, **shown})


def _read_function(tool: Any, location: str) -> tuple[Json, Json]:
    known = ("name", "description", "parameters", "strict")
    read_object(tool, location, ("type", *known))
    shown = {name: tool.get(name) for name in known}
    return {name: value for name, value in shown.items() if value is not None}, shown


def _read_custom(tool: Any, location: str) -> tuple[Json, Json]:
    """Return a custom tool as a function with one text, and as the answer shows it."""
    read_object(tool, location, ("type", "name", "description", "format"))
    if tool.get("format") not in (None, {"type": "text"}):
        raise InvalidRequestError(
            f"{location}.format must be text: grammars of custom tools are not supported",
            f"{location}.format",
        )
    shown = {"name": tool.get("name"), "description": tool.get("description")}
    function = {name: value for name, value in shown.items() if value is not None}
    return {**function, "parameters": _CUSTOM_PARAMETERS}, {**shown, "format": {"type": "text"}}


def _to_chat_choice(choice: Any) -> Any:
    """Return tool_choice in the form of chat, which checks it."""
    kind = kind_of(choice)
    if kind in ("function", "custom") and choice.keys() == {"type", "name"}:
        return {"type": "function", "function": {"name": choice["name"]}}
    if kind == "allowed_tools" and choice.keys() == {"type", "mode", "tools"}:
        tools = choice["tools"]
        if isinstance(tools, list):
            tools = [_to_chat_choice(one) for one in tools if kind_of(one) not in HOSTED_TOOLS]
        return {"type": kind, "allowed_tools": {"mode": choice["mode"], "tools": tools}}
    return choice


def read_responses(body: bytes, limits: RequestLimits) -> ReadRequest[ChatRequest]:
    """Return a body as a conversation."""
    content, names, echo = parse(ResponsesRequest, body, limits).to_chat()
    chat = validate_chat(content, names, limits)
    return ReadRequest(chat, len(body), names, Echo(echo.fields, echo.ignored_tools, len(body)))


def custom_names(tools: list[Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of the custom tools among those that an answer shows."""
    return frozenset(tool["name"] for tool in tools if tool["type"] == "custom")
