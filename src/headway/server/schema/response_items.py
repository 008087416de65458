"""The items of a Responses request: messages, tool calls, their results, and reasoning."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.errors import InvalidRequestError
from headway.server.schema.conversation import (
    Conversation,
    as_content,
    kind_of,
    read_list,
    read_object,
    read_parts,
    read_text,
)

MAX_ITEMS = 4096
ROLES = ("user", "assistant", "system", "developer")
INPUT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "maxItems": MAX_ITEMS, "items": {"type": "object"}},
    ]
}
_TEXTS = {"input_text": ("text",), "output_text": ("text", "annotations", "logprobs", "parsed")}
"""Also with `parsed`, which the parser of the official client adds."""
_REPLIES = {**_TEXTS, "refusal": ("refusal",)}
_REASONING = {"reasoning_text": ("text",), "summary_text": ("text",)}
_CALL_KEYS = ("type", "id", "status", "call_id", "name")


def read_input(content: Any, conversation: Conversation) -> None:
    """Add the input of a request to a conversation; raise InvalidRequestError if it is wrong."""
    if isinstance(content, str):
        conversation.add({"role": "user", "content": content}, "input")
        return
    if not isinstance(content, list) or not 0 < len(content) <= MAX_ITEMS:
        raise InvalidRequestError(
            f"input must be text or a list of 1 to {MAX_ITEMS} items", "input"
        )
    for place, item in enumerate(content):
        location = f"input[{place}]"
        is_plain = isinstance(item, dict) and item.get("type") is None
        kind = "message" if is_plain else kind_of(item)
        read = _READERS.get(kind)
        if read is None:
            raise InvalidRequestError(
                f"{location}: items of type {', '.join(_READERS)} are supported, got {kind[:40]!r}",
                location,
            )
        read(item, location, conversation)
    conversation.drop_bare_reasoning()


def _read_message(item: Any, location: str, conversation: Conversation) -> None:
    read_object(item, location, ("type", "id", "status", "phase", "role", "content"))
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{location}.role must be one of {', '.join(ROLES)}", f"{location}.role"
        )
    kinds = _REPLIES if role == "assistant" else _TEXTS
    texts = read_parts(content, f"{location}.content", kinds)
    if role in ("system", "developer"):
        conversation.add_system(texts, location)
    elif role == "assistant":
        conversation.add_reply({"content": as_content(texts)}, location)
    else:
        conversation.add({"role": role, "content": as_content(texts)}, location)


def _read_call(item: Any, location: str, conversation: Conversation) -> None:
    # The parser of the official client adds the arguments once more.
    read_object(item, location, (*_CALL_KEYS, "arguments", "parsed_arguments"))
    _add_call(item, location, conversation, item.get("arguments"))


def _read_custom_call(item: Any, location: str, conversation: Conversation) -> None:
    read_object(item, location, (*_CALL_KEYS, "input"))
    text = read_text(item.get("input"), f"{location}.input")
    arguments = msgspec.json.encode({"input": text}).decode()
    _add_call(item, location, conversation, arguments)


def _add_call(item: Any, location: str, conversation: Conversation, arguments: Any) -> None:
    function = {"name": item.get("name"), "arguments": arguments}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    conversation.add_reply({"tool_calls": [call]}, location)


def _read_output(item: Any, location: str, conversation: Conversation) -> None:
    read_object(item, location, ("type", "id", "status", "call_id", "output", "name"))
    texts = read_parts(item.get("output"), f"{location}.output", _TEXTS)
    names = {"id": f"{location}.call_id", "content": location}
    conversation.add_result(item.get("call_id"), texts, names)


def _read_reasoning(item: Any, location: str, conversation: Conversation) -> None:
    known = ("type", "id", "status", "summary", "content", "encrypted_content")
    read_object(item, location, known)
    texts: list[str] = []
    for name in ("summary", "content"):
        if item.get(name) is not None:
            parts = read_list(item[name], f"{location}.{name}")
            texts = read_parts(parts, f"{location}.{name}", _REASONING) or texts
    if texts:
        conversation.add_reply({"reasoning_content": "\n".join(texts)}, location)


_READERS = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "custom_tool_call": _read_custom_call,
    "custom_tool_call_output": _read_output,
    "reasoning": _read_reasoning,
}
