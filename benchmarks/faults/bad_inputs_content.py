"""Bad inputs: malformed prompts and messages, and unsupported fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.faults.cases import CHAT_ENDPOINT, COMPLETION_ENDPOINT, ENDPOINTS, Case

EVIL_PATTERN = "^(((a+)+)+)+$"
EVIL_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": EVIL_PATTERN}}}
METADATA_ADDRESS = "http://169.254.169.254/latest/meta-data/"

UNKNOWN_FIELDS: dict[str, Any] = {
    "chat_template": "{{ ''.__class__.__mro__ }}",
    "chat_template_kwargs": {"chat_template": "{{ 7*7 }}"},
    "prompt_embeds": "gASVAAAAAAAAAAA=",
    "input_embeds": [[0.1, 0.2]],
    "guided_json": EVIL_SCHEMA,
    "guided_regex": EVIL_PATTERN,
    "guided_grammar": "root ::= root root",
    "guided_choice": ["a", "b"],
    "structured_outputs": {"regex": "(?=a)"},
    "structural_tag": {"structures": []},
    "regex": EVIL_PATTERN,
    "prompt_logprobs": 10**9,
    "truncate_prompt_tokens": -1,
    "add_generation_prompt": "maybe",
    "continue_final_message": True,
    "add_special_tokens": True,
    "documents": [{"title": "a", "text": "b"}],
    "mm_processor_kwargs": {"num_crops": 10**9},
    "images": [METADATA_ADDRESS],
    "image_data": METADATA_ADDRESS,
    "media_io_kwargs": {"video": {"num_frames": 10**9}},
    "bad_words": "a",
    "allowed_token_ids": [10**9],
    "use_beam_search": True,
    "length_penalty": 1.0,
    "logits_processors": ["os.system"],
    "request_id": "../../etc/passwd",
    "cache_salt": "x",
    "kv_transfer_params": {"remote_host": "127.0.0.1"},
    "vllm_xargs": {"a": 1},
    "return_tokens_as_token_ids": True,
    "spaces_between_special_tokens": False,
    "lora_path": "/etc/passwd",
    "extra_body": {"n": 10**9},
    "input": "hi",
    "max_output_tokens": 5,
    "__class__": "x",
    "__proto__": {"n": 1},
    "constructor": {"prototype": {}},
    "model_config": {},
    "unsupported": {},
    "Temperature": 1,
    "temperature ": 1,
    "": 1,
    "a\u0000b": 1,
    "\U0001f600": 1,
    "x" * 50_000: 1,
}

FUNCTION = {"name": "f", "parameters": EVIL_SCHEMA}
NAMED_SCHEMA = {"name": "s", "schema": EVIL_SCHEMA}
UNSUPPORTED_CHAT: dict[str, list[Any]] = {
    "functions": [[FUNCTION], {}, "f"],
    "function_call": ["auto", {"name": "f"}, 0],
    "response_format": [
        {"type": "json_schema", "json_schema": {"name": "s"}},
        {"type": "regex", "pattern": EVIL_PATTERN},
        {"type": "text", "extra": 1},
        {"type": None},
        "json",
        [],
    ],
    "audio": [{"voice": "alloy", "format": "wav"}, {}],
    "modalities": [["text", "audio"], ["audio"], [], "text"],
    "metadata": [{"a": 1}, [], "x"],
    "moderation": [{}],
    "prediction": [{"type": "content", "content": "x"}],
    "prompt_cache_key": [5, {}],
    "prompt_cache_options": [{}],
    "prompt_cache_retention": ["24h"],
    "reasoning_effort": ["high", "minimal", 5],
    "service_tier": ["flex", "priority", 1],
    "store": [0, "no"],
    "verbosity": ["low", "high", 5],
    "web_search_options": [{}, {"search_context_size": "high"}],
}
UNSUPPORTED_COMPLETION: dict[str, list[Any]] = {
    "echo": [True, 0, "no", [], {}],
    "suffix": ["end", 5, [], {}],
    "tools": [[{"type": "function"}]],
    "response_format": [{"type": "regex", "pattern": EVIL_PATTERN}],
    "messages": [[{"role": "user", "content": "hi"}]],
    "top_logprobs": [5],
    "max_completion_tokens": [5],
}

PARTS: dict[str, Any] = {
    "image_url-metadata-address": {"type": "image_url", "image_url": {"url": METADATA_ADDRESS}},
    "image_url-file": {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    "image_url-data": {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}},
    "image_url-backslash-host": {"type": "image_url", "image_url": {"url": "http://a\\@127.0.0.1"}},
    "image_url-text": {"type": "image_url", "image_url": "http://127.0.0.1:1"},
    "image_embeds": {"type": "image_embeds", "image_embeds": "gASV"},
    "image_pil": {"type": "image_pil", "image_pil": "x"},
    "input_image": {"type": "input_image", "image_url": METADATA_ADDRESS},
    "input_audio": {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
    "audio_url": {"type": "audio_url", "audio_url": {"url": METADATA_ADDRESS}},
    "video_url": {"type": "video_url", "video_url": {"url": METADATA_ADDRESS}},
    "file": {"type": "file", "file": {"file_id": "../../etc/passwd"}},
    "file-data": {"type": "file", "file": {"filename": "a", "file_data": "data:,x"}},
    "refusal": {"type": "refusal", "refusal": "no"},
    "input_text": {"type": "input_text", "text": "x"},
    "thinking": {"type": "thinking", "thinking": "x"},
    "no-type": {"text": "x"},
    "a-null-type": {"type": None, "text": "x"},
    "a-type-that-is-a-list": {"type": ["text"], "text": "x"},
    "a-type-that-is-a-long-string": {"type": "x" * 30_000},
    "a-type-that-is-a-long-list": {"type": [0] * 10_000},
    "a-type-in-capitals": {"type": "TEXT", "text": "x"},
    "text-missing": {"type": "text"},
    "text-null": {"type": "text", "text": None},
    "text-a-number": {"type": "text", "text": 5},
    "text-a-list": {"type": "text", "text": ["x"]},
    "text-with-another-key": {"type": "text", "text": "x", "cache_control": {}},
    "text-with-an-image": {"type": "text", "text": "x", "image_url": {"url": "x"}},
    "a-string": "x",
    "null": None,
    "a-number": 5,
    "a-list": [{"type": "text", "text": "x"}],
    "empty": {},
}

MESSAGES: dict[str, Any] = {
    "messages-null": None,
    "messages-empty": [],
    "messages-a-string": "hi",
    "messages-a-number": 5,
    "messages-an-object": {"role": "user", "content": "hi"},
    "messages-of-strings": ["hi"],
    "messages-of-numbers": [1],
    "messages-of-null": [None],
    "messages-of-lists": [[{"role": "user", "content": "hi"}]],
    "messages-empty-object": [{}],
    "messages-second-is-bad": [{"role": "user", "content": "hi"}, {"role": "user"}],
    "messages-last-of-500-is-bad": [{"role": "user", "content": "hi"}] * 499 + [{"role": "x"}],
}
ROLES = ("", "tool", "function", "USER", "user ", "root", "user\u0000", "\u0443ser", "x" * 10_000)
MESSAGE_FIELDS: dict[str, Any] = {
    "role-missing": {"content": "hi"},
    "role-null": {"role": None, "content": "hi"},
    "role-a-number": {"role": 5, "content": "hi"},
    "role-a-list": {"role": ["user"], "content": "hi"},
    "role-an-object": {"role": {"a": 1}, "content": "hi"},
    "content-missing": {"role": "user"},
    "long-unknown-key": {"role": "user", "content": "hi", "x" * 50_000: 1},
    "name-a-long-list": {"role": "user", "content": "hi", "name": [0] * 20_000},
    "role-a-long-list": {"role": [0] * 20_000, "content": "hi"},
    "content-null": {"role": "user", "content": None},
    "content-a-number": {"role": "user", "content": 5},
    "content-true": {"role": "user", "content": True},
    "content-an-object": {"role": "user", "content": {"type": "text", "text": "hi"}},
    "content-an-empty-list": {"role": "user", "content": []},
    "content-null-of-assistant": {"role": "assistant", "content": None},
    "name-a-number": {"role": "user", "content": "hi", "name": 5},
    "name-a-list": {"role": "user", "content": "hi", "name": ["a"]},
    "unknown-key": {"role": "user", "content": "hi", "mood": "good"},
    "prefix": {"role": "assistant", "content": "hi", "prefix": True},
    "tool_calls": {"role": "assistant", "content": "hi", "tool_calls": [{"id": "a"}]},
    "tool_calls-an-object": {"role": "assistant", "content": "hi", "tool_calls": {}},
    "tool_call_id": {"role": "user", "content": "hi", "tool_call_id": "a"},
    "function_call": {"role": "assistant", "content": "hi", "function_call": {"name": "f"}},
    "message-audio": {"role": "assistant", "content": "hi", "audio": {"id": "a"}},
    "refusal-given": {"role": "assistant", "content": "hi", "refusal": "no"},
}

PROMPTS: dict[str, Any] = {
    "null": None,
    "empty-string": "",
    "empty-list": [],
    "list-with-an-empty-list": [[]],
    "list-with-an-empty-string": [""],
    "an-empty-string-among-others": ["a", ""],
    "an-empty-list-among-others": [[1], []],
    "a-number": 5,
    "true": True,
    "an-object": {"text": "hi"},
    "an-object-with-embeddings": {"prompt_embeds": "x"},
    "list-of-null": [None],
    "list-of-objects": [{"text": "hi"}],
    "text-and-ids": ["a", 1],
    "ids-and-text": [1, "a"],
    "text-and-id-lists": ["a", [1]],
    "id-lists-and-text": [[1], "a"],
    "lists-of-text": [["a"]],
    "three-levels": [[[1]]],
    "id-negative": [-1],
    "id-negative-in-list": [[1], [-1]],
    "id-min-int64": [-(2**63)],
    "id-beyond-any-vocabulary": [10_000_000],
    "id-2-to-the-31": [2**31],
    "id-2-to-the-32": [2**32],
    "id-2-to-the-63": [2**63],
    "id-2-to-the-64": [2**64],
    "id-of-a-thousand-digits": [10**1000],
    "id-true": [True],
    "id-false-in-list": [[1, False]],
    "id-a-fraction": [1.5],
    "id-a-whole-float": [1.0],
    "id-a-string-of-digits": [["1"]],
    "id-null": [1, None],
    "30000-ids": [1] * 30_000,
    "text-of-90000-digits": "1234567890" * 9000,
    "second-prompt-too-long": ["a", "1234567890" * 9000],
}


def unknown_and_unsupported() -> Iterator[Case]:
    for endpoint in ENDPOINTS:
        for name, value in UNKNOWN_FIELDS.items():
            label = ascii(name)[1:-1][:40] or "empty-name"
            yield endpoint.refused(f"unknown-field-{label}", **{name: value})
        for place, endless in enumerate(("/etc/passwd", "no-such-model", "", "fake\u0000", "../x")):
            yield endpoint.case(f"unknown-model-{place}", endpoint.body(model=endless), 404)
        yield endpoint.case("unknown-model-huge", endpoint.body(model="m" * 50_000), 404)
    for endpoint, table in zip(ENDPOINTS, (UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION), strict=True):
        for name, values in table.items():
            for place, value in enumerate(values):
                yield endpoint.refused(f"unsupported-{name}-{place}", **{name: value})


def messages() -> Iterator[Case]:
    chat = CHAT_ENDPOINT
    for name, value in MESSAGES.items():
        yield chat.refused(name, messages=value)
    for name, message in MESSAGE_FIELDS.items():
        yield chat.refused(f"message-{name}", messages=[message])
    for role in ROLES:
        name = f"message-role-is-{ascii(role)[1:-1][:20] or 'empty'}"
        yield chat.refused(name, messages=[{"role": role, "content": "hi"}])
    for name, part in PARTS.items():
        yield chat.refused(f"part-{name}", messages=[{"role": "user", "content": [part]}])
        good = {"type": "text", "text": "hi"}
        late = {"role": "user", "content": [good, part]}
        yield chat.refused(f"part-{name}-after-a-good-one", messages=[late])
    long = {"role": "user", "content": "1234567890" * 9000}
    yield chat.refused("content-of-90000-digits", messages=[long])
    turns = [{"role": "user", "content": "1234567890" * 100}] * 85
    yield chat.refused("85-messages-of-1000-digits", messages=turns)
    yield chat.case("without-messages", b"{}")
    yield chat.case("with-a-prompt-instead", b'{"prompt": "hi"}')


def prompts() -> Iterator[Case]:
    completion = COMPLETION_ENDPOINT
    for name, value in PROMPTS.items():
        yield completion.refused(f"prompt-{name}", prompt=value)
    yield completion.case("without-prompt", b"{}")
    yield completion.case("with-messages-instead", b'{"messages": []}')


TOKENIZE: dict[str, Any] = {
    "empty-object": {},
    "prompt-null": {"prompt": None},
    "prompt-a-number": {"prompt": 5},
    "prompt-a-list": {"prompt": ["a"]},
    "prompt-token-ids": {"prompt": [1, 2]},
    "prompt-and-messages": {"prompt": "a", "messages": [{"role": "user", "content": "a"}]},
    "messages-empty": {"messages": []},
    "messages-a-string": {"messages": "a"},
    "messages-of-an-image": {"messages": [{"role": "user", "content": [PARTS["image_url-file"]]}]},
    "messages-of-a-tool": {"messages": [{"role": "tool", "content": "a"}]},
    "flag-a-number": {"prompt": "a", "add_special_tokens": 1},
    "flag-a-string": {"prompt": "a", "return_token_strs": "yes"},
    "unknown-field": {"prompt": "a", "no_such_field": 1},
    "chat_template": {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ 1 }}"},
    "tools": {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
}
DETOKENIZE: dict[str, Any] = {
    "empty-object": {},
    "tokens-null": {"tokens": None},
    "tokens-a-number": {"tokens": 5},
    "tokens-a-string": {"tokens": "5"},
    "id-negative": {"tokens": [-1]},
    "id-beyond-any-vocabulary": {"tokens": [10_000_000]},
    "id-2-to-the-64": {"tokens": [2**64]},
    "id-of-a-thousand-digits": {"tokens": [10**1000]},
    "id-true": {"tokens": [True]},
    "id-a-fraction": {"tokens": [1.5]},
    "id-a-string": {"tokens": ["1"]},
    "id-a-list": {"tokens": [[1]]},
    "30000-ids": {"tokens": [1] * 30_000},
    "unknown-field": {"tokens": [1], "prompt": "a"},
}


def tokens() -> Iterator[Case]:
    for path, table in (("/tokenize", TOKENIZE), ("/detokenize", DETOKENIZE)):
        for name, fields in table.items():
            body = json.dumps(fields).encode()
            yield Case(f"{path[1:]}-{name}", (400,), path=path, body=body)
        model = json.dumps({"prompt": "a", "tokens": [1], "model": "no-such-model"}).encode()
        yield Case(f"{path[1:]}-model-and-a-field-too-many", (400,), path=path, body=model)
        yield Case(f"{path[1:]}-get", (405,), method="GET", path=path)
        plain = (("Content-Type", "text/plain"),)
        yield Case(f"{path[1:]}-as-text", (415,), path=path, headers=plain, body=b"{}")
        for name, body in (("empty", b""), ("a-list", b"[]"), ("nan", b'{"tokens": [NaN]}')):
            yield Case(f"{path[1:]}-body-is-{name}", (400,), path=path, body=body)
        deep = b'{"tokens": ' + b"[" * 1000 + b"]" * 1000 + b"}"
        yield Case(f"{path[1:]}-1000-lists", (400,), path=path, body=deep)
    unknown = b'{"prompt": "a", "model": "no-such-model"}'
    yield Case("tokenize-unknown-model", (404,), path="/tokenize", body=unknown)


def content_cases() -> list[Case]:
    return [*unknown_and_unsupported(), *messages(), *prompts(), *tokens()]
