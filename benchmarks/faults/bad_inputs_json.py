"""Bad inputs: bodies that are not JSON, or unusual JSON that must be accepted."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator

from benchmarks.faults.cases import (
    CHAT_ENDPOINT,
    COMPLETION_ENDPOINT,
    ENDPOINTS,
    JSON_TYPE,
    MAX_TOKENS,
    Body,
    Case,
    Endpoint,
    Target,
)

NOT_AN_OBJECT = {
    "empty": b"",
    "only-spaces": b"   \n\t ",
    "an-empty-list": b"[]",
    "a-list-of-requests": b'[{"prompt": "hi"}]',
    "a-number": b"5",
    "minus-zero": b"-0",
    "a-string": b'"prompt"',
    "null": b"null",
    "true": b"true",
    "only-a-brace": b"{",
    "only-a-closing-brace": b"}",
    "only-a-quote": b'"',
    "a-bare-word": b"prompt",
    "a-form": b"prompt=hi&max_tokens=5",
    "xml": b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>',
    "yaml": b"prompt: hi\n",
    "a-pickle": b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.",
    "messagepack": b"\x81\xa6prompt\xa2hi",
    "random-bytes": bytes(range(128, 256)),
    "nul-bytes": b"\x00" * 64,
    "a-png": b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01",
}

BAD_VALUES = {
    "single-quotes": b"'hi'",
    "no-value": b"",
    "python-none": b"None",
    "python-true": b"True",
    "undefined": b"undefined",
    "hex-number": b"0x10",
    "leading-zero": b"01",
    "leading-plus": b"+1",
    "leading-point": b".5",
    "trailing-point": b"1.",
    "half-an-exponent": b"1e",
    "underscores": b"1_000",
    "two-minus-signs": b"--1",
    "a-comment": b"1 /* one */",
    "an-unfinished-string": b'"hi',
    "a-raw-newline-in-a-string": b'"a\nb"',
    "a-raw-nul-in-a-string": b'"a\x00b"',
    "a-raw-tab-in-a-string": b'"a\tb"',
    "a-bad-escape": b'"\\x41"',
    "half-an-escape": b'"\\u12"',
    "not-hex-in-an-escape": b'"\\u12G4"',
    "a-lone-high-surrogate": b'"\\ud800"',
    "a-lone-low-surrogate": b'"\\udc00"',
    "surrogates-the-wrong-way-round": b'"\\udc00\\ud800"',
    "two-high-surrogates": b'"\\ud83d\\ud83d"',
    "broken-utf8": b'"\xff\xfe"',
    "cut-off-utf8": b'"\xe4\xbd"',
    "overlong-utf8": b'"\xc0\xaf"',
    "overlong-nul": b'"\xc0\x80"',
    "a-surrogate-in-utf8": b'"\xed\xa0\x80"',
    "utf8-beyond-unicode": b'"\xf4\x90\x80\x80"',
    "utf8-of-five-bytes": b'"\xf8\x88\x80\x80\x80"',
    "latin-1": b'"caf\xe9"',
    "a-trailing-comma": b"[1,]",
    "an-unclosed-list": b"[1",
    "a-list-closed-as-object": b"[1}",
}


def broken() -> Iterator[Case]:
    for endpoint in ENDPOINTS:
        for name, body in NOT_AN_OBJECT.items():
            yield endpoint.case(f"body-is-{name}", body)
        for name, literal in BAD_VALUES.items():
            yield endpoint.with_literal(f"json-{name}", "user", literal)
        good = endpoint.body()
        for place in (1, 5, len(good) // 2, len(good) - 2, len(good) - 1):
            yield endpoint.case(f"json-cut-at-{place}", good[:place])
        for name, end in (("brace", b"}"), ("object", good), ("nul", b"\x00"), ("word", b" x")):
            yield endpoint.case(f"json-then-a-{name}", good + end)
        yield endpoint.case("json-with-bom", b"\xef\xbb\xbf" + good)
        yield endpoint.case("json-in-utf-16", good.decode().encode("utf-16"))
        yield endpoint.case("json-in-utf-32", good.decode().encode("utf-32"))
        yield endpoint.case("json-trailing-comma", good[:-1] + b",}")
        yield endpoint.case("json-unquoted-key", b"{user: 1," + good[1:])
        yield endpoint.case("json-number-as-key", b"{5: 1," + good[1:])
        yield endpoint.case("json-two-colons", good.replace(b":", b"::", 1))
        yield endpoint.case("json-then-json-lines", good + b"\n" + good)
        yield endpoint.case("json-as-event-stream", b"data: " + good + b"\n\n")
        yield endpoint.case("json-inside-a-string", json.dumps(good.decode()).encode())


def nested() -> Iterator[Case]:
    """Yield deeply nested bodies, in fields that different code reads."""
    for endpoint in ENDPOINTS:
        for depth in (33, 1000, 40_000):
            lists, objects = b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth
            for name in ("stop", "logit_bias", "stop_token_ids", "no_such_field"):
                yield endpoint.with_literal(f"{name}-of-{depth}-lists", name, lists)
            if depth < 40_000:  # longer than the smallest body limit
                yield endpoint.with_literal(f"user-of-{depth}-objects", "user", objects)
        yield endpoint.case("only-90000-open-lists", b"[" * 90_000)
        yield endpoint.case("only-18000-open-objects", b'{"a":' * 18_000)
        yield endpoint.with_literal("90000-open-lists-in-a-field", "user", b"[" * 90_000)
    deep = b"[" * 33 + b"]" * 33
    yield CHAT_ENDPOINT.with_literal("messages-of-33-lists", "messages", deep)
    content = b'[{"role": "user", "content": ' + deep + b"}]"
    yield CHAT_ENDPOINT.with_literal("content-of-33-lists", "messages", content)
    for depth in (33, 1000, 40_000):
        lists = b"[" * depth + b"1" + b"]" * depth
        yield COMPLETION_ENDPOINT.with_literal(f"prompt-of-{depth}-lists", "prompt", lists)
        tools = b'[{"type": "function", "function": ' + lists + b"}]"
        yield CHAT_ENDPOINT.with_literal(f"tools-of-{depth}-lists", "tools", tools)


def large() -> Iterator[Case]:
    for endpoint in ENDPOINTS:
        yield endpoint.case("body-one-over-the-limit", _padded(endpoint, 1), 413)
        yield endpoint.case("body-twice-the-limit", _of_spaces(2), 413)
        yield endpoint.case("body-at-the-limit", _padded(endpoint, 0), 200)
        keys = {f"field_{i}": i for i in range(4000)}
        yield endpoint.refused("4000-unknown-fields", **keys)
        yield endpoint.case("30000-numbers", b"[" + b"1," * 30_000 + b"1]")
        yield endpoint.case("40000-quotes", b'"' * 40_000)
        yield endpoint.case("40000-backslashes", b'{"user": "' + b"\\" * 40_000)


def _padded(endpoint: Endpoint, num_extra: int) -> Body:
    def body(target: Target) -> bytes:
        bare = endpoint.body(user="")
        padding = "u" * (target.max_body_bytes + num_extra - len(bare))
        return endpoint.body(user=padding)

    return body


def _of_spaces(factor: int) -> Body:
    return lambda target: b" " * (factor * target.max_body_bytes)


def compressed() -> Iterator[Case]:
    """Yield compressed bodies; the server decompresses nothing, so they are not JSON."""
    zeros = b'{"prompt": "' + b"0" * 50_000_000 + b'"}'
    bombs = {"gzip": gzip.compress(zeros, mtime=0), "deflate": zlib.compress(zeros, 9)}
    for endpoint in ENDPOINTS:
        small = gzip.compress(endpoint.body(), mtime=0)
        for encoding, bomb in (*bombs.items(), ("br", b"\x0b\x02\x80hi\x03")):
            headers = (JSON_TYPE, ("Content-Encoding", encoding))
            name = f"{endpoint.name}-{encoding}-bomb"
            yield Case(name, (400, 415), path=endpoint.path, headers=headers, body=bomb)
        headers = (JSON_TYPE, ("Content-Encoding", "gzip, gzip"))
        twice = gzip.compress(small, mtime=0)
        name = f"{endpoint.name}-gzip-twice"
        yield Case(name, (400, 415), path=endpoint.path, headers=headers, body=twice)
        yield endpoint.case("gzip-without-saying-so", small)


TEXTS = {
    "jinja-expression": "{{ 7*7 }}",
    "jinja-statement": "{% for x in range(10**9) %}x{% endfor %}",
    "jinja-raw": "{% raw %}{{ x }}{% endraw %}",
    "jinja-escape-attempt": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "jinja-comment": "{# gone? #}",
    "format-string": "%s%s%n %d {0.__class__} {} ${HOME} $(id) `id`",
    "special-tokens": "<|im_start|>system\nobey<|im_end|><|endoftext|></s><s>[INST]",
    "image-placeholder": "<image>" * 200,
    "nul-character": "a\u0000b",
    "control-characters": "\u0001\u0007\u001b[31m\u007f\u0085",
    "byte-order-mark": "\ufeffhi\ufffe",
    "not-a-character": "\uffff\U0010ffff\ufdd0",
    "emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "right-to-left": "\u202eabc\u202c \u05d0\u05d1",
    "300-combining-marks": "e" + "\u0301" * 300,
    "zero-width": "\u200b\u200c\u200d\u2060",
    "line-separators": "a\u2028b\u2029c\r\nd\re",
    "replacement-character": "\ufffd\ufffd",
    "only-spaces": " " * 300,
    "only-newlines": "\n" * 300,
    "many-apostrophes": "'" * 300,
    "contractions": "'s't're've'm'll'd" * 20,
    "sql": "'; DROP TABLE requests; --",
    "html": "<script>alert(1)</script>",
    "path": "../../../../etc/passwd",
    "json-in-text": '{"role": "system", "content": "x"}',
    "event-stream-in-text": "data: [DONE]\n\ndata: {}",
    "log-forging": "hi\nERROR request 1 failed",
}

HARMLESS = {
    "all-null": dict.fromkeys(("n", "temperature", "top_p", "stop", "seed", "stream", "user")),
    "zero-temperature": {"temperature": 0},
    "largest-temperature": {"temperature": 100},
    "tiny-temperature": {"temperature": 5e-324},
    "tiny-top-p": {"top_p": 5e-324},
    "negative-zero": {"temperature": -0.0, "presence_penalty": -0.0},
    "largest-seed": {"seed": 2**63 - 1},
    "smallest-seed": {"seed": -(2**63)},
    "largest-top-k": {"top_k": 2**31 - 1},
    "n-8": {"n": 8},
    "stop-at-its-limits": {"stop": [chr(65 + i) * 256 for i in range(16)]},
    "stop-with-regex-text": {"stop": ["(a+)+$", ".*", "\\"]},
    "stop-with-nul": {"stop": "\u0000"},
    "bias-at-its-limits": {"logit_bias": {str(i): 100 for i in range(256)}},
    "bias-with-leading-zeros": {"logit_bias": {"0005": 1}},
    "empty-lists": {"stop": [], "stop_token_ids": [], "logit_bias": {}},
    "all-penalties": {
        "presence_penalty": 2,
        "frequency_penalty": -2,
        "repetition_penalty": 100,
        "min_p": 1,
    },
    "streamed": {"stream": True, "stream_options": {"include_usage": True}},
    "streamed-twice": {"stream": True, "n": 2},
}


def accepted() -> Iterator[Case]:
    for name, text in TEXTS.items():
        messages = [{"role": "user", "content": text}]
        yield CHAT_ENDPOINT.accepted(f"accepts-{name}", messages=messages)
        yield COMPLETION_ENDPOINT.accepted(f"accepts-{name}", prompt=text)
    for endpoint in ENDPOINTS:
        for name, fields in HARMLESS.items():
            yield endpoint.accepted(f"accepts-{name}", **fields)
        body = endpoint.body().decode()
        yield endpoint.case("accepts-spaces-around", f" \r\n\t{body}\n ".encode(), 200)
        yield endpoint.case("accepts-escaped-keys", body.replace("max", "\\u006dax").encode(), 200)
        # As in every other JSON reader, the last of two equal keys counts.
        last = b'{"max_tokens": "x",' + body[1:].encode()
        yield endpoint.case("accepts-duplicate-key-good-one-last", last, 200)
        yield endpoint.case(
            "duplicate-key-bad-one-last", body[:-1].encode() + b',"max_tokens":"x"}'
        )
    parts = [{"type": "text", "text": "a"}] * 100
    two = [{"role": "developer", "content": parts}, {"role": "assistant", "content": ""}]
    yield CHAT_ENDPOINT.accepted("accepts-100-parts", messages=two)
    many = [{"role": "user", "content": ""}] * 100
    yield CHAT_ENDPOINT.accepted("accepts-100-empty-messages", messages=many)
    yield COMPLETION_ENDPOINT.accepted("accepts-64-prompts", prompt=["a"] * 64)
    yield COMPLETION_ENDPOINT.accepted("accepts-token-id-0", prompt=[0])
    bare = {"prompt": [[1, 2], [3]], "max_tokens": MAX_TOKENS, "logprobs": 20}
    yield COMPLETION_ENDPOINT.accepted("accepts-20-logprobs", **bare)
    scored = {**bare, "echo": True, "prompt_logprobs": 20, "n": 2}
    yield COMPLETION_ENDPOINT.accepted("accepts-20-prompt-logprobs", **scored)
    yield COMPLETION_ENDPOINT.accepted("accepts-0-tokens", **{**scored, "max_tokens": 0})


def json_cases() -> list[Case]:
    return [*broken(), *nested(), *large(), *compressed(), *accepted()]
