"""Bad inputs: tools, choices among them, and past calls that are wrong or cannot be honoured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.faults.cases import CHAT_ENDPOINT, Case

NAMES: dict[str, Any] = {
    "missing": None,
    "empty": "",
    "of-65-characters": "a" * 65,
    "of-50000-characters": "a" * 50_000,
    "with-a-space": "a b",
    "with-a-dot": "a.b",
    "with-a-quote": 'a"b',
    "with-a-line-break": "a\nb",
    "ending-in-a-line-break": "a\n",
    "with-a-nul": "a\u0000",
    "with-a-marker": "</tool_call>",
    "of-other-letters": "\u0430dd",
    "a-number": 5,
    "a-list": ["a"],
}
PARAMETERS: dict[str, Any] = {
    "a-list": [],
    "a-text": "object",
    "true": True,
    "of-the-type-string": {"type": "string"},
    "of-no-type": {"type": "thing"},
    "with-not": {"not": {"type": "string"}},
    "with-unique-items": {"properties": {"a": {"type": "array", "uniqueItems": True}}},
    "with-lookahead": {"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}},
    "with-a-remote-reference": {"properties": {"a": {"$ref": "http://127.0.0.1/x"}}},
    "with-a-file-reference": {"properties": {"a": {"$ref": "file:///etc/passwd"}}},
    "that-refer-to-themselves": {"$ref": "#"},
    "of-251-properties": {"properties": {str(at): {} for at in range(251)}},
    "of-1001-values": {"properties": {"a": {"enum": list(range(1001))}}},
    "of-3000-objects": {"properties": {"a": {"anyOf": [{"type": "null"}] * 3000}}},
    "of-4097-characters-of-pattern": {"properties": {"a": {"pattern": "a" * 4097}}},
}
CHOICES: dict[str, Any] = {
    "unknown": "any",
    "empty": "",
    "a-number": 1,
    "true": True,
    "a-list": ["f"],
    "an-empty-object": {},
    "of-a-type-alone": {"type": "function"},
    "of-an-unknown-tool": {"type": "function", "function": {"name": "g"}},
    "of-a-number": {"type": "function", "function": {"name": 5}},
    "with-an-unknown-key": {"type": "function", "function": {"name": "f"}, "a": 1},
    "of-a-custom-tool": {"type": "custom", "custom": {"name": "f"}},
    "allowed-missing": {"type": "allowed_tools"},
    "allowed-empty": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
    "allowed-without-a-mode": {"type": "allowed_tools", "allowed_tools": {"tools": []}},
    "allowed-a-text": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["f"]}},
}
TOOLS: dict[str, Any] = {
    "an-object": {},
    "a-text": "all",
    "of-null": [None],
    "of-an-empty-object": [{}],
    "of-a-type-alone": [{"type": "function"}],
    "of-129": [{"type": "function", "function": {"name": f"f{at}"}} for at in range(129)],
    "of-20000-empty-objects": [{}] * 20_000,
    "with-the-same-name": [{"type": "function", "function": {"name": "f"}}] * 2,
    "of-web-search": [{"type": "web_search"}],
    "of-another-type": [{"type": "custom", "function": {"name": "f"}}],
    "with-an-unknown-key": [{"type": "function", "function": {"name": "f"}, "a": 1}],
    "with-an-unknown-key-inside": [{"type": "function", "function": {"name": "f", "a": 1}}],
    "with-strict-a-number": [{"type": "function", "function": {"name": "f", "strict": 1}}],
    "with-description-a-list": [{"type": "function", "function": {"name": "f", "description": []}}],
}
BESIDE: dict[str, dict[str, Any]] = {
    "structured_outputs": {"structured_outputs": {"choice": ["a"]}},
    "min_tokens": {"min_tokens": 1},
    "ignore_eos": {"ignore_eos": True},
    "allowed_token_ids": {"allowed_token_ids": [5]},
    "bad_words": {"bad_words": ["a"]},
    "add_generation_prompt": {"add_generation_prompt": False},
    "parallel-a-number": {"parallel_tool_calls": 1},
    "parallel-a-text": {"parallel_tool_calls": "yes"},
}
CALLS: dict[str, Any] = {
    "an-object": {},
    "of-null": [None],
    "of-an-empty-object": [{}],
    "of-129": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}] * 129,
    "without-an-id": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
    "id-a-number": [{"id": 5, "function": {"name": "f", "arguments": "{}"}}],
    "id-of-300-characters": [{"id": "a" * 300, "function": {"name": "f", "arguments": "{}"}}],
    "of-another-type": [{"id": "a", "type": "x", "function": {"name": "f", "arguments": "{}"}}],
    "without-a-function": [{"id": "a", "type": "function"}],
    "without-arguments": [{"id": "a", "function": {"name": "f"}}],
    "arguments-an-object": [{"id": "a", "function": {"name": "f", "arguments": {}}}],
    "arguments-a-list": [{"id": "a", "function": {"name": "f", "arguments": "[]"}}],
    "arguments-cut": [{"id": "a", "function": {"name": "f", "arguments": '{"a": '}}],
    "arguments-nan": [{"id": "a", "function": {"name": "f", "arguments": '{"a": NaN}'}}],
    "arguments-deep": [{"id": "a", "function": {"name": "f", "arguments": '{"a":' * 5000}}],
}
RESULTS: dict[str, Any] = {
    "without-an-id": {"role": "tool", "content": "a"},
    "of-no-call": {"role": "tool", "content": "a", "tool_call_id": "a"},
    "id-a-number": {"role": "tool", "content": "a", "tool_call_id": 5},
    "id-empty": {"role": "tool", "content": "a", "tool_call_id": ""},
    "without-content": {"role": "tool", "tool_call_id": "a"},
    "with-calls": {"role": "tool", "content": "a", "tool_call_id": "a", "tool_calls": []},
    "of-the-user": {"role": "user", "content": "a", "tool_call_id": "a"},
    "reasoning-of-the-user": {"role": "user", "content": "a", "reasoning_content": "b"},
    "reasoning-a-list": {"role": "assistant", "content": "a", "reasoning": ["b"]},
}
ODD_TEXTS: dict[str, str] = {
    "a-quote": 'a"b',
    "a-line-break": "a\nb",
    "a-nul": "a\u0000b",
    "half-a-pair": "a\ud800b",
    "a-marker": "</tool_call>",
    "a-special-token": "<|im_end|>",
    "a-template": "{{ 1 / 0 }}{% raw %}",
    "a-rule": "%json {}\nstart: /./",
    "nothing": "",
}
"""Names, values and descriptions that must stay what they are: texts."""


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return {"properties": {"a": schema}}


def _chain(count: int) -> dict[str, Any]:
    """References of arrays to arrays, the last to the first."""
    arrays = {
        f"a{at}": {"type": "array", "items": {"$ref": f"#/$defs/a{(at + 1) % count}"}}
        for at in range(count)
    }
    return {"properties": {"a": {"$ref": "#/$defs/a0"}}, "$defs": arrays}


def _optional(count: int) -> dict[str, Any]:
    return {"properties": {f"p{at}": {} for at in range(count)}}


HOSTILE_PARAMETERS: dict[str, Any] = {
    "12-arrays-deep": _nested(12),
    "33-arrays-deep": _nested(33),
    "400-arrays-deep": _nested(400),
    "that-contain-themselves": {"properties": {"a": {"$ref": "#"}}},
    "that-must-contain-themselves": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "of-a-reference-to-itself": {
        "properties": {"a": {"$ref": "#/$defs/b"}},
        "$defs": {"b": {"$ref": "#/$defs/b"}},
    },
    "of-a-chain-of-900-references": _chain(900),
    "of-a-chain-of-1400-references": _chain(1400),
    "of-250-optional-properties": _optional(250),
    "of-a-product-of-alternatives": {
        "allOf": [{"anyOf": [_optional(at), _optional(at + 1)]} for at in range(1, 13)]
    },
    "of-counts-in-counts": {"properties": {"a": {"pattern": "(((a{99}){99}){99}){99}"}}},
    "with-a-long-memory": {"properties": {"a": {"pattern": "(.*a.{20})*"}}},
    "with-a-text-of-90000-characters": {"properties": {"a": {"const": "a" * 90_000}}},
    "with-a-length-of-31-digits": {"properties": {"a": {"type": "string", "minLength": 10**30}}},
    "with-a-negative-length": {"properties": {"a": {"type": "string", "maxLength": -1}}},
    "of-a-billion-items": {"properties": {"a": {"type": "array", "minItems": 10**9}}},
    "of-no-number": {"properties": {"a": {"type": "integer", "minimum": 2, "maximum": 1}}},
    "of-multiples-of-0": {"properties": {"a": {"type": "integer", "multipleOf": 0}}},
    "that-require-what-there-is-not": {"properties": {}, "required": ["a"]},
}
"""Schemas that are costly, or have no meaning: answered or refused, and nothing else."""


def tool_cases() -> Iterator[Case]:
    chat, user = CHAT_ENDPOINT, {"role": "user", "content": "hi"}
    good = [{"type": "function", "function": {"name": "f"}}]
    for name, value in TOOLS.items():
        yield chat.refused(f"tools-{name}", tools=value)
    for name, value in NAMES.items():
        function = {} if value is None else {"name": value}
        yield chat.refused(f"tool-name-{name}", tools=[{"type": "function", "function": function}])
    for name, value in PARAMETERS.items():
        function = {"name": "f", "parameters": value}
        asked = [{"type": "function", "function": function}]
        yield chat.refused(f"tool-parameters-{name}", tools=asked)
    for name, value in CHOICES.items():
        yield chat.refused(f"tool-choice-{name}", tools=good, tool_choice=value)
    named = {"type": "function", "function": {"name": "f"}}
    for name, choice in (("required", "required"), ("named", named)):
        yield chat.refused(f"tool-choice-{name}-without-tools", tool_choice=choice)
    for name, fields in BESIDE.items():
        yield chat.refused(f"tools-beside-{name}", tools=good, **fields)
    for name, value in CALLS.items():
        said = {"role": "assistant", "content": None, "tool_calls": value}
        yield chat.refused(f"tool-calls-{name}", messages=[user, said])
    for name, message in RESULTS.items():
        yield chat.refused(f"tool-result-{name}", messages=[user, message])
    yield from hostile_tool_cases()


def hostile_tool_cases() -> Iterator[Case]:
    """Return cases that may be answered as well as refused."""

    def case(name: str, tools: list[dict[str, Any]], **fields: Any) -> Case:
        asked = [{"type": "function", "function": {"name": "f", **one}} for one in tools]
        body = CHAT_ENDPOINT.body(tools=asked, **fields)
        return CHAT_ENDPOINT.case(name, body, 200, 400)

    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}
    unused = {"none": "none", "allowed": {"type": "allowed_tools", "allowed_tools": allowed}}
    for name, value in HOSTILE_PARAMETERS.items():
        tool = {"parameters": value}
        yield case(f"tool-parameters-{name}", [tool], tool_choice="required")
        for kind, choice in unused.items():
            two = [tool, {"name": "g"}]
            yield case(f"tool-parameters-unused-{kind}-{name}", two, tool_choice=choice)
    for name, text in ODD_TEXTS.items():
        texts = {"properties": {text: {"enum": [text], "description": text}}, "required": [text]}
        tool = {"description": text, "parameters": texts}
        yield case(f"tool-texts-with-{name}", [tool], tool_choice="required")
    for count in (7, 8, 60):
        many = [{"name": f"f{at}", "parameters": _optional(count)} for at in range(128)]
        yield case(f"tools-of-128-with-{count}-properties", many)
