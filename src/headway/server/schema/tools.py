"""Fields that concern tools: the tools of a request, the choice among them, and past calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from headway.errors import InvalidRequestError
from headway.server.schema.fields import Fields, decode_object

MAX_TOOLS = 128
MAX_NAME_CHARS = 64
MAX_CALLS = 128
"""Tool calls in one message of the conversation."""
MAX_CALL_ID_CHARS = 256
MAX_ARGUMENTS_CHARS = 256 * 1024
_NAME = re.compile(f"[a-zA-Z0-9_-]{{1,{MAX_NAME_CHARS}}}")
_NAME_SCHEMA = {"type": "string", "pattern": f"^{_NAME.pattern}$"}
_PARAMETERS = {"anyOf": [{"type": "object", "additionalProperties": True}, {"type": "null"}]}
_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "minItems": 1, "maxItems": MAX_TOOLS, "items": _NAMED},
            },
            "required": ["mode", "tools"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "allowed_tools"],
    "additionalProperties": False,
}
TOOL_CHOICE = {
    "anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED, _ALLOWED, {"type": "null"}]
}


class FunctionDefinition(Fields):
    """A function; its arguments always follow the schema, with `strict` or without."""

    name: Annotated[str, WithJsonSchema(_NAME_SCHEMA)]
    description: str | None = None
    parameters: Annotated[Any, WithJsonSchema(_PARAMETERS)] = None
    strict: bool | None = None


class ToolDefinition(Fields):
    """A tool that the model may call."""

    type: Annotated[str, WithJsonSchema({"const": "function"})]
    function: FunctionDefinition

    def check_at(self, location: str) -> None:
        """Refuse what is not supported; `location` names the tool."""
        if self.type != "function":
            raise InvalidRequestError(
                f"{location}.type must be function, got {self.type[:40]!r}", f"{location}.type"
            )
        if _NAME.fullmatch(self.function.name) is None:
            raise InvalidRequestError(
                f"{location}.function.name must have 1 to {MAX_NAME_CHARS} letters, digits, "
                f"underscores and dashes, got {self.function.name[:80]!r}",
                f"{location}.function.name",
            )
        if not isinstance(self.function.parameters, dict | None):
            raise InvalidRequestError(
                f"{location}.function.parameters must be a JSON schema",
                f"{location}.function.parameters",
            )

    @property
    def parameters(self) -> dict[str, Any]:
        return self.function.parameters or {}

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates read."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        # Templates read the properties without asking whether there are any.
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


Tools = Annotated[list[ToolDefinition], Field(max_length=MAX_TOOLS)]


class PastFunction(Fields):
    """The function that was called, and its arguments as JSON text."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENTS_CHARS)]
    parsed_arguments: Any = None
    """Added by the parser of the official client; the same as the arguments."""


class PastCall(Fields):
    """A tool call in an earlier message of the assistant."""

    id: Annotated[str, Field(min_length=1, max_length=MAX_CALL_ID_CHARS)]
    type: Annotated[str, WithJsonSchema({"const": "function"})] = "function"
    function: PastFunction

    def check_at(self, location: str) -> None:
        if self.type != "function":
            raise InvalidRequestError(
                f"{location}.type must be function, got {self.type[:40]!r}", f"{location}.type"
            )
        self.arguments_at(location)

    def arguments_at(self, location: str) -> dict[str, Any]:
        """Return the arguments as an object; no text means none."""
        where = f"{location}.function.arguments"
        return decode_object(self.function.arguments or "{}", where, where)

    def for_template(self) -> dict[str, Any]:
        """Return the call in the form that chat templates read."""
        function = {"name": self.function.name, "arguments": self.arguments_at("tool_calls")}
        return {"id": self.id, "type": "function", "function": function}


PastCalls = Annotated[list[PastCall], Field(max_length=MAX_CALLS)]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which of its tools a reply may call, and whether it must."""

    tools: Sequence[tuple[int, ToolDefinition]] = ()
    """With their places in the request."""
    is_required: bool = False
    is_single: bool = False
    """Whether one call is all."""


NO_TOOLS = ToolChoice()


def check_tools(tools: Sequence[ToolDefinition]) -> None:
    """Refuse the first tool that is not supported."""
    names: set[str] = set()
    for place, tool in enumerate(tools):
        tool.check_at(f"tools[{place}]")
        if tool.function.name in names:
            raise InvalidRequestError(
                f"tools has two functions named {tool.function.name}",
                f"tools[{place}].function.name",
            )
        names.add(tool.function.name)


def read_choice(tools: Sequence[ToolDefinition], choice: Any) -> ToolChoice:
    """Return what tool_choice means for these tools; raise InvalidRequestError if it is wrong."""
    every = list(enumerate(tools))
    if choice is None or choice == "auto":
        return ToolChoice(every)
    if choice == "none":
        return NO_TOOLS
    if not tools:
        raise InvalidRequestError("tool_choice needs tools", "tool_choice")
    if choice == "required":
        return ToolChoice(every, is_required=True)
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "function" and choice.keys() == {"type", "function"}:
            return ToolChoice([_find(every, choice)], is_required=True, is_single=True)
        if kind == "allowed_tools" and choice.keys() == {"type", "allowed_tools"}:
            return _read_allowed(every, choice["allowed_tools"])
    raise InvalidRequestError(
        "tool_choice must be none, auto, required, a function by name, or allowed_tools",
        "tool_choice",
    )


def _read_allowed(every: list[tuple[int, ToolDefinition]], allowed: Any) -> ToolChoice:
    is_object = isinstance(allowed, dict) and allowed.keys() == {"mode", "tools"}
    if not is_object or allowed["mode"] not in ("auto", "required"):
        raise InvalidRequestError(
            "tool_choice.allowed_tools must have a mode, auto or required, and tools",
            "tool_choice.allowed_tools",
        )
    tools = allowed["tools"]
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise InvalidRequestError(
            f"tool_choice.allowed_tools.tools must be a list of 1 to {MAX_TOOLS} tools",
            "tool_choice.allowed_tools.tools",
        )
    found = {place: tool for place, tool in (_find(every, one) for one in tools)}
    return ToolChoice(sorted(found.items()), is_required=allowed["mode"] == "required")


def _find(every: list[tuple[int, ToolDefinition]], named: Any) -> tuple[int, ToolDefinition]:
    """Return the tool that an object names."""
    function = named.get("function") if isinstance(named, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    is_named = isinstance(name, str) and named == {"type": "function", "function": {"name": name}}
    if not is_named:
        raise InvalidRequestError(
            'tool_choice names a tool as {"type": "function", "function": {"name": "..."}}',
            "tool_choice",
        )
    for place, tool in every:
        if tool.function.name == name:
            return place, tool
    raise InvalidRequestError(
        f"tool_choice names {str(name)[:80]!r}, which is not among the tools", "tool_choice"
    )
