"""A conversation that is put together from the items of another API."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headway.errors import InvalidRequestError

Json = dict[str, Any]


def read_object(value: Any, location: str, known: Collection[str]) -> Json:
    """Return a JSON object whose keys are all known; null is no key."""
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{location} must be an object", location)
    for name, item in value.items():
        if name not in known and item is not None:
            where = f"{location}.{name[:100]}"
            raise InvalidRequestError(f"unknown field: {where}", where)
    return value


def read_list(value: Any, location: str) -> list[Any]:
    """Return a JSON list."""
    if not isinstance(value, list):
        raise InvalidRequestError(f"{location} must be a list", location)
    return value


def read_text(value: Any, location: str) -> str:
    """Return a JSON string."""
    if not isinstance(value, str):
        raise InvalidRequestError(f"{location} must be text", location)
    return value


def kind_of(value: Any) -> str:
    """Return the type that an object says it has; empty without one."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""


Kinds = Mapping[str, Sequence[str]]
"""Types that a part may have, each with its keys; the first key is that of the text."""


def read_parts(content: Any, location: str, kinds: Kinds) -> list[str]:
    """Return the texts of a content, which is text or a list of parts."""
    if isinstance(content, str):
        return [content]
    texts: list[str] = []
    for place, part in enumerate(read_list(content, location)):
        texts.append(read_part(part, f"{location}[{place}]", kinds))
    return texts


def read_part(part: Any, location: str, kinds: Kinds) -> str:
    """Return the text of a part."""
    kind = kind_of(part)
    if kind not in kinds:
        raise InvalidRequestError(
            f"{location}: only parts of type {', '.join(kinds)} are supported, got {kind[:40]!r}",
            location,
        )
    read_object(part, location, ("type", *kinds[kind]))
    field = kinds[kind][0]
    return read_text(part.get(field), f"{location}.{field}")


def as_content(texts: Sequence[str]) -> str | list[Json]:
    """Return texts as the content of a message."""
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts]


class Conversation:
    """Messages of a chat, in the form of its request body."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.names: dict[str, str] = {}
        """The client's names, by the fields of the messages."""
        self._system: list[str] = []

    def add_system(self, texts: Sequence[str], location: str) -> None:
        """Add a system message; several in a row are one, because templates take one."""
        if not self._system:
            self.add({"role": "system"}, location)
        self._system += texts
        self.messages[-1]["content"] = "\n\n".join(self._system)

    def add(self, message: Json, location: str) -> None:
        self.drop_bare_reasoning()
        self._system = []
        self.names[f"messages[{len(self.messages)}]"] = location
        self.messages.append(message)

    def drop_bare_reasoning(self) -> None:
        """Drop a last message that has reasoning alone; templates write only whole replies."""
        if self.messages and self.messages[-1].keys() == {"role", "reasoning_content"}:
            self.messages.pop()

    def add_reply(self, message: Json, location: str) -> None:
        """Add a part of a reply to the reply before it, if it can follow there."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or _is_beyond(last, message):
            self.add({"role": "assistant"}, location)
            last = self.messages[-1]
        where = f"messages[{len(self.messages) - 1}]"
        for name, value in message.items():
            if name == "tool_calls":
                calls = last.setdefault(name, [])
                self.names[f"{where}.{name}[{len(calls)}].function"] = location
                self.names[f"{where}.{name}[{len(calls)}].id"] = f"{location}.call_id"
                calls += value
            else:
                last[name] = value
                self.names[f"{where}.{name}"] = location

    def add_result(self, call_id: Any, texts: Sequence[str], names: Mapping[str, str]) -> None:
        """Add the result of a tool call; `names` has the names of its id and of its content."""
        where = f"messages[{len(self.messages)}]"
        content = as_content(texts) if texts else ""
        self.add({"role": "tool", "tool_call_id": call_id, "content": content}, names["content"])
        self.names[f"{where}.tool_call_id"] = names["id"]


_ORDER = ("reasoning_content", "content", "tool_calls")


def _is_beyond(last: Json, message: Json) -> bool:
    """Return whether a reply has come to what this part of a reply precedes."""
    first = min(_ORDER.index(name) for name in message)
    later = _ORDER[first:] if first < 2 else ()
    return any(name in last for name in later)
