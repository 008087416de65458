"""Outputs that follow a grammar token by token are valid; grammars beyond the bounds are refused.

No model runs here: tokens are drawn at random from the masks, which finds more than a model would.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from benchmarks.support.schemas import chain, nested, optional, random_schema
from headway.errors import InvalidRequestError
from headway.text import Tokenizer
from headway.text.grammar import choice_grammar, json_grammar, lark_grammar, regex_grammar
from headway.text.matchers import Matchers
from tests.grammar.conftest import VOCAB_SIZE

pytestmark = pytest.mark.model

MAX_TOKENS = 300


def allowed_ids(matcher) -> np.ndarray:
    mask = np.empty(VOCAB_SIZE // 32, dtype=np.int32)
    matcher.write_mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def walk(matchers: Matchers, tokenizer: Tokenizer, grammar: str, seed: int) -> str | None:
    """The text of tokens drawn from the masks; None if it does not end soon."""
    draw, matcher, token_ids = random.Random(seed), matchers.matcher(grammar), []
    for _ in range(MAX_TOKENS):
        ids = allowed_ids(matcher)
        assert len(ids), "no token can be next"
        ends = [one for one in tokenizer.eos_token_ids if one in ids]
        token_id = int(draw.choice(ids))
        if token_id in ends or (ends and draw.random() < 0.3):
            assert matcher.is_accepting
            return tokenizer.decode(token_ids, skip_special_tokens=False)
        matcher.consume([token_id])
        token_ids.append(token_id)
    return None


def accepts(matchers: Matchers, tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    matcher = matchers.matcher(grammar)
    try:
        matcher.consume(tokenizer.encode(text, add_special_tokens=False))
    except ValueError:
        return False
    return any(one in allowed_ids(matcher) for one in tokenizer.eos_token_ids)


def test_outputs_of_random_schemas_are_valid(matchers, smollm, is_full):
    num_ended, num_schemas = 0, 6000 if is_full else 200
    for seed in range(num_schemas):
        schema = random_schema(seed)
        text = walk(matchers, smollm, json_grammar(schema), seed)
        if text is not None:
            num_ended += 1
            assert jsonschema_rs.is_valid(schema, json.loads(text)), (seed, schema, text)
    assert num_ended > 0.9 * num_schemas


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "object"}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a"}', ""]),
        (
            {"type": "string", "maxLength": 3},
            ['""', '"abc"', '"äöü"', '"\\n"'],
            ['"abcd"', "abc", '"a'],
        ),
        (
            {
                "properties": {"b": {}, "a": {"type": "integer"}},
                "required": ["a"],
                "type": "object",
            },
            ['{"b": 1, "a": 2}', '{"a": 2, "c": 0}'],
            ['{"b": 1}', '{"a": 1.5}'],
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["7", '"7"'], ["null", "7.5"]),
        ({"enum": ["a<|im_end|>b", "c"]}, ['"c"'], ['"d"']),
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, ["[]", "[true]"], ["[1]"]),
    ],
)
def test_a_schema_accepts_and_refuses(matchers, smollm, schema, valid, invalid):
    grammar = json_grammar(schema)
    assert [text for text in valid if not accepts(matchers, smollm, grammar, text)] == []
    assert [text for text in invalid if accepts(matchers, smollm, grammar, text)] == []


def test_text_that_spells_a_special_token_does_not_end_the_output(matchers, smollm):
    """The schema's text may be that of the end-of-sequence token."""
    special = smollm.decode([smollm.eos_token_ids[0]], skip_special_tokens=False)
    grammar = json_grammar({"const": f"a{special}b"})
    assert json.loads(walk(matchers, smollm, grammar, 1) or "") == f"a{special}b"


def test_whitespace_is_bounded(matchers, smollm):
    grammar = json_grammar({"type": "array", "items": {"type": "integer"}})
    assert accepts(matchers, smollm, grammar, "[\n  1,\n  2\n]")
    assert not accepts(matchers, smollm, grammar, "[" + " " * 200 + "1]")
    assert not accepts(matchers, smollm, grammar, "[\n\n\n\n1]")
    compact = json_grammar({"type": "array", "items": {"type": "integer"}}, is_compact=True)
    assert accepts(matchers, smollm, compact, "[1,2]")
    assert not accepts(matchers, smollm, compact, "[1, 2]")


def test_regexes_choices_and_lark(matchers, smollm):
    cases = [
        (regex_grammar(r"\d{3}-[a-z]+"), ["123-ab"], ["12-ab", "123-"]),
        (regex_grammar(r"a/b|c\nd"), ["a/b", "c\nd"], ["a", "cd"]),
        (choice_grammar(["yes", "no", 'q"u\n']), ["yes", "no", 'q"u\n'], ["ye", "yesno"]),
        (lark_grammar('start: "a" tail\ntail: "b" tail | "c"'), ["ac", "abbc"], ["a", "ab"]),
    ]
    for grammar, valid, invalid in cases:
        assert [text for text in valid if not accepts(matchers, smollm, grammar, text)] == []
        assert [text for text in invalid if accepts(matchers, smollm, grammar, text)] == []


REFUSED: dict[str, tuple[Any, str]] = {
    "not": ({"not": {"type": "string"}}, "not"),
    "dependencies": ({"type": "object", "dependencies": {"a": ["b"]}}, "dependencies"),
    "unique items": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "format": ({"type": "string", "format": "no-such-format"}, "no-such-format"),
    "type": ({"type": "strin"}, "strin"),
    "remote reference": ({"$ref": "https://example.com/schema"}, "example.com"),
    "lookahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "empty": ({}, "says nothing"),
    "not an object": ([1], "JSON object"),
    "not JSON": ("{", "not JSON"),
    "itself": ({"$ref": "#"}, "."),
    "nothing valid": ({"type": "string", "minLength": 3, "maxLength": 1}, "."),
    "lenient": ({"not": {}, "type": "string", "x-guidance": {"lenient": True}}, "not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_honoured_is_refused_by_name(matchers, name):
    schema, word = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=word) as refusal:
        matchers.check(json_grammar(schema))
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


HOSTILE: dict[str, Any] = {
    "deep nesting": lambda: json_grammar(nested(5000)),
    "nesting in text": lambda: json_grammar("[" * 100_000),
    "huge enum": lambda: json_grammar({"enum": [f"value {at}" for at in range(20_000)]}),
    "one megabyte": lambda: json_grammar({"const": "x" * 2**20}),
    "many properties": lambda: json_grammar(optional(5000)),
    "many properties in all": lambda: json_grammar(
        {"type": "object", "properties": {f"o{at}": optional(200) for at in range(10)}}
    ),
    "product of alternatives": lambda: json_grammar(
        {"allOf": [{"anyOf": [optional(at), optional(at + 1)]} for at in range(1, 13)]}
    ),
    "long pattern": lambda: regex_grammar("a" * 100_000),
    "chain of references": lambda: json_grammar(chain(4000)),
    "grammar of parentheses": lambda: lark_grammar("start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "chain of rules": lambda: lark_grammar(
        "start: r0\n" + "".join(f"r{at}: r{at + 1}\n" for at in range(4000)) + 'r4000: "a"\n'
    ),
    "options": lambda: lark_grammar('%llguidance {"no_forcing": false}\nstart: "a"'),
    "left recursion": lambda: lark_grammar("start: start start"),
}
COSTLY: dict[str, Any] = {
    "nested counts": lambda: regex_grammar("(((a{100}){100}){100}){100}"),
    "chain of references": lambda: json_grammar(chain(990)),
    "chain of rules": lambda: lark_grammar(
        "start: r0\n" + "".join(f"r{at}: r{at + 1}\n" for at in range(2500)) + 'r2500: "a"\n'
    ),
    "counted properties": lambda: json_grammar(optional(250)),
    "enum": lambda: json_grammar({"enum": [f"value number {at}" * 5 for at in range(1000)]}),
    "pattern": lambda: regex_grammar("(.{0,100}a){0,100}"),
    "pattern with a long memory": lambda: regex_grammar("(.*a.{20})*"),
    "ambiguous": lambda: lark_grammar('start: x*\nx: "a"* | "a" x "a" | x x | "b"'),
    "long array": lambda: json_grammar(
        {"type": "array", "items": {"type": "integer"}, "minItems": 9999, "maxItems": 100_000}
    ),
    "recursion": lambda: json_grammar({"type": "object", "properties": {"a": {"$ref": "#"}}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_soon(matchers, name):
    matchers.prepare()
    started_at = time.process_time()
    with pytest.raises(InvalidRequestError):
        matchers.check(HOSTILE[name]())
    assert time.process_time() - started_at < 1.0


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_grammar_has_bounded_masks(matchers, smollm, name):
    """It is refused, or each of its masks takes a few milliseconds at most, or an error ends it."""
    matchers.prepare()
    started_at = time.process_time()
    try:
        matcher = matchers.matcher(COSTLY[name]())
    except ValueError:
        matcher = None
    assert time.process_time() - started_at < 1.0
    draw, longest_s = random.Random(4), 0.0
    for _ in range(150):
        if matcher is None:
            break
        started_at = time.thread_time()
        try:
            ids = allowed_ids(matcher)
        except ValueError:
            break
        longest_s = max(longest_s, time.thread_time() - started_at)
        token_id = int(draw.choice(ids))
        if token_id in smollm.eos_token_ids:
            break
        matcher.consume([token_id])
    assert longest_s < 0.05
