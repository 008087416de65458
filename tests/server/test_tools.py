"""Tool calls of the real model over real sockets: every choice, streamed and whole, and a kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest

from benchmarks.live.tool_calls import MODES, check_server
from benchmarks.support.servers import RunningServer, start_model_server
from tests.server.test_structured import CHAT, client_of, engine_pid

pytestmark = pytest.mark.model

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "The time."}},
]
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris?"}]


def body(**fields: Any) -> dict[str, Any]:
    given = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "max_tokens": 70}
    return {**given, "seed": 1, "stream": True, "stream_options": {"include_usage": True}, **fields}


async def read(client: httpx.AsyncClient, fields: dict[str, Any]) -> dict[int, list[Any]]:
    """All that a stream says about each choice, with the arguments of each call joined."""
    replies: dict[int, list[Any]] = {}
    async with client.stream("POST", CHAT, json=fields) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                reply = replies.setdefault(choice["index"], ["", [], None])
                reply[0] += choice["delta"].get("content") or ""
                reply[2] = choice["finish_reason"] or reply[2]
                for part in choice["delta"].get("tool_calls", ()):
                    if "id" in part:
                        assert part["index"] == len(reply[1])
                        reply[1].append([part["function"]["name"], ""])
                    reply[1][part["index"]][1] += part["function"]["arguments"]
    return replies


async def test_every_choice_gives_valid_calls(model_server: RunningServer, is_full: bool) -> None:
    num_rounds = 8 if is_full else 1
    max_tokens = 100 if is_full else 50
    report = await check_server(model_server.url, num_rounds * len(MODES), max_tokens)
    assert not report.errors
    assert report.counts["named: replies"] == num_rounds and report.counts["required: calls"]


async def test_the_official_client_parses_arguments(model_server: RunningServer) -> None:
    tools = json.loads(json.dumps(TOOLS[:1]))
    tools[0]["function"]["strict"] = True
    async with openai.AsyncOpenAI(
        base_url=f"{model_server.url}/v1", api_key="none", timeout=120
    ) as client:
        model = (await client.models.list()).data[0].id
        answer = await client.chat.completions.parse(
            model=model,
            messages=MESSAGES,
            tools=tools,
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
            max_tokens=60,
            temperature=0,
        )
        message = answer.choices[0].message
        assert message.content is None and answer.choices[0].finish_reason == "tool_calls"
        (call,) = message.tool_calls or []
        assert jsonschema_rs.is_valid(PARAMETERS, call.function.parsed_arguments)
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}
        again = await client.chat.completions.create(
            model=model,
            messages=[*MESSAGES, message, result],  # type: ignore[list-item]
            tools=tools,
            max_tokens=8,
        )
        assert again.choices[0].message.content


async def test_the_same_calls_alone_and_beside_others(model_server: RunningServer) -> None:
    asked = [body(seed=at, temperature=at % 2, max_tokens=40) for at in range(3)]
    async with client_of(model_server) as client:
        together = await asyncio.gather(*(read(client, one) for one in asked))
        assert await read(client, asked[1]) == together[1]
        assert all(calls for one in together for _, calls, _ in one.values())


@pytest.mark.full
async def test_calls_survive_a_kill(model_path: Path, tmp_path: Path) -> None:
    """The parser follows from the text and the grammar from the tokens: both go on in a call."""
    flags = ("--kv-cache-memory-bytes", "64M", "--max-queue-age-s", "600")
    server = start_model_server(model_path, tmp_path / "server.log", *flags)
    try:
        await asyncio.to_thread(server.wait_ready)
        asked = [body(seed=at, temperature=at % 2, n=1 + at % 3) for at in range(4)]
        async with client_of(server) as client:
            expected = await asyncio.gather(*(read(client, one) for one in asked))
            tasks = [asyncio.create_task(read(client, one)) for one in asked]
            await asyncio.to_thread(server.wait_at_least, "vllm:num_requests_running", 4)
            os.kill(await asyncio.to_thread(engine_pid, server), signal.SIGKILL)
            assert await asyncio.gather(*tasks) == expected
        assert server.metric("headway_engine_restarts_total") == 1
        assert "tool calls: generic (the chat template takes no tools)" in server.log
    finally:
        server.process.terminate()
        server.process.wait()
