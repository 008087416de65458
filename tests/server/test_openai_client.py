"""The official client against the real server with the real model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

pytestmark = pytest.mark.model

MESSAGES = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture
async def client(model_server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{model_server.url}/v1", api_key="x", max_retries=0
    ) as made:
        yield made


@pytest.fixture
async def model(client) -> str:
    return (await client.models.list()).data[0].id


async def test_models(client, model) -> None:
    assert (await client.models.retrieve(model)).id == model


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


async def test_chat_stream_says_the_same(client, model) -> None:
    wish = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    whole = await client.chat.completions.create(**wish)
    stream = await client.chat.completions.create(
        **wish, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_samples_differ_and_a_seed_repeats_them(client, model) -> None:
    wish = {"model": model, "messages": MESSAGES, "n": 2, "seed": 11, "max_tokens": 8}
    first = await client.chat.completions.create(**wish)
    second = await client.chat.completions.create(**wish)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert [choice.message.content for choice in second.choices] == texts
    streamed = ["", ""]
    async for chunk in await client.chat.completions.create(**wish, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


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


async def test_completions(client, model) -> None:
    wish = {"model": model, "prompt": "One, two, three,", "temperature": 0, "max_tokens": 8}
    whole = await client.completions.create(**wish, logprobs=2)
    choice = whole.choices[0]
    assert choice.text and whole.usage.completion_tokens <= 8
    assert len(choice.logprobs.tokens) == whole.usage.completion_tokens
    assert choice.logprobs.text_offset[0] == 0
    text = ""
    async for chunk in await client.completions.create(**wish, stream=True):
        text += chunk.choices[0].text
    assert text == choice.text


async def test_several_prompts(client, model) -> None:
    prompts = ["The capital of France is", "Two plus two is"]
    wish = {"model": model, "temperature": 0, "max_tokens": 5}
    both = await client.completions.create(prompt=prompts, n=2, **wish)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text
    for place, prompt in enumerate(prompts):
        alone = await client.completions.create(prompt=prompt, **wish)
        assert both.choices[2 * place].text == alone.choices[0].text


async def test_stop(client, model) -> None:
    wish = {"model": model, "prompt": "1, 2, 3, 4, 5,", "temperature": 0, "max_tokens": 24}
    free = (await client.completions.create(**wish)).choices[0].text
    stop = free[4:6]
    stopped = await client.completions.create(**wish, stop=[stop])
    assert stopped.choices[0].text == free[: free.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"


async def test_errors_arrive_as_the_clients_own(client, model) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model=model, messages=MESSAGES, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(
            model=model, messages=MESSAGES, response_format={"type": "json_object"}
        )


async def test_leaving_frees_everything(client, model, model_server) -> None:
    wish = {
        "model": model,
        "messages": MESSAGES,
        "max_tokens": 500,
        "extra_body": {"ignore_eos": True},
    }
    stream = await client.chat.completions.create(**wish, stream=True)
    await anext(aiter(stream))
    await stream.close()
    waiting = asyncio.create_task(client.chat.completions.create(**wish))
    await asyncio.to_thread(model_server.wait_for, "vllm:num_requests_running", 1)
    waiting.cancel()
    await asyncio.to_thread(model_server.wait_for, "vllm:num_requests_running", 0)
    await asyncio.to_thread(model_server.wait_for, "headway_kv_blocks_used", 0)
