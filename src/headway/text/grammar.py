"""Grammars of structured output, as text: from a JSON schema, a regular expression or choices.

Each function returns a Lark grammar for `SamplingParams.grammar`, in the dialect of llguidance.
Bounds are checked here and do not depend on time. Whether llguidance can honour the grammar is
checked by `matchers.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headway.core.params import MAX_GRAMMAR_CHARS
from headway.errors import InvalidRequestError

MAX_DEPTH = 32
MAX_OBJECTS = 2000
"""JSON objects in a schema: references may chain them, and compiling recurses along the chain."""
MAX_PROPERTIES_PER_OBJECT = 250
MAX_PROPERTIES = 1000
MAX_ENUM_VALUES = 1000
MAX_CHOICES = 1000
MAX_PATTERN_CHARS = 4096
MAX_LARK_CHARS = 32 * 1024

HEADER = '%llguidance {"no_forcing": true}\n'
"""A forced text that spells a special token would become that token, which ends the output."""
_WHITESPACE = r"\x20|\n[\x20]{0,32}"
"""Between tokens of JSON: without a bound, small models write spaces until max_tokens."""
_ENFORCED = {"lenient": False, "coerce_one_of": True}
_ON_LINES = {"whitespace_pattern": _WHITESPACE, **_ENFORCED}
_COMPACT = {"whitespace_flexible": False, **_ENFORCED}
ON_ONE_LINE = {"whitespace_pattern": r"\x20", **_ENFORCED}
"""Options of JSON with at most one space between tokens."""


def json_grammar(schema: Mapping[str, Any] | str, *, is_compact: bool = False) -> str:
    """Return the grammar of JSON texts that are valid by a schema, which may be JSON text.

    Properties come in the order of the schema. With `is_compact` there is no whitespace.
    """
    if isinstance(schema, str):
        schema = _parse_json(schema)
    if not isinstance(schema, Mapping):
        raise InvalidRequestError("the schema must be a JSON object")
    if not schema.keys() - {"x-guidance", "$schema", "$id", "title", "description"}:
        raise InvalidRequestError(
            'the schema says nothing about the output; {"type": "object"} is any JSON object'
        )
    SchemaSize().add(schema)
    return bounded(f"{HEADER}start: {json_rule(schema, _COMPACT if is_compact else _ON_LINES)}")


def json_rule(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return what a rule of a grammar contains for JSON by a schema, whose size was checked."""
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def regex_grammar(pattern: str) -> str:
    """Return the grammar of texts that match a pattern as a whole (Rust syntax)."""
    from llguidance import regex_to_lark

    if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN_CHARS:
        raise InvalidRequestError(f"a regex must have 1 to {MAX_PATTERN_CHARS} characters")
    return bounded(f"{HEADER}start: /{regex_to_lark(pattern, '')}/")


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the grammar of exactly these texts."""
    is_list = isinstance(choices, Sequence) and not isinstance(choices, str)
    if not is_list or not 0 < len(choices) <= MAX_CHOICES:
        raise InvalidRequestError(f"choice must be a list of 1 to {MAX_CHOICES} texts")
    if not all(isinstance(one, str) and one for one in choices):
        raise InvalidRequestError("choice must hold texts that are not empty")
    quoted = [json.dumps(one, ensure_ascii=False) for one in dict.fromkeys(choices)]
    return bounded(f"{HEADER}start: {' | '.join(quoted)}")


def lark_grammar(text: str) -> str:
    """Return a Lark grammar whose first rule is `start`, with the options of all grammars here."""
    if not isinstance(text, str) or not 0 < len(text) <= MAX_LARK_CHARS:
        raise InvalidRequestError(f"a grammar must have 1 to {MAX_LARK_CHARS} characters")
    if "::=" in text and "start:" not in text:
        raise InvalidRequestError(
            "grammars are in Lark syntax with a rule `start`; GBNF is not supported"
        )
    for word in ("%llguidance", "%json", "%regex"):
        if word in text:
            raise InvalidRequestError(f"{word} is not supported in a grammar")
    return f"{HEADER}\n{text}"  # an empty line: comments of the caller are no notes


def with_notes(grammar: str, notes: Mapping[str, Any]) -> str:
    """Return a grammar with notes for Headway, which are comments of its first lines."""
    lines = [f"// {name}: {json.dumps(note)}\n" for name, note in notes.items()]
    return bounded(HEADER + "".join(lines) + grammar.removeprefix(HEADER))


def read_note(grammar: str | None, name: str) -> Any:
    """Return a note of a grammar; None if it has none of this name."""
    for line in (grammar or "").removeprefix(HEADER).splitlines():
        if not line.startswith("// "):
            return None
        if line.startswith(f"// {name}: "):
            return json.loads(line.removeprefix(f"// {name}: "))
    return None


class SchemaSize:
    """Counts the parts of schemas; raises InvalidRequestError at the first above its bound."""

    def __init__(self) -> None:
        self._num_objects = 0
        self._num_properties = 0
        self._num_values = 0

    def add(self, schema: Any, depth: int = 0) -> None:
        if depth > MAX_DEPTH:
            raise InvalidRequestError(f"the schema has more than {MAX_DEPTH} levels of nesting")
        if isinstance(schema, Mapping):
            self._add_object(schema)
            items = schema.values()
        elif isinstance(schema, list):
            items = schema
        else:
            return
        for item in items:
            self.add(item, depth + 1)

    def _add_object(self, schema: Mapping[str, Any]) -> None:
        self._num_objects += 1
        _check_count("objects", self._num_objects, MAX_OBJECTS, "in all")
        for name in ("properties", "patternProperties"):
            properties = schema.get(name)
            if isinstance(properties, Mapping):
                self._num_properties += len(properties)
                _check_count(name, len(properties), MAX_PROPERTIES_PER_OBJECT, "in one object")
                _check_count(name, self._num_properties, MAX_PROPERTIES, "in all")
        for name in ("enum", "anyOf", "oneOf", "allOf", "prefixItems"):
            values = schema.get(name)
            if isinstance(values, list):
                self._num_values += len(values)
                _check_count(name, self._num_values, MAX_ENUM_VALUES, "in all")
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            _check_count("pattern", len(pattern), MAX_PATTERN_CHARS, "characters")


def _check_count(name: str, count: int, bound: int, where: str) -> None:
    if count > bound:
        raise InvalidRequestError(
            f"the schema has {count} entries of {name} {where}; at most {bound} are allowed"
        )


def _parse_json(text: str) -> Any:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(f"the schema has more than {MAX_GRAMMAR_CHARS} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the schema is not JSON: {error}") from error


def bounded(grammar: str) -> str:
    """Return a grammar; raise InvalidRequestError if it is too long."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are allowed"
        )
    return grammar
