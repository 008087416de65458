"""Conversations with tool calls in the form that a chat template reads.

For a template without tools, calls and results become plain messages, and the tools are described
in the system message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from headway.text.tools.forms import HERMES, CallForm

Message = dict[str, Any]

_INTRODUCTION = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_INSTRUCTIONS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def with_short_ids(messages: Sequence[Message], num_chars: int) -> list[Message]:
    """Return messages whose ids of tool calls have the length that a template demands."""
    return [_short_ids(message, num_chars) for message in messages]


def _short_ids(message: Message, num_chars: int) -> Message:
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = _short_id(message["tool_call_id"], num_chars)
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {**call, "id": _short_id(call["id"], num_chars)} for call in message["tool_calls"]
        ]
    return changed


def _short_id(call_id: str, num_chars: int) -> str:
    """Return an id as it is if it fits, else a digest: a part of it might not be unique."""
    if len(call_id) == num_chars and call_id.isascii() and call_id.isalnum():
        return call_id
    return blake2b(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:num_chars]


def as_plain_messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which calls and results of tools are text.

    Results that follow each other become one message: templates may insist that the roles of user
    and assistant alternate.
    """
    plain: list[Message] = []
    was_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{_text(message)}\n</tool_response>"
            if was_result:
                plain[-1]["content"] += f"\n{text}"
            else:
                plain.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            calls = HERMES.separator.join(
                [_write_call(HERMES, call["function"]) for call in message["tool_calls"]]
            )
            content = "\n".join([part for part in (_text(message), calls) if part])
            plain.append({"role": message["role"], "content": content})
        else:
            plain.append(dict(message))
        was_result = is_result
    return plain


def with_tool_prompt(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, has_system: bool
) -> list[Message]:
    """Return messages with a description of the tools.

    The description is in the system message; for a template without one, in the first message.
    """
    described = "\n".join([json.dumps(tool, ensure_ascii=False) for tool in tools])
    prompt = f"{_INTRODUCTION}{described}{_INSTRUCTIONS}"
    first, rest = dict(messages[0]), list(messages[1:])
    if first["role"] == "system" or not has_system:
        first["content"] = f"{_text(first)}\n\n{prompt}"
        return [first, *rest]
    return [{"role": "system", "content": prompt}, *messages]


def _write_call(form: CallForm, function: Mapping[str, Any]) -> str:
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    parts = (form.before_name, function["name"], form.after_name, arguments, form.after_arguments)
    return "".join(parts)


def _text(message: Mapping[str, Any]) -> str:
    """Return the content of a message as text; parts are joined as templates would."""
    content = message["content"]
    if isinstance(content, str):
        return content
    return "\n".join([part["text"] for part in content])
