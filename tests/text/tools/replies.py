"""Replies of each family as a model writes them, and what they mean."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from headway.text.reasoning import ReasoningStart
from headway.text.reply import ReplyForm, ReplyParser
from headway.text.tools.deltas import ReplyDelta, join
from headway.text.tools.forms import FORMS, CallForm
from headway.text.tools.grammar import CallRules, Markers, Tool, reply_grammar

Call = tuple[str, dict[str, Any]]

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city"],
    },
)
NOW = Tool("now")
TOOLS = (WEATHER, NOW)
CALLS: tuple[Call, ...] = (
    ("get_weather", {"city": 'Köln </tool_call> "}]\\ \n<tool_call>', "days": -3}),
    ("now", {}),
    ("get_weather", {"city": "", "units": None}),
)


def write_calls(form: CallForm, calls: tuple[Call, ...]) -> str:
    """The calls as a model of this family writes them."""
    texts = [
        form.before_name + name + form.after_name + _arguments(form, arguments)
        for name, arguments in calls
    ]
    written = form.separator.join([text + form.after_arguments for text in texts])
    return form.opening + written + form.closing


def _arguments(form: CallForm, arguments: dict[str, Any]) -> str:
    if not form.has_xml_arguments:
        return json.dumps(arguments, ensure_ascii=False)
    values = {
        name: value if name == "city" else json.dumps(value) for name, value in arguments.items()
    }
    return "".join([f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in values.items()])


@cache
def grammar_of(form: CallForm, **rules: Any) -> str:
    reasoning = rules.pop("reasoning", ReasoningStart.OPTIONAL)
    return reply_grammar(CallRules(form, TOOLS, **rules), Markers(), reasoning)


def calls_of(form: CallForm) -> tuple[Call, ...]:
    return CALLS if form.has_several else CALLS[:1]


def read(form: str, pieces: list[str], reasoning: str = "optional") -> tuple[ReplyDelta, bool]:
    """The joined deltas of a reply that came in pieces, and whether it ends with calls."""
    grammar = grammar_of(FORMS[form]) if form else None
    parser = ReplyParser(ReplyForm(form, ReasoningStart(reasoning)), grammar)
    deltas = [parser.feed(piece) for piece in pieces]
    is_complete = parser.ends_with_calls
    deltas.append(parser.finish())
    names = [part.number for delta in deltas for part in delta.calls if part.name is not None]
    numbers = [part.number for delta in deltas for part in delta.calls]
    assert names == sorted(set(names)) == list(range(len(names)))  # dense, rising, once each
    assert numbers == sorted(numbers)
    return join(deltas), is_complete
