"""Text to token ids and back over HTTP."""

from __future__ import annotations

import pytest

from tests.support.apps import check_error, serving
from tests.support.local_engine import TEMPLATE

MESSAGES = [{"role": "user", "content": "hi"}]


async def test_a_prompt_there_and_back(local, tokenizer) -> None:
    async with serving(local) as made:
        answer = (await made.public.post("/tokenize", json={"prompt": "hi 12 \u4f60"})).json()
        tokens = tokenizer.encode("hi 12 \u4f60")
        assert answer == {
            "count": len(tokens),
            "max_model_len": 200,
            "tokens": tokens,
            "token_strs": None,
        }
        back = await made.public.post("/detokenize", json={"tokens": tokens, "model": "tiny"})
        assert back.json() == {"prompt": "hi 12 \u4f60"}
        empty = await made.public.post("/detokenize", json={"tokens": []})
        assert empty.json() == {"prompt": ""}


async def test_a_chat_has_as_many_tokens_as_its_completion_says(local) -> None:
    assert "add_generation_prompt" not in TEMPLATE
    async with serving(local) as made:
        counted = (await made.public.post("/tokenize", json={"messages": MESSAGES})).json()
        answered = await made.public.post("/v1/chat/completions", json={"messages": MESSAGES})
        assert counted["count"] == answered.json()["usage"]["prompt_tokens"]
        assert counted["tokens"] == list(made.process.added[0].token_ids)


async def test_the_spelling_of_tokens(local) -> None:
    async with serving(local) as made:
        body = {"prompt": "hi there", "return_token_strs": True, "add_special_tokens": False}
        answer = (await made.public.post("/tokenize", json=body)).json()
        assert "".join(answer["token_strs"]) == "hi there"
        assert len(answer["token_strs"]) == answer["count"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        (
            "/tokenize",
            {"messages": [{"role": "tool", "content": "x"}]},
            400,
            "messages[0].tool_call_id",
        ),
        ("/tokenize", {"prompt": "x" * 60_000}, 400, "prompt"),
        ("/tokenize", {"messages": [{**MESSAGES[0], "content": "x" * 60_000}]}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, 400, "tokens"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [275]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1] * 201}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "skip": True}, 400, "skip"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_refusals(local, path, body, status, param) -> None:
    async with serving(local) as made:
        error = check_error(await made.public.post(path, json=body), status)
        assert error["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_before_the_model_is_loaded(local, path) -> None:
    async with serving(local, is_started=False) as made:
        check_error(await made.public.post(path, json={"prompt": "x"}), 503)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_only_json_is_read(local, path) -> None:
    async with serving(local, max_body_bytes=100) as made:
        check_error(await made.public.post(path, content=b"{}"), 415)
        check_error(await made.public.post(path, json={"prompt": "x" * 200}), 413)
