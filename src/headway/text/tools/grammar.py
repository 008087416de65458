"""The grammar of a reply: reasoning, then text, tool calls, or an answer with a grammar of its own.

Tool calls always follow the grammar, also where the model may answer in text: text is free until
the marker of the form, and from there on only a valid call can follow.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.errors import InvalidRequestError
from headway.text.grammar import HEADER, ON_ONE_LINE, SchemaSize, json_rule, with_notes
from headway.text.reasoning import CLOSE_TAG, OPEN_TAG, ReasoningStart
from headway.text.tools.forms import CallForm
from headway.text.tools.parser import MAX_LEADING_SPACE
from headway.text.tools.xml import ANY_TEXT, NOTE, XML_LINES, xml_rule

MAX_CALLS = 32
"""In one reply: a small model may repeat itself until max_tokens."""
_OPEN_KEYWORDS = ("patternProperties", "unevaluatedProperties", "$ref", "anyOf", "oneOf", "allOf")
"""Beside these, `properties` need not name all arguments of a tool."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a reply may call."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class CallRules:
    """Which calls a reply may have."""

    form: CallForm
    tools: Sequence[Tool]
    is_required: bool = False
    """Whether a reply must call a tool; otherwise it may be text."""
    has_several: bool = True
    """Whether a reply may have more than one call, if the form has."""


@dataclass(frozen=True, slots=True)
class Markers:
    """The ids of markers that are special tokens of the model; other markers are text."""

    special_ids: Mapping[str, int] = field(default_factory=dict[str, int])

    def text(self, text: str) -> str:
        """Return what a rule contains for a fixed text."""
        parts: list[str] = []
        for marker, token_id in self.special_ids.items():
            before, found, after = text.partition(marker)
            if found:
                parts = [self.text(before), f"<[{token_id}]>", self.text(after)]
                return " ".join([part for part in parts if part])
        return json.dumps(text, ensure_ascii=False) if text else ""


def arguments_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the arguments of a tool: a JSON object, by default without more names.

    Raises InvalidRequestError if the arguments are no object.
    """
    kind = parameters.get("type", "object")
    if kind != "object":
        raise InvalidRequestError("the schema must have the type object")
    schema: dict[str, Any] = {"type": "object", "properties": {}, **parameters}
    if not any(keyword in schema for keyword in _OPEN_KEYWORDS):
        is_free = "properties" not in parameters and "type" in parameters
        schema.setdefault("additionalProperties", is_free)
    return schema


def reply_grammar(
    rules: CallRules | None,
    markers: Markers,
    reasoning: ReasoningStart = ReasoningStart.NEVER,
    answer: str | None = None,
) -> str:
    """Return the grammar of a reply that may have calls, and whose text may have a grammar.

    `answer` is the grammar of the text; without it, text is free.
    """
    lines: list[str] = []
    notes: dict[str, Any] = {}
    if answer is not None:
        lines.append(f"answer: %lark {{\n{answer.removeprefix(HEADER)}\n}}")
    if rules is None:
        body = "FREE?" if answer is None else "answer"
    else:
        body = _body(rules, markers, has_answer=answer is not None)
        notes, call_lines = _call_lines(rules, markers)
        lines += call_lines
    if "FREE" in body:
        lines += _text_lines(None if rules is None else rules.form, markers, reasoning)
    thought = _thought(markers, reasoning)
    if thought:
        lines += [f"thought: {thought}", *_thought_lines(markers)]
    start = "thought body" if thought else "body"
    return with_notes("\n".join([f"start: {start}", f"body: {body}", *lines, ""]), notes)


def _body(rules: CallRules, markers: Markers, *, has_answer: bool) -> str:
    """Return the right side of the rule for all but the reasoning."""
    form = rules.form
    more = f"{markers.text(form.separator + form.before_name)} tool"
    is_several = rules.has_several and form.has_several
    several = f"({more}){{0,{MAX_CALLS - 1}}}" if is_several else ""
    calls = f"tool {several} {markers.text(form.closing)}".rstrip()
    rest = form.start.removeprefix(form.marker)
    after_marker = f"{_spaced(rest, markers)} {calls}"
    required = f"{markers.text(form.marker)} {after_marker}"
    if rules.is_required:
        return required
    if has_answer:
        return f"answer | {required}"
    if not form.follows_text or form.marker in markers.special_ids:
        text = "FREE? " if form.follows_text else ""
        return f"FREE? | {text}{required}"
    return f"FREE? | UNTIL_CALL {after_marker}"


def _spaced(text: str, markers: Markers) -> str:
    """Return a fixed text that may lack the space it begins with."""
    if not text.startswith(" "):
        return markers.text(text)
    return f'" "? {markers.text(text[1:])}'


def _call_lines(rules: CallRules, markers: Markers) -> tuple[dict[str, Any], list[str]]:
    """Return notes for the parser, and the rules of the tools."""
    form, size = rules.form, SchemaSize()
    names = [f"tool_{at}" for at in range(len(rules.tools))]
    lines = [f"tool: {' | '.join(names)}"]
    raw: dict[str, list[str]] = {}
    for rule, tool in zip(names, rules.tools, strict=True):
        schema = arguments_schema(tool.parameters)
        size.add(schema)
        before = markers.text(tool.name + form.after_name)
        after = markers.text(form.after_arguments)
        if form.has_xml_arguments:
            arguments, raw[tool.name] = xml_rule(schema)
        else:
            arguments = '"{}"' if _is_empty(schema) else json_rule(schema, ON_ONE_LINE)
        lines.append(f"{rule}: {before} {arguments} {after}".rstrip())
    return ({NOTE: raw}, [*lines, *XML_LINES]) if form.has_xml_arguments else ({}, lines)


def _is_empty(schema: Mapping[str, Any]) -> bool:
    """Whether a schema allows the empty object alone; written without a space then."""
    is_plain = schema.keys() <= {"type", "properties", "additionalProperties", "title", "$schema"}
    return is_plain and not schema["properties"] and schema.get("additionalProperties") is False


def _text_lines(form: CallForm | None, markers: Markers, reasoning: ReasoningStart) -> list[str]:
    """Return the terminals of free text: without marker, and not beginning with reasoning.

    No text may spell a marker that is a special token: the parser sees the text alone.
    """
    lines: list[str] = []
    free = ANY_TEXT
    if form is not None and form.follows_text:
        lines.append(f"WITH_MARKER: {ANY_TEXT} {json.dumps(form.marker)} {ANY_TEXT}")
        free += " & ~WITH_MARKER"
    elif form is not None:
        free = f"/[ \\t\\n\\r]*[^{form.marker} \\t\\n\\r](?s:.*)/"
    if reasoning is ReasoningStart.OPTIONAL:
        leading = f"/[ \\t\\n\\r]{{0,{MAX_LEADING_SPACE}}}/"
        lines.append(f"WITH_REASONING: {leading} {json.dumps(OPEN_TAG)} {ANY_TEXT}")
        free += " & ~WITH_REASONING"
    lines.append(f"FREE: {free}")
    if form is not None and form.follows_text and form.marker not in markers.special_ids:
        lines.append(f"UNTIL_CALL: FREE {json.dumps(form.marker)}")
    return lines


def _thought(markers: Markers, reasoning: ReasoningStart) -> str:
    """Return the right side of the rule for reasoning; empty for none."""
    closed = "THOUGHT"
    if CLOSE_TAG in markers.special_ids:
        closed = f"UNCLOSED? {markers.text(CLOSE_TAG)}"
    match reasoning:
        case ReasoningStart.NEVER:
            return ""
        case ReasoningStart.OPEN:
            return f"{closed} SPACE?"
        case ReasoningStart.OPTIONAL:
            return f"(SPACE? {markers.text(OPEN_TAG)} {closed} SPACE?)?"


def _thought_lines(markers: Markers) -> list[str]:
    tag = json.dumps(CLOSE_TAG)
    lines = [
        "SPACE: /[ \\n]{1,8}/",
        f"WITH_CLOSE: {ANY_TEXT} {tag} {ANY_TEXT}",
        f"UNCLOSED: {ANY_TEXT} & ~WITH_CLOSE",
    ]
    return lines if CLOSE_TAG in markers.special_ids else [*lines, f"THOUGHT: UNCLOSED {tag}"]
