"""Replies that follow the grammar of their tools are calls with valid arguments, in every form.

No model runs here: tokens are drawn at random from the masks.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from benchmarks.support.schemas import random_schema
from headway.errors import InvalidRequestError
from headway.text import Tokenizer
from headway.text.grammar import json_grammar, lark_grammar
from headway.text.matchers import Matchers
from headway.text.reasoning import ReasoningStart
from headway.text.reply import ReplyForm, ReplyParser
from headway.text.tools.deltas import ReplyDelta, join
from headway.text.tools.forms import FORMS, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, QWEN_XML
from headway.text.tools.grammar import (
    CallRules,
    Markers,
    Tool,
    arguments_schema,
    reply_grammar,
)
from tests.grammar.test_grammars import accepts, walk
from tests.text.tools.replies import TOOLS, calls_of, grammar_of, write_calls

pytestmark = pytest.mark.model


def random_tools(seed: int) -> list[Tool]:
    """Two tools with the arguments of random schemas, and one without any."""
    properties = {
        name: random_schema(1000 * seed + at) for at, name in enumerate(("a", "b-2", "note"))
    }
    for one in properties.values():
        definitions = one.pop("$defs", None)
        if definitions is not None:  # a reference counts from the whole document
            one.clear()
            one["type"] = "boolean"
    properties["text"] = {"type": "string"}
    both: dict[str, Any] = {"type": "object", "properties": properties, "required": ["a"]}
    few: dict[str, Any] = {"properties": {"a": properties["a"]}, "additionalProperties": False}
    return [Tool("first", both), Tool("first-of-all", few), Tool("none")]


def reply_of(form: str, text: str, grammar: str) -> tuple[ReplyDelta, bool]:
    parser = ReplyParser(ReplyForm(form, ReasoningStart.OPTIONAL), grammar)
    delta = parser.feed(text)
    is_complete = parser.ends_with_calls
    return join((delta, parser.finish())), is_complete


@pytest.mark.parametrize("name", FORMS)
def test_what_the_grammar_allows_is_a_valid_call(
    matchers: Matchers, smollm: Tokenizer, is_full: bool, name: str
) -> None:
    num_replies = 0
    for seed in range(60 if is_full else 8):
        tools = random_tools(seed)
        rules = CallRules(FORMS[name], tools, is_required=True, has_several=seed % 2 == 0)
        grammar = reply_grammar(rules, Markers())
        text = walk(matchers, smollm, grammar, seed)
        if text is None:
            continue
        num_replies += 1
        delta, is_complete = reply_of(name, text, grammar)
        assert is_complete and not delta.text and not delta.reasoning, text
        assert len(delta.calls) == 1 or rules.has_several
        schemas = {tool.name: arguments_schema(tool.parameters) for tool in tools}
        for call in delta.calls:
            assert call.name in schemas
            assert jsonschema_rs.is_valid(schemas[call.name], json.loads(call.arguments)), text
    assert num_replies >= 4


@pytest.mark.parametrize("name", FORMS)
def test_what_a_model_writes_is_allowed(matchers: Matchers, smollm: Tokenizer, name: str) -> None:
    form = FORMS[name]
    calls = write_calls(form, calls_of(form))
    thought = "<think>\nhm <tool_call>\n</think>\n\n"
    auto, required = grammar_of(form), grammar_of(form, is_required=True)
    single = grammar_of(form, has_several=False)
    is_free = form.follows_text
    for text, in_auto, in_required in (
        (calls, True, True),
        (thought + calls, True, True),
        ("Well:\n" + calls, True, False),
        ("Just text.", True, False),
        (thought + "Just text.", True, False),
        ("", True, False),
        (calls + "\nAnd more.", False, False),
        (calls[:-1], False, False),
        ("<think>hm", False, False),
    ):
        assert accepts(matchers, smollm, auto, text) is in_auto, text
        assert accepts(matchers, smollm, required, text) is in_required, text
    assert accepts(matchers, smollm, single, calls) is not form.has_several
    assert accepts(matchers, smollm, auto, f"Oh {form.marker} no") is not is_free
    unknown = calls.replace("get_weather", "get_whether")
    assert not accepts(matchers, smollm, auto, unknown)


def test_a_marker_can_be_a_special_token(matchers: Matchers, smollm: Tokenizer) -> None:
    """Then no text can spell it, and the parser sees it because it is shown."""
    (start_id,) = smollm.encode("<|im_start|>", add_special_tokens=False)
    for form in (MISTRAL, MISTRAL_ARGS):
        markers = Markers({"[TOOL_CALLS]": start_id})
        grammar = reply_grammar(CallRules(form, TOOLS), markers)
        written = write_calls(form, calls_of(form))
        shown = written.replace("[TOOL_CALLS]", "<|im_start|>")
        assert accepts(matchers, smollm, grammar, f"Hello{shown}")
        assert accepts(matchers, smollm, grammar, shown.replace("> [", ">["))
        assert accepts(matchers, smollm, grammar, "[TOOL_CALLS as text")
        assert not accepts(matchers, smollm, grammar, "[TOOL_CALLS] as text")
        assert not accepts(matchers, smollm, grammar, "<|im_start|>text")
        ids = smollm.encode(f"a{shown}", add_special_tokens=False)
        assert smollm.decode(ids) == f"a{written}".replace("[TOOL_CALLS]", "")
        text = smollm.detokenizer(shown_ids=(start_id,)).push(ids)
        assert text == f"a{shown}"


def test_tags_can_be_special_tokens(matchers: Matchers, smollm: Tokenizer) -> None:
    start_id, end_id = smollm.encode("<|im_start|><file_sep>", add_special_tokens=False)
    markers = Markers({"<think>": start_id, "</think>": end_id})
    for start, before in ((ReasoningStart.OPEN, ""), (ReasoningStart.OPTIONAL, "<|im_start|>")):
        grammar = reply_grammar(CallRules(HERMES, TOOLS), markers, start)
        for thought, is_allowed in (("hm\n", True), ("", True), ("a </think> b", False)):
            text = f"{before}{thought}<file_sep>\n\nHello"
            assert accepts(matchers, smollm, grammar, text) is is_allowed, text
        spelled = "<think>hm</think>Hello"
        assert not accepts(matchers, smollm, grammar, spelled)


def test_an_answer_with_a_schema_or_a_call(matchers: Matchers, smollm: Tokenizer) -> None:
    answer = json_grammar({"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]})
    for form in (HERMES, MISTRAL, QWEN_XML):
        rules = CallRules(form, TOOLS)
        grammar = reply_grammar(rules, Markers(), ReasoningStart.OPTIONAL, answer)
        calls = write_calls(form, calls_of(form))
        for text, is_allowed in (
            ('{"x": 1}', True),
            ("<think>hm</think>\n" + '{"x": 1}', True),
            (calls, True),
            ("text", False),
            ('{"x": 2}', False),
            ('{"x": 1}' + calls, False),
        ):
            assert accepts(matchers, smollm, grammar, text) is is_allowed, text


def test_reasoning_before_any_grammar(matchers: Matchers, smollm: Tokenizer) -> None:
    for answer, text in (
        (json_grammar({"type": "boolean"}), "true"),
        (lark_grammar('start: "}" /[}{]{2}/ A\nA: "a" // a comment }'), "}{}a"),
    ):
        grammar = reply_grammar(None, Markers(), ReasoningStart.OPEN, answer)
        assert accepts(matchers, smollm, grammar, f"hm\n</think>\n\n{text}")
        assert not accepts(matchers, smollm, grammar, text)
        grammar = reply_grammar(None, Markers(), ReasoningStart.OPTIONAL, answer)
        assert accepts(matchers, smollm, grammar, f"<think>hm</think>{text}")
        assert accepts(matchers, smollm, grammar, text)


def test_arguments_are_objects_without_other_names() -> None:
    assert arguments_schema({})["additionalProperties"] is False
    assert arguments_schema({"properties": {"a": {}}})["additionalProperties"] is False
    assert arguments_schema({"type": "object"})["additionalProperties"] is True
    assert arguments_schema({"properties": {}, "additionalProperties": True})[
        "additionalProperties"
    ]
    assert "additionalProperties" not in arguments_schema({"anyOf": [{"required": ["a"]}]})
    with pytest.raises(InvalidRequestError, match="type object"):
        arguments_schema({"type": "string"})


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"a b": {}}}, "'a b' cannot be the name of a tag"),
        ({"properties": {"a": True}}, "the schema of a must be"),
        ({"properties": {}, "required": ["a"]}, "required names 'a'"),
        ({"properties": {}, "minProperties": 1}, "minProperties"),
        ({"allOf": []}, "allOf"),
        ({"properties": []}, "properties must be"),
    ],
)
def test_what_tags_cannot_express_is_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        reply_grammar(CallRules(QWEN_XML, [Tool("f", parameters)]), Markers())


def test_calls_without_a_marker_take_replies_that_begin_with_a_brace(
    matchers: Matchers, smollm: Tokenizer
) -> None:
    grammar = grammar_of(LLAMA)
    assert not accepts(matchers, smollm, grammar, " {}")
    assert accepts(matchers, smollm, grammar, " a {}")
