"""Every field of the API is honoured or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway.core.params import SamplingParams
from headway.core.terms import Targets, Terms
from headway.errors import InvalidRequestError
from headway.server.schema.chat import ChatRequest
from headway.server.schema.completions import CompletionRequest
from headway.server.schema.fields import unsupported_fields
from headway.server.schema.request import DEFAULT_LIMITS, parse
from headway.server.schema.responses import ResponsesRequest, read_responses
from headway.server.schema.sampling import SamplingFields
from headway.text.grammar import choice_grammar, json_grammar, lark_grammar, regex_grammar

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": MESSAGES, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "hi", **fields}).encode())


def response(**fields: Any) -> ChatRequest:
    return read_responses(json.dumps({"input": "hi", **fields}).encode(), DEFAULT_LIMITS).payload


def refusal(make: Any, **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        make(**fields).params()
    return caught.value


SCHEMA = {"type": "array"}
SHARED = [
    ("n", 3, {"n": 3}),
    ("temperature", 0, {"temperature": 0}),
    ("temperature", 0.5, {"temperature": 0.5}),
    ("top_p", 0.5, {"top_p": 0.5}),
    ("stop", "x", {"stop": ("x",)}),
    ("stop", ["x", "y"], {"stop": ("x", "y")}),
    ("seed", 7, {"seed": 7}),
    ("seed", -(2**63), {"seed": -(2**63)}),
    ("presence_penalty", 1.5, {"presence_penalty": 1.5}),
    ("frequency_penalty", -1, {"frequency_penalty": -1}),
    ("logit_bias", {"5": -100, "6": 1.5}, {"logit_bias": {5: -100, 6: 1.5}}),
    ("max_tokens", 9, {"max_tokens": 9}),
    ("top_k", 4, {"top_k": 4}),
    ("top_k", -1, {"top_k": 0}),
    ("min_p", 0.1, {"min_p": 0.1}),
    ("min_tokens", 2, {"min_tokens": 2}),
    ("repetition_penalty", 1.1, {"repetition_penalty": 1.1}),
    ("stop_token_ids", [1, 2], {"stop_token_ids": (1, 2)}),
    ("ignore_eos", True, {"ignore_eos": True}),
    ("include_stop_str_in_output", True, {"include_stop_str_in_output": True}),
    ("skip_special_tokens", False, {"skip_special_tokens": False}),
    ("user", "someone", {}),
    ("priority", 3, {}),
    ("ttft_ms", 500, {}),
    ("allowed_token_ids", [5, 6], {"allowed_token_ids": (5, 6)}),
    ("bad_words", ["a b"], {"bad_words": ("a b",)}),
    ("response_format", {"type": "text"}, {}),
    (
        "response_format",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        {"grammar": json_grammar(SCHEMA)},
    ),
    ("response_format", {"type": "json_object"}, {"grammar": json_grammar({"type": "object"})}),
    ("structured_outputs", {"choice": ["a"]}, {"grammar": choice_grammar(["a"])}),
    ("structured_outputs", {"json": SCHEMA}, {"grammar": json_grammar(SCHEMA)}),
    ("structured_outputs", {"json": '{"type": "array"}'}, {"grammar": json_grammar(SCHEMA)}),
    ("structured_outputs", {"regex": "a+"}, {"grammar": regex_grammar("a+")}),
    ("structured_outputs", {"grammar": 'start: "a"'}, {"grammar": lark_grammar('start: "a"')}),
    (
        "structured_outputs",
        {"json_object": True, "disable_any_whitespace": True, "disable_fallback": True},
        {"grammar": json_grammar({"type": "object"}, is_compact=True)},
    ),
    ("return_token_ids", True, {}),
    ("return_tokens_as_token_ids", True, {}),
    ("prompt_logprobs", 3, {"prompt_logprobs": 3}),
    ("cache_salt", "x", {}),
    ("truncate_prompt_tokens", 5, {}),
    ("tpot_ms", 20.5, {}),
    ("deadline_ms", 86_400_000, {}),
    ("stream", True, {}),
    ("model", "tiny", {}),
]


OF_RESPONSES = [row for row in SHARED if row[0] in ResponsesRequest.model_fields]


@pytest.mark.parametrize(("name", "value", "expected"), SHARED)
@pytest.mark.parametrize(("make", "max_tokens"), [(chat, None), (completion, 16)])
def test_honoured_fields(make, max_tokens, name, value, expected) -> None:
    wanted = SamplingParams(**{"max_tokens": max_tokens, **expected})
    assert make(**{name: value}).params() == wanted
    assert make(**{name: None}).params() == SamplingParams(max_tokens=max_tokens)


@pytest.mark.parametrize(("name", "value", "expected"), OF_RESPONSES)
def test_fields_that_responses_honour_too(name, value, expected) -> None:
    assert response(**{name: value}).params() == SamplingParams(**{"max_tokens": None, **expected})
    assert response(**{name: None}).params() == SamplingParams(max_tokens=None)


@pytest.mark.parametrize("make", [chat, completion, response])
def test_targets_replace_those_of_the_tier(make) -> None:
    tier = Terms("alice", "gold", targets=Targets(1.0, None, 30.0))
    assert make().terms(tier) is tier
    assert make(ttft_ms=None).terms(tier) is tier
    asked = make(ttft_ms=2500, tpot_ms=0.5).terms(tier)  # looser, and a promise of its own
    assert asked == Terms("alice", "gold", targets=Targets(2.5, 0.0005, 30.0))


def test_fields_that_differ_between_the_endpoints() -> None:
    assert chat(max_completion_tokens=5).params().max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).params().max_tokens == 5
    assert chat(logprobs=True).params().logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).params().logprobs == 20
    assert chat(logprobs=False).params().logprobs is None
    assert completion(logprobs=0).params().logprobs == 0
    assert completion(logprobs=20).params().logprobs == 20
    assert completion(best_of=2, n=2).params().n == 2
    asked = chat(stream=True, stream_options={"include_usage": True})
    assert asked.answer_options.includes_usage
    assert not chat(stream=True).answer_options.includes_usage


REFUSED_BY_BOTH = [
    ("n", 0, "n"),
    ("n", 9, "n"),
    ("n", 129, "n"),
    ("n", "2", "n"),
    ("n", True, "n"),
    ("n", 1.0, "n"),
    ("temperature", -1, "temperature"),
    ("temperature", "hot", "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.1, "top_p"),
    ("stop", 5, "stop"),
    ("stop", [5], "stop"),
    ("stop", [""], "stop"),
    ("stop", ["x"] * 17, "stop"),
    ("stop", "x" * 257, "stop"),
    ("seed", 2**63, "seed"),
    ("presence_penalty", 2.5, "presence_penalty"),
    ("frequency_penalty", -3, "frequency_penalty"),
    ("logit_bias", {"a": 1}, "logit_bias"),
    ("logit_bias", {"-1": 1}, "logit_bias"),
    ("logit_bias", {"5": 101}, "logit_bias"),
    ("logit_bias", {"5": "1"}, "logit_bias"),
    ("logit_bias", {"5": None}, "logit_bias"),
    ("logit_bias", {str(i): 1 for i in range(1025)}, "logit_bias"),
    ("max_tokens", -1, "max_tokens"),
    ("prompt_logprobs", -1, "prompt_logprobs"),
    ("prompt_logprobs", 21, "prompt_logprobs"),
    ("prompt_logprobs", True, "prompt_logprobs"),
    ("return_tokens_as_token_ids", 1, "return_tokens_as_token_ids"),
    ("cache_salt", "", "cache_salt"),
    ("cache_salt", "x" * 257, "cache_salt"),
    ("max_tokens", 1.5, "max_tokens"),
    ("max_tokens", 131_073, "max_tokens"),
    ("min_tokens", -1, "min_tokens"),
    ("top_k", -2, "top_k"),
    ("top_k", 10**30, "top_k"),
    ("priority", 10**30, "priority"),
    ("min_p", 2, "min_p"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("stop_token_ids", ["a"], "stop_token_ids"),
    ("stop_token_ids", 5, "stop_token_ids"),
    ("allowed_token_ids", [], "allowed_token_ids"),
    ("allowed_token_ids", [-1], "allowed_token_ids"),
    ("allowed_token_ids", [1] * 4097, "allowed_token_ids"),
    ("bad_words", [""], "bad_words"),
    ("bad_words", ["x"] * 129, "bad_words"),
    ("bad_words", [5], "bad_words"),
    ("truncate_prompt_tokens", -1, "truncate_prompt_tokens"),
    ("response_format", {"type": "xml"}, "response_format.type"),
    ("ttft_ms", 0, "ttft_ms"),
    ("ttft_ms", "500", "ttft_ms"),
    ("tpot_ms", -1, "tpot_ms"),
    ("tpot_ms", True, "tpot_ms"),
    ("deadline_ms", 86_400_001, "deadline_ms"),
    ("deadline_ms", [1], "deadline_ms"),
    ("stream", "yes", "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("model", 5, "model"),
    ("user", 5, "user"),
    ("no_such_field", 1, "no_such_field"),
    ("guided_json", {}, "guided_json"),
]


@pytest.mark.parametrize(("name", "value", "param"), REFUSED_BY_BOTH)
@pytest.mark.parametrize("make", [chat, completion])
def test_refused_fields(make, name, value, param) -> None:
    error = refusal(make, **{name: value})
    assert error.param == param
    assert param in str(error) or param == "stop"
    if name in SamplingFields.model_fields:
        error_of_responses = refusal(response, **{name: value})
        assert (str(error_of_responses), error_of_responses.param) == (str(error), param)


UNSUPPORTED_CHAT = [
    ("audio", {"voice": "x"}, None),
    ("function_call", "auto", "none"),
    ("functions", [{"name": "f"}], []),
    ("modalities", ["audio"], ["text"]),
    ("moderation", {}, None),
    ("prediction", {"type": "content"}, None),
    ("prompt_cache_options", {}, None),
    ("prompt_cache_retention", "24h", None),
    ("service_tier", "flex", "auto"),
    ("service_tier", "priority", "default"),
    ("verbosity", "low", "medium"),
    ("web_search_options", {}, None),
    ("top_logprobs", 2, None),
    ("max_completion_tokens", 0, None),
    ("max_tokens", 0, None),
]


@pytest.mark.parametrize(("name", "value", "harmless"), UNSUPPORTED_CHAT)
def test_what_chat_does_not_support(name, value, harmless) -> None:
    assert refusal(chat, **{name: value}).param in (name, "max_tokens")
    chat(**{name: harmless})


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("echo", 1, True),
        ("max_tokens", -1, 0),
        ("suffix", "x", ""),
        ("best_of", 2, 1),
        ("logprobs", 21, 20),
    ],
)
def test_what_completions_do_not_support(name, value, harmless) -> None:
    assert refusal(completion, **{name: value}).param == name
    completion(**{name: harmless})


def test_every_field_is_tested() -> None:
    honoured = {name for name, _, _ in SHARED} | {"messages", "prompt", "stream_options"}
    own = {"logprobs", "top_logprobs", "max_completion_tokens", "best_of", "safety_identifier"}
    own |= {"metadata", "prompt_cache_key", "store", "chat_template_kwargs"}
    own |= {"add_generation_prompt", "continue_final_message", "echo"}
    own |= {"tools", "tool_choice", "parallel_tool_calls", "reasoning_effort"}
    own |= {"thinking_token_budget"}
    refused = {*unsupported_fields(ChatRequest), *unsupported_fields(CompletionRequest)}
    fields = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    assert fields == honoured | own | refused
    assert set(SamplingFields.model_fields) <= {name for name, _, _ in OF_RESPONSES}
    assert set(unsupported_fields(ChatRequest)) <= {name for name, _, _ in UNSUPPORTED_CHAT}


@pytest.mark.parametrize(("name", "value"), [("store", 0), ("parallel_tool_calls", 1)])
def test_a_number_is_no_boolean(name, value) -> None:
    assert refusal(chat, **{name: value}).param == name


def test_obfuscation_is_refused_by_its_full_name() -> None:
    chat(stream=True, stream_options={"include_obfuscation": False})
    options = {"include_obfuscation": True}
    error = refusal(chat, stream=True, stream_options=options)
    assert error.param == "stream_options.include_obfuscation"


def nested(depth: int) -> bytes:
    """A body of this depth, in a field whose value does not matter."""
    lists = b"[" * (depth - 1) + b"]" * (depth - 1)
    return b'{"messages": [{"role": "user", "content": "hi"}], "audio": ' + lists + b"}"


def test_nesting_is_bounded() -> None:
    with pytest.raises(InvalidRequestError, match="audio is not supported"):
        parse(ChatRequest, nested(32))
    for depth in (33, 100, 900):
        with pytest.raises(InvalidRequestError, match="32 levels"):
            parse(ChatRequest, nested(depth))
    # Many lists are not deep ones.
    assert completion(prompt=[[1]] * 64, stop=["x"]).prompts() == [[1]] * 64
    long = [{"role": "user", "content": "[{" * 50}] * 100
    assert len(chat(messages=long).messages) == 100


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"\xff",
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"prompt": "\\ud800"}',
    ],
)
@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_bodies_that_are_no_json_object(kind, body) -> None:
    with pytest.raises(InvalidRequestError):
        parse(kind, body)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a"] * 64, ["a"] * 64),
    ],
)
def test_prompt_shapes(prompt, prompts) -> None:
    assert completion(prompt=prompt).prompts() == prompts


@pytest.mark.parametrize(
    "prompt",
    [None, 5, [], {}, [1, "a"], ["a", 1], [[1], "a"], [["a"]], [1.5], [True], ["a"] * 65],
)
def test_prompts_of_no_known_shape(prompt) -> None:
    assert refusal(completion, prompt=prompt).param == "prompt"


def test_samples_over_all_prompts_are_bounded() -> None:
    completion(prompt=["a"] * 64, n=2)
    assert refusal(completion, prompt=["a"] * 64, n=3).param == "n"


def test_messages_for_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": "ok", "tool_calls": [], "refusal": None},
    ]
    assert chat(messages=messages).conversation() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": "ok"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0]",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls[0].id"),
        ({"role": "assistant", "content": "x", "audio": {"id": "x"}}, "messages[0].audio"),
    ],
)
def test_refused_messages(message, param) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(messages=[message]).conversation()
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "mood": 1}], "messages[0].mood"),
    ],
)
def test_messages_of_no_known_shape(messages, param) -> None:
    assert refusal(chat, messages=messages).param == param


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="messages is required"):
        parse(ChatRequest, b"{}")
    with pytest.raises(InvalidRequestError, match="prompt is required"):
        parse(CompletionRequest, b"{}")
