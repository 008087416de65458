"""Small fields and routes of vLLM and of everyday clients."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headway.server.http import sse
from headway.tenancy.keys import digest_of, write_digest
from tests.server.api.test_streams import Reader
from tests.support.apps import FIXED_ID, check_error, serving

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
LAST = [*MESSAGES, {"role": "assistant", "content": "so far"}]


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [
        line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")
    ]
    return [json.loads(line) for line in lines]


async def prompt_of(made: Any, **fields: Any) -> str:
    """The prompt that the engine got for a chat."""
    response = await made.public.post(CHAT, json={"messages": MESSAGES, **fields})
    assert response.status_code == 200, response.text
    return made.engine.tokenizer.decode(made.process.added[-1].token_ids)


async def test_the_last_message_can_be_continued(local) -> None:
    async with serving(local) as made:
        assert await prompt_of(made, messages=LAST) == "[user]hi[assistant]so far"
        fields = {"messages": LAST, "continue_final_message": True}
        assert await prompt_of(made, **fields) == "[user]hi[assistant]so far"
        for more in ({"add_generation_prompt": True}, {"messages": MESSAGES}):
            response = await made.public.post(CHAT, json={**fields, **more})
            assert check_error(response, 400)["param"] == "continue_final_message"


async def test_template_variables_have_a_guard(local) -> None:
    async with serving(local) as made:
        await prompt_of(made, chat_template_kwargs={"enable_thinking": False, "x": [1, {"y": 2}]})
        for name in ("messages", "tokenize", "chat_template", "add_generation_prompt"):
            fields = {"messages": MESSAGES, "chat_template_kwargs": {name: True}}
            error = check_error(await made.public.post(CHAT, json=fields), 400)
            assert error["param"] == "chat_template_kwargs" and name in error["message"]


async def test_a_prompt_can_be_truncated(local) -> None:
    async with serving(local) as made:
        await prompt_of(made)
        whole = made.process.added[-1].token_ids
        await prompt_of(made, truncate_prompt_tokens=3)
        assert made.process.added[-1].token_ids == whole[-3:]
        fields = {"prompt": ["abcdef", "ab"], "truncate_prompt_tokens": 4}
        assert (await made.public.post(COMPLETIONS, json=fields)).status_code == 200
        sent = [made.engine.tokenizer.decode(one.token_ids) for one in made.process.added[-2:]]
        assert sent == ["cdef", "ab"]


async def test_token_ids_are_returned(local) -> None:
    async with serving(local, "abc") as made:
        ids = made.engine.tokenizer.encode("abc", False)
        prompt = made.engine.tokenizer.encode("x", False)
        asked = {"prompt": "x", "return_token_ids": True, "n": 2}
        answer = (await made.public.post(COMPLETIONS, json=asked)).json()
        for choice in answer["choices"]:
            assert choice["prompt_token_ids"] == prompt and choice["token_ids"][:3] == ids
        streamed = (await made.public.post(COMPLETIONS, json={**asked, "stream": True})).text
        for index in (0, 1):
            choices = [one["choices"][0] for one in events_of(streamed)]
            choices = [one for one in choices if one["index"] == index]
            assert [one.get("prompt_token_ids") for one in choices].count(prompt) == 1
            assert [token for one in choices for token in one["token_ids"]][:3] == ids
        asked = {"messages": MESSAGES, "return_token_ids": True}
        answer = (await made.public.post(CHAT, json=asked)).json()
        assert answer["prompt_token_ids"] == list(made.process.added[-1].token_ids)
        assert answer["choices"][0]["token_ids"][:3] == ids
        streamed = await made.public.post(CHAT, json={**asked, "stream": True})
        first, *rest = events_of(streamed.text)
        assert first["prompt_token_ids"] == answer["prompt_token_ids"]
        assert not any("prompt_token_ids" in one for one in rest)


async def test_usage_in_every_chunk(local) -> None:
    async with serving(local, "abc") as made:
        options = {"include_usage": True, "continuous_usage_stats": True}
        asked = {"prompt": "xy", "stream": True, "stream_options": options}
        events = events_of((await made.public.post(COMPLETIONS, json=asked)).text)
        counts = [one["usage"]["completion_tokens"] for one in events]
        assert counts == sorted(counts) and 0 < counts[0] < counts[-1] == 4
        asked["stream_options"] = {"continuous_usage_stats": True}
        error = check_error(await made.public.post(COMPLETIONS, json=asked), 400)
        assert error["param"] == "stream_options.continuous_usage_stats"


async def test_answers_say_what_was_not_done(local) -> None:
    async with serving(local) as made:
        asked = {
            "messages": MESSAGES,
            "store": True,
            "service_tier": "auto",
            "metadata": {"a": "b"},
        }
        answer = (await made.public.post(CHAT, json=asked)).json()
        assert (answer["store"], answer["service_tier"]) == (False, "default")
        plain = (await made.public.post(CHAT, json={"messages": MESSAGES})).json()
        assert "store" not in plain and "service_tier" not in plain
        for metadata in ({"a": 1}, {"a" * 65: "b"}, {str(at): "" for at in range(17)}, "x"):
            response = await made.public.post(CHAT, json={**asked, "metadata": metadata})
            assert check_error(response, 400)["param"] == "metadata"


async def test_routes_of_vllm(local) -> None:
    async with serving(local) as made:
        assert (await made.public.get("/ping")).status_code == 200
        assert (await made.public.get("/load")).json() == {"server_load": 0}
        info = (await made.public.get("/tokenizer_info")).json()
        assert info["eos_token_ids"] == list(made.engine.tokenizer.eos_token_ids)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_is_cancelled_by_its_client_only(local, tmp_path, is_stream) -> None:
    path = tmp_path / "tenants.yaml"
    lines = [f"  {name}: {{keys: ['{write_digest(digest_of(name.encode()))}']}}" for name in "ab"]
    path.write_text("\n".join(["tenants:", *lines]))
    async with serving(local, "a" * 100, tenants_file=str(path)) as made:
        made.process.is_paused = True
        more = {"authorization": "Bearer a", "x-request-id": "mine"}
        asked = {"prompt": "x", "max_tokens": 100, "stream": is_stream}
        reader = Reader(made.apps.public, COMPLETIONS, asked, **more)
        while not made.process.added:
            await asyncio.sleep(0.01)
        for key, name, status in (("b", "mine", 404), ("a", "other", 404), ("a", "mine", 200)):
            response = await made.public.delete(
                f"/v1/requests/{name}", headers={"Authorization": f"Bearer {key}"}
            )
            assert response.status_code == status, response.text
        assert response.json() == {"id": f"cmpl-{FIXED_ID}", "object": "request", "cancelled": True}
        await reader.task
        assert reader.status == 409 and b"request_cancelled" in reader.body
        assert made.engine.num_requests == 0
        again = await made.public.delete("/v1/requests/mine", headers={"Authorization": "Bearer a"})
        assert again.status_code == 404


async def test_a_stream_that_waits_gets_comments(local, monkeypatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(sse.begin, "__defaults__", (0.05,))
    async with serving(local, "abc") as made:
        made.process.is_paused = True
        reader = Reader(made.apps.public, COMPLETIONS, {"prompt": "x", "stream": True})
        while reader.body.count(sse.KEEP_ALIVE) < 3:
            await asyncio.sleep(0.01)
        assert reader.status == 200
        made.process.is_paused = False
        made.process._wake.set()
        await reader.task
        text = "".join(one["choices"][0]["text"] for one in events_of(reader.body.decode()))
        assert text == "abc" and reader.body.endswith(sse.DONE)


async def test_an_error_after_a_comment_is_an_event(local, monkeypatch) -> None:
    monkeypatch.setattr(sse.begin, "__defaults__", (0.05,))
    async with serving(local, [None]) as made:
        made.process.is_paused = True
        reader = Reader(made.apps.public, COMPLETIONS, {"prompt": "x", "stream": True})
        while sse.KEEP_ALIVE not in reader.body:
            await asyncio.sleep(0.01)
        made.process.is_paused = False
        made.process._wake.set()
        await reader.task
        assert reader.status == 200 and b'"error"' in reader.body
        assert reader.body.endswith(sse.DONE)


async def test_a_cache_salt_separates_prefixes(local) -> None:
    async with serving(local) as made:
        num_cached = []
        for salt in (None, None, "a", "b", "a"):
            body = {"prompt": "a prompt of several blocks", "cache_salt": salt}
            answer = (await made.public.post(COMPLETIONS, json=body)).json()
            num_cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert num_cached == [0, 24, 0, 0, 24]


async def test_an_answer_of_litellm_can_be_sent_back(local) -> None:
    """litellm adds what it does not know of an answer, and sends it back with the conversation."""
    extra = {"provider_specific_fields": {"refusal": None}}
    async with serving(local) as made:
        history = [*MESSAGES, {"role": "assistant", "content": "so", **extra}, *MESSAGES]
        plain = [*MESSAGES, {"role": "assistant", "content": "so"}, *MESSAGES]
        assert await prompt_of(made, messages=history) == await prompt_of(made, messages=plain)
        fields = {"messages": [{**MESSAGES[0], **extra}]}
        error = check_error(await made.public.post(CHAT, json=fields), 400)
        assert error["param"] == "messages[0].provider_specific_fields"
