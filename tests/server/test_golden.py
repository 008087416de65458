"""Streams compared byte for byte with those in tests/golden.

After a change that is meant, run this with UPDATE_GOLDEN=1 and read the difference before keeping
it.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support.apps import serving

FOLDER = ROOT / "tests" / "golden"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
USAGE = {"stream_options": {"include_usage": True}}
EMOJI = [0xF0, 0x9F, 0x98, 0x80]

CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "chat": (CHAT, "abc", MESSAGES),
    "chat-two-samples": (CHAT, "ab", {**MESSAGES, "n": 2, "max_tokens": 2}),
    "chat-logprobs": (CHAT, "ab", {**MESSAGES, "logprobs": True, "top_logprobs": 3}),
    "chat-usage": (CHAT, "ab", {**MESSAGES, **USAGE, "model": "alias/tiny"}),
    "chat-character-of-four-tokens": (CHAT, [*EMOJI, 97], MESSAGES),
    "completions": (COMPLETIONS, "abc", {"prompt": "x"}),
    "completions-logprobs": (COMPLETIONS, "ab", {"prompt": "x", "logprobs": 2}),
    "completions-several-prompts": (COMPLETIONS, "ab", {"prompt": ["x", "yy"], "max_tokens": 2}),
    "completions-usage": (COMPLETIONS, "ab", {"prompt": "x", **USAGE}),
    "completions-stop-string": (COMPLETIONS, "abcdef", {"prompt": "x", "stop": ["cd"]}),
    "error-in-the-middle": (COMPLETIONS, [97, 98, None], {"prompt": "x"}),
}


def test_there_is_a_case_for_every_file() -> None:
    assert {path.stem for path in FOLDER.glob("*.sse")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_has_not_changed(local, name) -> None:
    path, script, body = CASES[name]
    async with serving(local, script) as made:
        response = await made.public.post(path, json={**body, "stream": True})
    assert response.status_code == 200
    file = FOLDER / f"{name}.sse"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_bytes(response.content)
    assert response.content == file.read_bytes()
