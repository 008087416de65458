"""Bad inputs: every field of both endpoints with wrong types and values out of range."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.faults.cases import (
    CHAT_ENDPOINT,
    COMPLETION_ENDPOINT,
    ENDPOINTS,
    Case,
    Endpoint,
)

EMBEDDINGS = "/v1/embeddings"
INT_FIELDS = ("n", "seed", "priority", "top_k", "min_tokens", "max_tokens", "prompt_logprobs")
FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ttft_ms",
    "tpot_ms",
    "deadline_ms",
)
BOOL_FIELDS = (
    "stream",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "return_tokens_as_token_ids",
)
TEXT_FIELDS = ("model", "user", "cache_salt")

OWN_FIELDS = {
    "chat": {
        "int": ("max_completion_tokens", "top_logprobs"),
        "bool": ("logprobs",),
        "text": ("safety_identifier",),
    },
    "completion": {"int": ("logprobs", "best_of"), "bool": ("echo",), "text": ()},
}

NOT_AN_INT = {
    "a-string": "1",
    "an-empty-string": "",
    "a-fraction": 1.5,
    "a-whole-float": 1.0,
    "true": True,
    "false": False,
    "a-list": [1],
    "an-object": {"value": 1},
    "a-thousand-digits": 10**1000,
    "minus-a-thousand-digits": -(10**1000),
}
NOT_A_FLOAT = {
    "a-string": "0.5",
    "the-string-nan": "NaN",
    "the-string-infinity": "Infinity",
    "the-string-minus-infinity": "-Infinity",
    "true": True,
    "a-list": [0.5],
    "an-object": {"value": 0.5},
    "a-huge-integer": 10**400,
    "a-huge-negative-integer": -(10**400),
}
NOT_A_BOOL = {
    "one": 1,
    "zero": 0,
    "the-string-true": "true",
    "an-empty-string": "",
    "a-list": [True],
    "an-object": {"value": True},
}
NOT_TEXT = {"a-number": 5, "a-fraction": 0.5, "true": True, "a-list": ["a"], "an-object": {"a": 1}}

BAD_LITERALS = {
    "the-literal-nan": b"NaN",
    "the-literal-infinity": b"Infinity",
    "the-literal-minus-infinity": b"-Infinity",
    "the-literal-1e400": b"1e400",
    "the-literal-minus-1e400": b"-1e400",
    "an-integer-of-5000-digits": b"9" * 5000,
    "a-fraction-of-5000-digits": b"0." + b"9" * 5000 + b"e99999",
}

OUT_OF_RANGE = {
    "n": (0, -1, 9, 16, 128, 129, 16384, 2**31, 2**63, 2**64),
    "temperature": (-0.001, -1, 100.5, 1e300, -1e300),
    "top_p": (0, -0.1, 1.001, 2, 1e300),
    "min_p": (-0.1, 1.001, 1e300),
    "presence_penalty": (-2.001, 2.001, 1e300),
    "frequency_penalty": (-2.001, 2.001, -1e300),
    "repetition_penalty": (0, -1, 0.001, 100.5, 1e300),
    "ttft_ms": (0, -1, 1e-9, 86_400_001, 1e300, -1e300),
    "tpot_ms": (0, -0.5, 1e-300, 1e12, 2**64),
    "deadline_ms": (0, -1, 86_400_000.5, 1e300),
    "prompt_logprobs": (-1, 21, 10**9, 2**31, 2**63),
    "max_tokens": (-1, -(2**31), 10_000_000, 2**31, 2**63, 2**64, 10**30),
    "min_tokens": (-1, 3, 2**31, 2**63, 10**30),
    "top_k": (-2, -(2**31), 2**31, 2**63, 10**30),
    "priority": (2**63, -(2**63), 2**64, 10**30, -(10**30)),
    "seed": (2**63, -(2**63) - 1, 2**64, 10**30, -(10**30)),
}
OWN_OUT_OF_RANGE = {
    "chat": {
        "max_tokens": (0, -1, 10_000_000, 2**63),
        "max_completion_tokens": (0, -1, 1, 3, 10_000_000, 2**63),
        "top_logprobs": (-1, 1, 21, 10**6, 2**63),
    },
    "completion": {
        "logprobs": (-1, 21, 10**6, 2**31, 2**63),
        "best_of": (0, -1, 2, 20, 10**9, 2**63),
    },
}

COMPOUND = {
    "stop": {
        "a-number": 5,
        "false": False,
        "an-object": {"a": "b"},
        "an-empty-string": "",
        "a-list-with-an-empty-string": ["a", ""],
        "a-list-with-a-number": ["a", 5],
        "a-list-with-null": ["a", None],
        "a-list-of-lists": [["a"]],
        "17-strings": ["x"] * 17,
        "5000-strings": ["x"] * 5000,
        "a-string-of-257-characters": "x" * 257,
        "a-string-of-50000-characters": "x" * 50_000,
    },
    "stop_token_ids": {
        "a-number": 5,
        "a-string": "5",
        "an-object": {"5": 5},
        "a-list-with-a-string": [1, "2"],
        "a-list-with-true": [True],
        "a-list-with-a-fraction": [1.5],
        "a-list-with-null": [None],
        "a-list-with-a-list": [[1]],
        "a-negative-id": [-1],
        "a-thousand-digits": [10**1000],
        "129-ids": list(range(129)),
        "10000-ids": [1] * 10_000,
        "a-list-with-a-long-list": [[0] * 20_000],
        "a-list-with-a-long-string": ["x" * 50_000],
    },
    "logit_bias": {
        "a-number": 5,
        "a-string": "5",
        "a-list": [[5, 1]],
        "a-key-that-is-a-word": {"hello": 1},
        "an-empty-key": {"": 1},
        "a-negative-key": {"-1": 1},
        "a-key-with-a-plus": {"+1": 1},
        "a-key-with-a-space": {" 1": 1},
        "a-fraction-as-key": {"1.5": 1},
        "a-key-in-other-digits": {"\u0661\u0662": 1},
        "a-key-of-11-digits": {"1" * 11: 1},
        "a-key-of-5000-digits": {"1" * 5000: 1},
        "a-bias-over-100": {"5": 100.5},
        "a-bias-under-minus-100": {"5": -100.5},
        "a-bias-as-string": {"5": "1"},
        "a-bias-of-the-string-nan": {"5": "NaN"},
        "a-bias-of-null": {"5": None},
        "a-bias-of-true": {"5": True},
        "a-bias-of-400-digits": {"5": 10**400},
        "a-bias-as-list": {"5": [1]},
        "a-bias-as-a-long-list": {"5": [0] * 20_000},
        "a-bias-as-a-long-string": {"5": "x" * 50_000},
        "1025-entries": {str(i): 1 for i in range(1025)},
        "6000-entries": {str(i): 1 for i in range(6000)},
    },
    "stream_options": {
        "a-string": "x",
        "true": True,
        "a-list": [],
        "a-number": 1,
        "given-without-stream": {"include_usage": True},
        "an-unknown-key": {"include_everything": True},
        "a-long-unknown-key": {"x" * 50_000: True},
        "a-number-as-usage": {"include_usage": 1},
        "a-string-as-resumable": {"resumable": "yes"},
        "a-number-of-seconds-as-resumable": {"resumable": 30},
    },
}


def fields_of(endpoint: Endpoint, kind: str) -> tuple[str, ...]:
    shared = {"int": INT_FIELDS, "bool": BOOL_FIELDS, "text": TEXT_FIELDS}[kind]
    return shared + OWN_FIELDS[endpoint.name][kind]


def wrong_types() -> Iterator[Case]:
    for endpoint in ENDPOINTS:
        for kind, values in (("int", NOT_AN_INT), ("bool", NOT_A_BOOL), ("text", NOT_TEXT)):
            for name in fields_of(endpoint, kind):
                yield from _each(endpoint, name, values)
        for name in FLOAT_FIELDS:
            yield from _each(endpoint, name, NOT_A_FLOAT)
        for name, values in COMPOUND.items():
            yield from _each(endpoint, name, values)


def _each(endpoint: Endpoint, name: str, values: dict[str, Any]) -> Iterator[Case]:
    for label, value in values.items():
        yield endpoint.refused(f"{name}-is-{label}", **{name: value})


def bad_literals() -> Iterator[Case]:
    for endpoint in ENDPOINTS:
        for name in ("temperature", "top_p", "n", "seed", "max_tokens", "priority", "ttft_ms"):
            for label, literal in BAD_LITERALS.items():
                yield endpoint.with_literal(f"{name}-is-{label}", name, literal)
        for label, literal in BAD_LITERALS.items():
            bias = b'{"5": ' + literal + b"}"
            yield endpoint.with_literal(f"logit_bias-holds-{label}", "logit_bias", bias)
            ids = b"[" + literal + b"]"
            yield endpoint.with_literal(f"stop_token_ids-hold-{label}", "stop_token_ids", ids)


def out_of_range() -> Iterator[Case]:
    for endpoint in ENDPOINTS:
        for name, values in {**OUT_OF_RANGE, **OWN_OUT_OF_RANGE[endpoint.name]}.items():
            for value in values:
                yield endpoint.refused(f"{name}-out-of-range-{value}", **{name: value})


def combinations() -> Iterator[Case]:
    """Yield combinations of values that are valid one by one."""
    for endpoint in ENDPOINTS:
        yield endpoint.refused("min_tokens-over-max_tokens", min_tokens=5, max_tokens=4)
        yield endpoint.refused("n-8-over-the-token-budget", n=8, max_tokens=100_000)
        options = {"include_obfuscation": True}
        yield endpoint.refused("obfuscated-stream", stream=True, stream_options=options)
        yield endpoint.refused("scored-stream", stream=True, prompt_logprobs=0)
    chat, completion = CHAT_ENDPOINT, COMPLETION_ENDPOINT
    yield chat.refused("two-limits-that-differ", max_tokens=2, max_completion_tokens=3)
    yield chat.refused("top_logprobs-without-logprobs", top_logprobs=3, logprobs=False)
    yield completion.refused("65-prompts", prompt=["a"] * 65)
    yield completion.refused("5000-prompts", prompt=["a"] * 5000)
    yield completion.refused("5000-empty-id-lists", prompt=[[]] * 5000)
    yield completion.refused("64-prompts-n-8-tokens-257", prompt=["a"] * 64, n=8, max_tokens=257)
    yield completion.refused("16-prompts-n-8-tokens-1025", prompt=["a"] * 16, n=8, max_tokens=1025)
    yield completion.refused("best_of-below-n", n=3, best_of=2)
    yield completion.refused("best_of-over-n", n=3, best_of=4)
    options = {"resumable": True}
    yield completion.refused("echo-resumable", echo=True, stream=True, stream_options=options)
    ids = [[5] * 400] * 64
    yield completion.refused("25600-tokens-scored-21-times", prompt=ids, prompt_logprobs=20)


BAD_EMBEDDINGS: dict[str, dict[str, Any]] = {
    "no-input": {"input": None},
    "an-empty-input": {"input": []},
    "a-number": {"input": 5},
    "an-object": {"input": {"a": 1}},
    "texts-and-ids": {"input": ["a", [1]]},
    "an-empty-list-of-ids": {"input": [[]]},
    "129-inputs": {"input": ["a"] * 129},
    "5000-inputs": {"input": ["a"] * 5000},
    "a-negative-id": {"input": [-1]},
    "an-id-of-a-thousand-digits": {"input": [10**1000]},
    "a-million-dimensions": {"input": "a", "dimensions": 10**6},
    "0-dimensions": {"input": "a", "dimensions": 0},
    "dimensions-as-text": {"input": "a", "dimensions": "8"},
    "an-unknown-encoding": {"input": "a", "encoding_format": "x" * 50_000},
    "an-encoding-that-is-a-list": {"input": "a", "encoding_format": ["float"]},
    "truncated-to-nothing": {"input": "a", "truncate_prompt_tokens": 0},
    "an-unknown-field": {"input": "a", "max_tokens": 1},
}


def embeddings() -> Iterator[Case]:
    for name, body in BAD_EMBEDDINGS.items():
        content = json.dumps(body).encode()
        yield Case(f"embeddings-{name}", (400,), path=EMBEDDINGS, body=content)
    good = json.dumps({"input": ["a", "b"], "encoding_format": "base64"}).encode()
    yield Case("embeddings-accepts-base64", (200,), path=EMBEDDINGS, body=good)


def field_cases() -> list[Case]:
    return [*wrong_types(), *bad_literals(), *out_of_range(), *combinations(), *embeddings()]
