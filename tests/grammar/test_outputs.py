"""The real model under grammars: valid outputs, whatever happens to the requests meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from benchmarks.support.schemas import random_schema
from headway import LLM, RequestOutput, SamplingParams
from headway.core.invariants import check_drained
from headway.errors import EngineError, InvalidRequestError
from headway.text.grammar import choice_grammar, json_grammar, regex_grammar
from headway.text.reasoning import ReasoningStart
from tests.grammar.test_thinking import grammar_of as budgeted_grammar

pytestmark = pytest.mark.model

MAX_TOKENS = 64
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = "A person as JSON: "


@pytest.fixture(scope="module")
def llm(model_path: Path) -> Iterator[LLM]:
    llm = LLM(str(model_path), kv_cache_memory_bytes="128M", max_num_seqs=64)
    yield llm
    check_drained(llm.core.scheduler)
    llm.close()


def texts(outputs: Sequence[RequestOutput]) -> list[list[tuple[str, str]]]:
    return [[(one.text, str(one.finish_reason)) for one in output.outputs] for output in outputs]


def test_outputs_are_valid_unless_they_are_cut(llm: LLM, is_full: bool):
    """Random schemas, greedy and drawn, all in one batch."""
    schemas = [random_schema(seed) for seed in range(400 if is_full else 24)]
    params = [
        SamplingParams(
            grammar=json_grammar(schema),
            temperature=0.0 if seed % 2 else 1.0,
            seed=seed,
            max_tokens=MAX_TOKENS,
        )
        for seed, schema in enumerate(schemas)
    ]
    outputs = llm.generate([f"JSON number {at}: " for at in range(len(schemas))], params)
    num_ended = 0
    for schema, output in zip(schemas, outputs, strict=True):
        (one,) = output.outputs
        if one.finish_reason == "stop":
            num_ended += 1
            assert jsonschema_rs.is_valid(schema, json.loads(one.text)), (schema, one.text)
        else:
            assert one.finish_reason == "length" and len(one.token_ids) == MAX_TOKENS
    assert num_ended > 0.5 * len(schemas)


def kinds() -> list[SamplingParams]:
    person = SamplingParams(grammar=json_grammar(PERSON), max_tokens=80, temperature=0.0)
    drawn = replace(person, temperature=0.9, seed=3)
    return [
        person,
        drawn,
        replace(drawn, n=3),
        replace(drawn, top_p=0.9, repetition_penalty=1.2, logprobs=2),
        replace(person, grammar=regex_grammar(r"\d{4}-\d{2}-\d{2}")),
        replace(person, grammar=choice_grammar(["Ada Lovelace", "Alan Turing", "Alan Kay"])),
        replace(drawn, stop=('"age"',)),
    ]


def test_company_and_preemption_change_nothing(llm: LLM, model_path: Path):
    alone = [texts(llm.generate(PROMPT, params))[0] for params in kinds()]
    for (text, reason), *_ in alone[:4]:
        assert reason == "stop" and jsonschema_rs.is_valid(PERSON, json.loads(text))
    assert len({text for text, _ in alone[2]}) > 1
    assert alone[5][0][0] in ("Ada Lovelace", "Alan Turing", "Alan Kay")
    assert '"age"' not in alone[6][0][0] and alone[6][0][1] == "stop"
    together = [*kinds(), SamplingParams(max_tokens=40, temperature=0.0)]
    assert texts(llm.generate([PROMPT] * len(together), together))[:7] == alone
    small = LLM(str(model_path), kv_cache_memory_bytes="5M", max_num_seqs=20, max_model_len=160)
    outputs = small.generate([PROMPT] * len(together), together)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert texts(outputs)[:7] == alone
    small.close()


def test_scores_are_those_of_the_model(llm: LLM):
    """Log-probabilities are from before the mask: the chosen token need not be the likeliest."""
    params = SamplingParams(
        grammar=choice_grammar(["zebra"]), logprobs=1, temperature=0.0, max_tokens=9
    )
    (one,) = llm.generate("The capital of France is", params)[0].outputs
    assert one.text == "zebra" and one.logprobs is not None
    assert one.logprobs[0].rank > 1 and one.logprobs[0].top_logprobs[0] > one.logprobs[0].logprob


def test_allowed_tokens_and_bad_words(llm: LLM):
    prompt, greedy = "The capital of France is", SamplingParams(temperature=0.0, max_tokens=6)
    plain = llm.generate(prompt, greedy)[0].outputs[0].text
    assert "Paris" in plain
    banned = llm.generate(prompt, replace(greedy, bad_words=("Paris",)))[0].outputs[0].text
    assert "Paris" not in banned
    ids = tuple(llm.tokenizer.encode(" London Berlin"))
    only = llm.generate(prompt, replace(greedy, allowed_token_ids=ids))[0].outputs[0]
    assert set(only.token_ids) <= set(ids)
    drawn = replace(greedy, allowed_token_ids=ids, temperature=2.0, seed=1, n=4)
    for one in llm.generate(prompt, drawn)[0].outputs:
        assert set(one.token_ids) <= set(ids)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"grammar": json_grammar(PERSON), "min_tokens": 2}, "min_tokens"),
        ({"grammar": json_grammar(PERSON), "ignore_eos": True}, "ignore_eos"),
        ({"grammar": json_grammar(PERSON), "bad_words": ("x",)}, "bad_words"),
        ({"grammar": json_grammar(PERSON), "allowed_token_ids": (5,)}, "allowed_token_ids"),
        ({"grammar": "start: nothing"}, None),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (10**6,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (2,), "min_tokens": 1, "stop_token_ids": (2,)}, "allowed_token_ids"),
        ({"bad_words": ("",)}, "bad_words"),
    ],
)
def test_settings_that_leave_no_token_are_refused(llm: LLM, fields: dict[str, Any], param):
    with pytest.raises(InvalidRequestError) as refusal:
        llm.generate("x", SamplingParams(**fields))
    assert refusal.value.param == param


def test_a_grammar_that_fails_ends_its_request_alone(llm: LLM, monkeypatch):
    """A limit is reached in the middle of an output."""
    from headway.text.matchers import OutputMatcher

    write, calls = OutputMatcher.write_mask, {}

    def fail_later(self, mask):
        calls[self] = calls.get(self, 0) + 1
        if calls[self] == 5 and self is next(iter(calls)):
            raise ValueError("a limit was reached")
        write(self, mask)

    params = SamplingParams(grammar=json_grammar(PERSON), max_tokens=80, temperature=0.0)
    expected = texts(llm.generate(PROMPT, params))
    monkeypatch.setattr(OutputMatcher, "write_mask", fail_later)
    with pytest.raises(EngineError, match="a limit was reached"):
        llm.generate([PROMPT, PROMPT], params)
    monkeypatch.undo()
    assert texts(llm.generate(PROMPT, params)) == expected


def test_the_model_thinks_no_longer_than_its_budget(llm: LLM):
    grammar = budgeted_grammar(llm.tokenizer, 12, ReasoningStart.OPEN)
    params = SamplingParams(grammar=grammar, temperature=1.0, seed=3, max_tokens=40, n=2)
    prompts = ["Is water wet? <think>", "Is 7 a prime number? Think first. <think>"]
    together = llm.generate(prompts, params)
    for text, reason in (one for output in texts(together) for one in output):
        thought, tag, answer = text.partition("</think>")
        assert tag and answer.strip() in ("true", "false") and reason == "stop"
        assert len(llm.tokenizer.encode(thought)) <= 16
    alone = llm.generate(prompts[1:], params)
    assert texts(alone) == texts(together[1:])
