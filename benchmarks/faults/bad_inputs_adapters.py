"""Bad inputs: the endpoints that read other APIs as conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.faults.cases import MAX_TOKENS, Case

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
USER: Any = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": ""}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}

RESPONSE_FIELDS: dict[str, dict[str, Any]] = {
    "input-a-number": {"input": 5},
    "input-an-object": {"input": USER},
    "input-empty": {"input": []},
    "input-of-a-number": {"input": [5]},
    "input-of-null": {"input": [None]},
    "input-of-4097-items": {"input": [{}] * 4097},
    "input-of-2100-messages": {"input": [USER] * 2100},
    "item-without-a-role": {"input": [{"content": "a"}]},
    "item-of-no-type": {"input": [{"type": "thing"}]},
    "item-of-a-list-type": {"input": [{"type": ["message"], "role": "user", "content": "a"}]},
    "item-reference": {"input": [{"type": "item_reference", "id": "msg_1"}]},
    "image": {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
    "image-of-a-file": {
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}],
            }
        ]
    },
    "file": {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
    "content-of-a-number": {"input": [{"role": "user", "content": [5]}]},
    "arguments-not-json": {"input": [USER, {**CALL, "arguments": "{"}]},
    "arguments-an-object": {"input": [USER, {**CALL, "arguments": {}}]},
    "arguments-nested": {"input": [USER, {**CALL, "arguments": '{"a":' * 999}]},
    "call-id-a-number": {"input": [USER, {**CALL, "call_id": 5}]},
    "output-of-no-call": {"input": [{**OUTPUT, "call_id": "x"}]},
    "output-a-number": {"input": [USER, CALL, {**OUTPUT, "output": 5}]},
    "reasoning-of-a-number": {"input": [{"type": "reasoning", "content": 5}]},
    "tools-a-text": {"tools": "all"},
    "tools-of-null": {"tools": [None]},
    "tools-of-no-type": {"tools": [{"name": "f"}]},
    "129-tools": {"tools": [{"type": "web_search"}] * 129},
    "tool-with-a-bad-schema": {
        "tools": [{"type": "function", "name": "f", "parameters": {"not": {}}}]
    },
    "custom-tool-with-a-grammar": {
        "tools": [{"type": "custom", "name": "f", "format": {"type": "grammar"}}]
    },
    "tool-choice-a-number": {"tool_choice": 5},
    "tool-choice-hosted": {"tools": [{"type": "mcp"}], "tool_choice": {"type": "mcp"}},
    "allowed-tools-a-number": {
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": 5}
    },
    "text-a-text": {"text": "json"},
    "format-of-no-type": {"text": {"format": {"type": "xml"}}},
    "format-of-no-schema": {"text": {"format": {"type": "json_schema", "name": "a"}}},
    "include-a-number": {"include": [5]},
    "include-33": {"include": ["reasoning.encrypted_content"] * 33},
    "metadata-of-a-number": {"metadata": {"a": 1}},
    "client-metadata-a-text": {"client_metadata": "a"},
    "max-output-tokens-0": {"max_output_tokens": 0},
    "max-output-tokens-huge": {"max_output_tokens": 10**18},
    "max-tokens": {"max_tokens": 5},
    "previous-response": {"previous_response_id": "resp_1"},
    "conversation": {"conversation": "conv_1"},
    "messages": {"messages": [USER]},
}
MESSAGE_FIELDS: dict[str, dict[str, Any]] = {
    "messages-empty": {"messages": []},
    "messages-a-text": {"messages": "hi"},
    "messages-of-null": {"messages": [None]},
    "messages-2049": {"messages": [USER] * 2049},
    "role-system": {"messages": [{"role": "system", "content": "a"}]},
    "role-a-list": {"messages": [{"role": ["user"], "content": "a"}]},
    "content-null": {"messages": [{"role": "user", "content": None}]},
    "content-empty": {"messages": [{"role": "user", "content": []}]},
    "content-of-a-number": {"messages": [{"role": "user", "content": [5]}]},
    "image": {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    "document": {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
    "tool-use-of-the-user": {"messages": [{"role": "user", "content": [USE]}]},
    "tool-use-at-the-end": {"messages": [USER, {"role": "assistant", "content": [USE]}]},
    "tool-use-input-a-text": {
        "messages": [{"role": "assistant", "content": [{**USE, "input": "{}"}]}, USER]
    },
    "tool-use-without-a-name": {
        "messages": [{"role": "assistant", "content": [{**USE, "name": None}]}, USER]
    },
    "tool-result-of-no-call": {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]
    },
    "system-a-number": {"system": 5},
    "system-an-image": {"system": [{"type": "image"}]},
    "tools-a-text": {"tools": "all"},
    "tools-of-null": {"tools": [None]},
    "tool-of-the-server": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "tool-without-a-schema": {"tools": [{"name": "f"}]},
    "tool-of-a-number-type": {"tools": [{"type": 5, "name": "f", "input_schema": {}}]},
    "tool-choice-a-text": {"tool_choice": "auto"},
    "tool-choice-of-no-type": {"tool_choice": {"type": "thing"}},
    "tool-choice-without-tools": {"tool_choice": {"type": "any"}},
    "thinking-a-text": {"thinking": "disabled"},
    "thinking-without-a-budget": {"thinking": {"type": "enabled"}},
    "output-config-of-no-schema": {"output_config": {"format": {"type": "json_schema"}}},
    "cache-control-a-text": {"cache_control": "ephemeral"},
    "unknown-field": {"no_such_field": 1},
}
GENERATING_ONLY: dict[str, dict[str, Any]] = {
    "tool-with-a-bad-schema": {"tools": [{"name": "f", "input_schema": {"not": {}}}]},
    "max-tokens-missing": {"max_tokens": None},
    "max-tokens-0": {"max_tokens": 0},
    "max-tokens-huge": {"max_tokens": 10**18},
    "stop-sequences-a-text": {"stop_sequences": "x"},
    "17-stop-sequences": {"stop_sequences": ["x"] * 17},
    "an-empty-stop-sequence": {"stop_sequences": [""]},
    "metadata-of-a-name": {"metadata": {"name": "x"}},
    "temperature-a-text": {"temperature": "1"},
    "n": {"n": 2},
}


def _cases(
    path: str, name: str, required: dict[str, Any], fields: dict[str, Any]
) -> Iterator[Case]:
    for about, given in fields.items():
        body = json.dumps({**required, **given}).encode()
        yield Case(f"{name}-{about}", (400,), path=path, body=body)
    yield Case(f"{name}-ok", (200,), path=path, body=json.dumps(required).encode())
    for about, text in (("empty", b""), ("a-list", b"[]"), ("nan", b'{"temperature": NaN}')):
        yield Case(f"{name}-body-is-{about}", (400,), path=path, body=text)
    unknown = json.dumps({**required, "model": "no-such-model"}).encode()
    yield Case(f"{name}-unknown-model", (404,), path=path, body=unknown)
    yield Case(f"{name}-get", (405,), method="GET", path=path)
    plain = (("Content-Type", "text/plain"),)
    yield Case(f"{name}-as-text", (415,), path=path, headers=plain, body=b"{}")


def adapter_cases() -> list[Case]:
    response = {"input": "hi", "max_output_tokens": MAX_TOKENS}
    prompt: dict[str, Any] = {"messages": [USER]}
    message = {**prompt, "max_tokens": MAX_TOKENS}
    return [
        *_cases(RESPONSES, "responses", response, RESPONSE_FIELDS),
        *_cases(MESSAGES, "messages", message, MESSAGE_FIELDS | GENERATING_ONLY),
        *_cases(COUNT, "count-tokens", prompt, MESSAGE_FIELDS),
    ]
