"""Arguments of tool calls in tags, one for each: their grammar and their reader.

The text of a tag is the argument itself if it can only be a string, and JSON otherwise. Which
arguments of which tool are strings is a note of the grammar: whoever continues a stream has its
grammar, and not the tools of its request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headway.errors import InvalidRequestError
from headway.text.grammar import ON_ONE_LINE, json_rule
from headway.text.tools.forms import NAME_CHARS
from headway.text.tools.parser import SPACES, find_marker

ANY_TEXT = "/(?s:.*)/"
XML_LINES = (
    f'WITH_END: {ANY_TEXT} "\\n</parameter>" {ANY_TEXT}',
    f'RAW: ({ANY_TEXT} & ~WITH_END) "\\n</parameter>\\n"',
)
_OPEN = "<parameter="
_CLOSE = "\n</parameter>"
NOTE = "strings"
_PLAIN_KEYWORDS = frozenset({"type", "title", "description", "default", "examples"})
"""Beside these, a string is written as JSON: its schema restricts its text."""
_OBJECT_KEYWORDS = frozenset(
    {
        *("type", "properties", "required", "additionalProperties"),
        *("$defs", "definitions", "$schema", "$id", "title", "description"),
    }
)


def xml_rule(schema: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return what a rule contains for arguments, and the names of those that are plain strings.

    Arguments come in the order of the schema. Raises InvalidRequestError for a keyword that this
    form cannot honour.
    """
    for keyword in schema:
        if keyword not in _OBJECT_KEYWORDS:
            raise InvalidRequestError(f"{keyword} is not supported at the top of the schema")
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    properties = schema["properties"]
    required = schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise InvalidRequestError("properties must be an object, and required a list")
    for name in required:
        if name not in properties:
            raise InvalidRequestError(f"required names {str(name)[:64]!r}, which properties lacks")
    parts: list[str] = []
    strings: list[str] = []
    for name, one in properties.items():
        if not name or not NAME_CHARS.issuperset(name):
            raise InvalidRequestError(f"the name {name[:64]!r} cannot be the name of a tag")
        value = "RAW"
        if _is_plain_string(one):
            strings.append(name)
        else:
            if not isinstance(one, Mapping):
                raise InvalidRequestError(f"the schema of {name} must be a JSON object")
            described = {**one, **definitions}
            value = f"{json_rule(described, ON_ONE_LINE)} {json.dumps(_CLOSE + chr(10))}"
        part = f"{json.dumps(f'{_OPEN}{name}>' + chr(10))} {value}"
        parts.append(part if name in required else f"({part})?")
    return " ".join(parts), strings


def _is_plain_string(schema: Any) -> bool:
    return (
        isinstance(schema, Mapping)
        and schema.get("type") == "string"
        and _PLAIN_KEYWORDS.issuperset(schema)
    )


class XmlReader:
    """Reads the arguments of one call as one JSON object."""

    def __init__(self, strings: Mapping[str, Sequence[str]], name: str) -> None:
        self._strings = frozenset(strings.get(name, ()))
        self._pending = ""
        self._is_in_value = False
        self._is_string = False
        self._num_values = -1
        """-1 before the brace that opens the object."""
        self.is_complete = False

    def feed(self, text: str) -> tuple[str, str]:
        text, self._pending = self._pending + text, ""
        written: list[str] = []
        if self._num_values < 0 and text:
            self._num_values = 0
            written.append("{")
        while text and not self.is_complete:
            read = self._read_value if self._is_in_value else self._read_tag
            part, text = read(text)
            written.append(part)
        return "".join(written), text

    def _read_tag(self, text: str) -> tuple[str, str]:
        """Return JSON text of a tag, and the rest; an incomplete tag is held back."""
        tag = text.lstrip(SPACES)
        if tag.startswith("</"):
            self.is_complete = True
            return "}", tag
        head, end, rest = tag.partition(">")
        if not end or not rest:  # the line break after the tag belongs to it
            self._pending = tag
            return "", ""
        name = head.removeprefix(_OPEN)
        comma = ", " if self._num_values else ""
        self._num_values += 1
        self._is_in_value, self._is_string = True, name in self._strings
        return f"{comma}{json.dumps(name)}: " + '"' * self._is_string, rest.removeprefix("\n")

    def _read_value(self, text: str) -> tuple[str, str]:
        value, rest, self._pending = find_marker(text, _CLOSE)
        if rest is not None:
            self._is_in_value = False
        if not self._is_string:
            return value, rest or ""
        escaped = json.dumps(value, ensure_ascii=False)[1:-1]
        return escaped + '"' * (rest is not None), rest or ""
