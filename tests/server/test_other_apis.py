"""/v1/responses and /v1/messages of the real model over real sockets."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from benchmarks.support.servers import RunningServer
from tests.server.api import test_answer, test_logprobs, test_messages, test_responses
from tests.server.test_structured import client_of

pytestmark = pytest.mark.model

PARAMETERS: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 16}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}
QUESTION = "What is the weather in Paris?"


async def chat(client: httpx.AsyncClient, **fields: Any) -> Any:
    """The answer of chat to the same question."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, **fields}
    response = await client.post("/v1/chat/completions", json=body)
    return response.json()["choices"][0]["message"]


async def test_the_official_client_runs_a_tool_loop(model_server: RunningServer) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{model_server.url}/v1", api_key="none", timeout=120
    ) as client:
        model = (await client.models.list()).data[0].id
        asked = client.responses.stream(
            model=model,
            input=QUESTION,
            tools=[TOOL],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=60,
            temperature=0,
        )
        async with asked as stream:
            async for _ in stream:
                pass
            first = await stream.get_final_response()
        (call,) = first.output
        assert call.type == "function_call" and set(json.loads(call.arguments)) == {"city"}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        history: Any = [{"role": "user", "content": QUESTION}, call.to_dict(), result]
        again = await client.responses.create(
            model=model, input=history, tools=[TOOL], max_output_tokens=8, temperature=0
        )
        assert again.output_text and again.usage and again.usage.output_tokens == 8


async def test_streams_have_the_log_probabilities_of_whole_answers(
    model_server: RunningServer,
) -> None:
    function = {"name": TOOL["name"], "parameters": PARAMETERS}
    limits = {"temperature": 0, "top_logprobs": 2}
    async with client_of(model_server) as client:
        for choice in ("none", "auto", "required"):
            asked: Any = {"messages": [{"role": "user", "content": QUESTION}], "logprobs": True}
            asked |= {**limits, "max_tokens": 40, "tool_choice": choice}
            asked["tools"] = [{"type": "function", "function": function}]
            whole = (await client.post("/v1/chat/completions", json=asked)).json()
            path = "/v1/chat/completions"
            streamed = await client.post(path, json={**asked, "stream": True})
            events = test_answer.events_of(streamed.text)
            scores = whole["choices"][0]["logprobs"]["content"]
            assert test_logprobs.streamed_scores(events, 0) == scores
            assert len(scores) == whole["usage"]["completion_tokens"]
            asked = {"input": QUESTION, **limits, "max_output_tokens": 40, "tools": [TOOL]}
            asked["tool_choice"] = choice
            whole = (await client.post("/v1/responses", json=asked)).json()
            streamed = await client.post("/v1/responses", json={**asked, "stream": True})
            events = test_responses.events_of(streamed.text)
            output = test_responses.check_events(events)["output"]
            parts = [one["content"] for one in output if one["type"] == "message"]
            assert parts == [one["content"] for one in whole["output"] if one["type"] == "message"]
            assert bool(parts) == (choice != "required")
            assert not parts or len(parts[0][0]["logprobs"]) > 3


async def test_the_official_client_comes_back_for_a_response(model_server: RunningServer) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{model_server.url}/v1", api_key="none", timeout=120, max_retries=0
    ) as client:
        model = (await client.models.list()).data[0].id
        asked: Any = {"model": model, "input": QUESTION, "temperature": 0, "background": True}
        waited: Any = {**asked, "background": False}
        whole = await client.responses.create(**waited, max_output_tokens=24)
        stream = await client.responses.create(**asked, max_output_tokens=24, stream=True)
        events: list[Any] = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        name = events[0].response.id
        after = events[-1].sequence_number
        rest = await client.responses.retrieve(name, stream=True, starting_after=after)
        events += [event async for event in rest]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text == events[-1].response.output_text
        assert await client.responses.retrieve(name) == events[-1].response
        long = await client.responses.create(**asked, max_output_tokens=1000)
        assert long.status == "queued"
        ended = await client.responses.cancel(long.id)
        assert ended.status == "cancelled" and await client.responses.cancel(long.id) == ended
        await client.responses.delete(name)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(name)


async def test_the_same_text_from_every_api(model_server: RunningServer) -> None:
    async with client_of(model_server) as client:
        expected = (await chat(client, max_tokens=16))["content"]
        body = {"input": QUESTION, "max_output_tokens": 16, "temperature": 0}
        response = await client.post("/v1/responses", json={**body, "stream": True})
        answer = test_responses.check_events(test_responses.events_of(response.text))
        assert answer["output"][0]["content"][0]["text"] == expected
        messages = [{"role": "user", "content": QUESTION}]
        body = {"messages": messages, "max_tokens": 16, "temperature": 0}
        response = await client.post("/v1/messages", json={**body, "stream": True})
        message = test_messages.check_events(test_messages.events_of(response.text))
        assert message["content"] == [{"type": "text", "text": expected}]
        counted = await client.post("/v1/messages/count_tokens", json={"messages": messages})
        usage = message["usage"]
        num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert counted.json() == {"input_tokens": num_prompt}


async def test_the_same_call_from_every_api(model_server: RunningServer) -> None:
    async with client_of(model_server) as client:
        function = {"name": "get_weather", "parameters": PARAMETERS}
        more = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
        tools = [{"type": "function", "function": function}]
        (call,) = (await chat(client, tools=tools, **more))["tool_calls"]
        body = {
            "messages": [{"role": "user", "content": QUESTION}],
            "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            "max_tokens": 60,
            "temperature": 0,
        }
        message = (await client.post("/v1/messages", json=body)).json()
        (block,) = message["content"]
        assert block["input"] == json.loads(call["function"]["arguments"])
        assert message["stop_reason"] == "tool_use"
