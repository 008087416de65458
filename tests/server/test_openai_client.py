"""The official client: against a scripted engine, for the contract, and against the real server
with the real model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from headway.errors import OverloadedError, TenantLimitError
from tests.support.apps import serving

real = pytest.mark.model

MESSAGES: Any = [{"role": "user", "content": "Name three colours."}]


def client_for(made: Any, **options: Any) -> openai.AsyncOpenAI:
    given = {"api_key": "x", "max_retries": 0, **options}
    return openai.AsyncOpenAI(base_url="http://localhost/v1", http_client=made.public, **given)


async def test_whole_answers(local) -> None:
    async with serving(local, "hello") as made:
        client = client_for(made)
        chat = await client.chat.completions.create(model="tiny", messages=MESSAGES, n=2)
        assert [choice.message.content for choice in chat.choices] == ["hello", "hello"]
        assert chat.usage and chat.usage.completion_tokens == 12
        text = await client.completions.create(model="tiny", prompt="x", max_tokens=3, logprobs=1)
        assert text.choices[0].text == "hel"
        assert text.choices[0].finish_reason == "length"
        scores = text.choices[0].logprobs
        assert scores and scores.text_offset == [0, 1, 2]
        assert [model.id async for model in await client.models.list()] == ["tiny", "alias/tiny"]
        assert (await client.models.retrieve("alias/tiny")).id == "alias/tiny"


async def test_streams(local) -> None:
    async with serving(local, "hello") as made:
        client = client_for(made)
        payload = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
        stream = await client.chat.completions.create(messages=MESSAGES, **payload)
        chunks = [chunk async for chunk in stream]
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert (text, chunks[-2].choices[0].finish_reason) == ("hello", "stop")
        assert chunks[-1].usage.completion_tokens == 6
        stream = await client.completions.create(prompt="x", **payload)
        assert "".join([c.choices[0].text async for c in stream if c.choices]) == "hello"


async def test_the_clients_own_stream_helper(local) -> None:
    async with serving(local, "hello") as made:
        payload = client_for(made).chat.completions.stream(model="tiny", messages=MESSAGES)
        async with payload as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "hello"


async def test_an_error_in_the_middle_of_a_stream_is_raised(local) -> None:
    async with serving(local, [97, None]) as made:
        payload = {"model": "tiny", "prompt": "x", "stream": True}
        stream = await client_for(made).completions.create(**payload)
        texts = []
        with pytest.raises(openai.APIError, match="could not finish"):
            async for chunk in stream:
                texts.append(chunk.choices[0].text)  # noqa: PERF401
        assert texts == ["a"]


async def test_errors_are_of_the_right_class(local) -> None:
    async with serving(local, api_key=("k",)) as made:
        client = client_for(made, api_key="k")
        payload: dict[str, Any] = {"model": "tiny", "messages": MESSAGES}
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(**payload, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(**payload, service_tier="flex")
        assert bad.value.param == "service_tier"
        with pytest.raises(openai.AuthenticationError) as denied:
            await client_for(made, api_key="wrong").models.list()
        assert denied.value.code == "invalid_api_key"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError, match="no such response"):
            await client.responses.retrieve("resp_1")
        with pytest.raises(openai.NotFoundError, match="not offered"):
            await client.responses.input_items.list("resp_1")


@pytest.mark.parametrize(
    ("error", "expected", "status"),
    [
        (TenantLimitError("too much of you", 7), openai.RateLimitError, 429),
        (OverloadedError("too much of everyone", 7), openai.InternalServerError, 503),
    ],
)
async def test_too_much_is_tried_again_when_the_server_says(
    local, monkeypatch, error, expected, status
) -> None:
    async with serving(local, "hello") as made:
        submit, refusals, sleeps = made.engine.submit, [error] * 3, []

        async def refuse_at_first(*args: Any, **options: Any) -> Any:
            if refusals:
                raise refusals.pop()
            return await submit(*args, **options)

        async def sleep(seconds: float) -> None:
            sleeps.append(seconds)

        monkeypatch.setattr(made.engine, "submit", refuse_at_first)
        monkeypatch.setattr("anyio.sleep", sleep)
        payload: dict[str, Any] = {"model": "tiny", "prompt": "x"}
        with pytest.raises(expected) as caught:
            await client_for(made).completions.create(**payload)
        assert caught.value.status_code == status
        answer = await client_for(made, max_retries=2).completions.create(**payload)
        assert answer.choices[0].text == "hello"
        assert sleeps == [7, 7]


@pytest.fixture
async def client(model_server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{model_server.url}/v1", api_key="x", max_retries=0
    ) as made:
        yield made


@pytest.fixture
async def model(client) -> str:
    return (await client.models.list()).data[0].id


@real
async def test_models(client, model) -> None:
    assert (await client.models.retrieve(model)).id == model


@real
async def test_chat(client, model) -> None:
    answer = await client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, max_completion_tokens=8
    )
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.prompt_tokens > 5
    assert 0 < answer.usage.completion_tokens <= 8
    total = answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.total_tokens == total
    again = await client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, max_tokens=8
    )
    assert again.choices[0].message.content == choice.message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0


@real
async def test_chat_stream_says_the_same(client, model) -> None:
    payload = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    whole = await client.chat.completions.create(**payload)
    stream = await client.chat.completions.create(
        **payload, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


@real
async def test_samples_differ_and_a_seed_repeats_them(client, model) -> None:
    payload = {"model": model, "messages": MESSAGES, "n": 2, "seed": 11, "max_tokens": 8}
    first = await client.chat.completions.create(**payload)
    second = await client.chat.completions.create(**payload)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert [choice.message.content for choice in second.choices] == texts
    streamed = ["", ""]
    async for chunk in await client.chat.completions.create(**payload, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


@real
async def test_chat_logprobs(client, model) -> None:
    answer = await client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert entry.logprob <= 0
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
        tops = [top.logprob for top in entry.top_logprobs]
        assert len(tops) == 3 and tops == sorted(tops, reverse=True)
        assert entry.logprob == tops[0]  # greedy takes the best
    text = b"".join(bytes(entry.bytes) for entry in content).decode()
    assert text.startswith(answer.choices[0].message.content)


@real
async def test_completions(client, model) -> None:
    payload = {"model": model, "prompt": "One, two, three,", "temperature": 0, "max_tokens": 8}
    whole = await client.completions.create(**payload, logprobs=2)
    choice = whole.choices[0]
    assert choice.text and whole.usage.completion_tokens <= 8
    assert len(choice.logprobs.tokens) == whole.usage.completion_tokens
    assert choice.logprobs.text_offset[0] == 0
    text = ""
    async for chunk in await client.completions.create(**payload, stream=True):
        text += chunk.choices[0].text
    assert text == choice.text


@real
async def test_several_prompts(client, model) -> None:
    prompts = ["The capital of France is", "Two plus two is"]
    payload = {"model": model, "temperature": 0, "max_tokens": 5}
    both = await client.completions.create(prompt=prompts, n=2, **payload)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text
    for place, prompt in enumerate(prompts):
        alone = await client.completions.create(prompt=prompt, **payload)
        assert both.choices[2 * place].text == alone.choices[0].text


@real
async def test_stop(client, model) -> None:
    payload = {"model": model, "prompt": "1, 2, 3, 4, 5,", "temperature": 0, "max_tokens": 24}
    free = (await client.completions.create(**payload)).choices[0].text
    stop = free[4:6]
    stopped = await client.completions.create(**payload, stop=[stop])
    assert stopped.choices[0].text == free[: free.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


@real
async def test_errors_arrive_as_the_clients_own(client, model) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=model, messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model=model, messages=MESSAGES, service_tier="flex")


@real
async def test_leaving_frees_everything(client, model, model_server) -> None:
    payload = {
        "model": model,
        "messages": MESSAGES,
        "max_tokens": 500,
        "extra_body": {"ignore_eos": True},
    }
    stream = await client.chat.completions.create(**payload, stream=True)
    await anext(aiter(stream))
    await stream.close()
    waiting = asyncio.create_task(client.chat.completions.create(**payload))
    await asyncio.to_thread(model_server.wait_for, "vllm:num_requests_running", 1)
    waiting.cancel()
    await asyncio.to_thread(model_server.wait_for, "vllm:num_requests_running", 0)
    await asyncio.to_thread(model_server.wait_for, "headway_kv_blocks_used", 0)
