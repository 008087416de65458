"""Answers, whole and streamed, over a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from headway.core import invariants

MESSAGES = [{"role": "user", "content": "hi"}]
EMOJI = [0xF0, 0x9F, 0x98, 0x80]  # in the tiny vocabulary, ids below 256 are bytes


def events_of(body: str) -> list[Any]:
    """The payloads of a stream, whose every byte is accounted for."""
    assert body.endswith("data: [DONE]\n\n")
    parts = body.removesuffix("\n\n").split("\n\n")
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]


async def stream(client, path: str, **fields: Any) -> list[Any]:
    response = await client.post(path, json={"stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in response.headers
    return events_of(response.text)


async def test_whole_chat(local) -> None:
    made = await local("hello")
    response = await made.client.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": MESSAGES}
    )
    assert response.status_code == 200
    answer = response.json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    num_prompt = len(made.process.added[0].token_ids)
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": 6,
            "total_tokens": num_prompt + 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    invariants.check_drained(made.process.scheduler)


async def test_chat_stream_transcript(local) -> None:
    made = await local("ab")
    chunks = await stream(
        made.client,
        "/v1/chat/completions",
        messages=MESSAGES,
        max_tokens=2,
        stream_options={"include_usage": True},
    )
    heads = {(chunk.pop("id"), chunk.pop("created"), chunk.pop("model")) for chunk in chunks}
    assert len(heads) == 1
    assert {chunk.pop("object") for chunk in chunks} == {"chat.completion.chunk"}

    def choice(delta: Any, finish_reason: str | None = None) -> dict[str, Any]:
        parts = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {"choices": [parts], "usage": None}

    num_prompt = len(made.process.added[0].token_ids)
    usage = {
        "prompt_tokens": num_prompt,
        "completion_tokens": 2,
        "total_tokens": num_prompt + 2,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert chunks == [
        choice({"role": "assistant", "content": ""}),
        choice({"content": "a"}),
        choice({"content": "b"}, "length"),
        {"choices": [], "usage": usage},
    ]


async def test_without_include_usage_no_chunk_has_usage(local) -> None:
    made = await local("ab")
    chunks = await stream(made.client, "/v1/completions", prompt="x")
    assert all("usage" not in chunk for chunk in chunks)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


async def test_choices_of_several_prompts_are_numbered_by_prompt(local) -> None:
    made = await local("abc")
    body = {"prompt": ["x", "yy", "hi"], "n": 2, "max_tokens": 3}
    answer = (await made.client.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert {choice["text"] for choice in answer["choices"]} == {"abc"}
    assert answer["usage"]["completion_tokens"] == 18
    assert answer["usage"]["prompt_tokens"] == sum(len(r.token_ids) for r in made.process.added)
    assert len({request.id for request in made.process.added}) == 3

    chunks = await stream(made.client, "/v1/completions", **body)
    texts = {index: "" for index in range(6)}
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {index: "abc" for index in range(6)}
    invariants.check_drained(made.process.scheduler)


async def test_every_sample_of_a_chat_stream_has_its_role_and_its_end(local) -> None:
    made = await local("ab")
    chunks = await stream(made.client, "/v1/chat/completions", messages=MESSAGES, n=3)
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "ab"
        assert [choice["finish_reason"] for choice in mine][-1] == "stop"
        assert all("role" not in choice["delta"] for choice in mine[1:])


async def test_tokens_without_text_wait_and_lose_no_logprobs(local) -> None:
    made = await local([*EMOJI, 97])
    chunks = await stream(
        made.client, "/v1/chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=3
    )
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"].get("content") for choice in choices] == ["", "\U0001f600", "a", None]
    entries = [choice["logprobs"] and choice["logprobs"]["content"] for choice in choices]
    assert [len(entry or []) for entry in entries] == [0, 4, 1, 1]
    assert [entry["bytes"] for entry in entries[1]] == [[byte] for byte in EMOJI]
    assert entries[2] == [
        {
            "token": "a",
            "logprob": -0.25,
            "bytes": [97],
            "top_logprobs": [
                {"token": "A", "logprob": -0.125, "bytes": [65]},
                {"token": "B", "logprob": -0.5, "bytes": [66]},
                {"token": "C", "logprob": -9999.0, "bytes": [67]},
            ],
        }
    ]


async def test_completion_logprobs(local) -> None:
    made = await local([97, *EMOJI, 98])
    body = {"prompt": "x", "logprobs": 1, "max_tokens": 6}
    choice = (await made.client.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["text"] == "a\U0001f600b"
    pieces = ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"]
    assert choice["logprobs"] == {
        "tokens": ["a", *pieces, "b"],
        "token_logprobs": [-0.25] * 6,
        "top_logprobs": [{"A": -0.125, name: -0.25} for name in ["a", *pieces, "b"]],
        "text_offset": [0, 1, 1, 1, 1, 2],
    }
    chunks = await stream(made.client, "/v1/completions", **body)
    offsets = [o for c in chunks for o in c["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == choice["logprobs"]["text_offset"]


@pytest.mark.parametrize(
    ("options", "text"), [({}, "ab"), ({"include_stop_str_in_output": True}, "abcd")]
)
async def test_a_stop_string_ends_the_text_and_the_request(local, options, text) -> None:
    made = await local("abcdefgh")
    body = {"prompt": "x", "stop": ["cd", "zz"], "max_tokens": 8, **options}
    answer = (await made.client.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"] == text
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 4
    chunks = await stream(made.client, "/v1/completions", **body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    # The engine lets go a moment later, and the count of ends says stop, not abort.
    for _ in range(50):
        if not made.process.scheduler.requests and b'"stop",model_name="tiny"} 2.0' in (
            made.metrics.render()
        ):
            break
        await asyncio.sleep(0.01)
    invariants.check_drained(made.process.scheduler)
    assert b'finished_reason="stop",model_name="tiny"} 2.0' in made.metrics.render()
    assert b'headway_requests_aborted_total{engine="0",model_name="tiny"} 0.0' in (
        made.metrics.render()
    )


async def test_cached_tokens_are_reported(local) -> None:
    made = await local("ab")
    body = {"prompt": "x" * 21}
    await made.client.post("/v1/completions", json=body)
    usage = (await made.client.post("/v1/completions", json=body)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


async def test_long_input_is_prepared_in_a_thread_with_the_same_result(local) -> None:
    made = await local("ab")
    long = {"prompt": "x", "user": "u" * 5000}
    short = {"prompt": "x"}
    texts = [
        (await made.client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        for body in (long, short)
    ]
    assert texts == ["ab", "ab"]


async def test_a_failed_request_is_an_error_that_tells_no_details(local) -> None:
    made = await local([97, None])
    response = await made.client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text

    response = await made.client.post("/v1/completions", json={"prompt": "x", "stream": True})
    chunks = events_of(response.text)
    assert chunks[0]["choices"][0]["text"] == "a"
    assert chunks[1]["error"]["type"] == "server_error"
    assert len(chunks) == 2 and "secret" not in response.text
    invariants.check_drained(made.process.scheduler)


async def test_the_death_of_the_engine_ends_streams_with_an_error(local) -> None:
    made = await local("abcdef")
    made.process.dies_after = 2
    response = await made.client.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert events_of(response.text)[-1]["error"]["type"] == "service_unavailable_error"
    assert "secret" not in response.text
    response = await made.client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 503
    assert (await made.client.get("/health")).status_code == 503
    # No engine will come back: only a new process helps.
    assert (await made.client.get("/health/live")).status_code == 503


async def test_priority_is_refused_where_it_means_nothing(local) -> None:
    body = {"prompt": "x", "priority": -5}
    fcfs = await local("ab")
    response = await fcfs.client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")
    by_priority = await local("ab", policy="priority")
    assert (await by_priority.client.post("/v1/completions", json=body)).status_code == 200
    assert by_priority.process.added[0].priority == -5


async def test_a_refused_prompt_takes_back_those_before_it(local) -> None:
    made = await local("ab")
    body = {"prompt": [[97], [99_999]]}
    response = await made.client.post("/v1/completions", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert made.engine.num_requests == 0
    assert not made.process.scheduler.requests
