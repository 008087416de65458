"""Structured output over real sockets: streams, crashes, hostile neighbours."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import jsonschema_rs
import openai
import pydantic
import pytest

from benchmarks.support.schemas import optional
from benchmarks.support.servers import RunningServer, start_model_server
from tests.grammar.test_grammars import COSTLY, HOSTILE
from tests.grammar.test_outputs import PERSON

pytestmark = pytest.mark.model

FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
MESSAGES: Any = [{"role": "user", "content": "Describe a person as JSON."}]
CHAT = "/v1/chat/completions"


def client_of(server: RunningServer) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits)


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "max_tokens": 100, "response_format": FORMAT, "seed": 1, **fields}


async def read(client: httpx.AsyncClient, fields: dict[str, Any]) -> tuple[dict[int, str], float]:
    """The text of each choice of a stream, and the longest gap between two events."""
    texts: dict[int, str] = {}
    longest_s, last_at = 0.0, 0.0
    async with client.stream("POST", CHAT, json={**fields, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            now = time.monotonic()
            longest_s, last_at = max(longest_s, now - (last_at or now)), now
            for choice in event["choices"]:
                text = choice["delta"].get("content", "")
                texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts, longest_s


async def test_a_grammar_that_becomes_too_costly_is_the_fault_of_its_request(
    model_server: RunningServer,
) -> None:
    """An ambiguous grammar: the work of a mask grows with the output, up to its bound."""
    rules = "".join(f"r{at}: r{at + 1} | r{at + 1} r{at + 1}\n" for at in range(16))
    grammar = f'start: r0\n{rules}r16: "a"\n'
    fields = {"structured_outputs": {"grammar": grammar}, "logit_bias": {"2": -100}}
    asked = body(**fields, response_format=None, max_tokens=200, temperature=0)
    async with client_of(model_server) as client:
        answer = await client.post(CHAT, json=asked)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert "the grammar cannot go on" in error["message"]
        async with client.stream("POST", CHAT, json={**asked, "stream": True}) as response:
            lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
    assert (
        "the grammar cannot go on"
        in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
    )


async def test_answers_whole_and_streamed(model_server: RunningServer) -> None:
    async with client_of(model_server) as client:
        for fields in ({"temperature": 0}, {"temperature": 0.9, "n": 2}):
            answer = (await client.post(CHAT, json=body(**fields))).json()
            whole = {one["index"]: one["message"]["content"] for one in answer["choices"]}
            assert {one["finish_reason"] for one in answer["choices"]} == {"stop"}
            streamed, _ = await read(client, body(**fields))
            assert streamed == whole
            for text in whole.values():
                assert jsonschema_rs.is_valid(PERSON, json.loads(text))
        for constraint in (
            {"choice": ["yes", "no"]},
            {"regex": "yes|no"},
            {"grammar": 'start: "no"'},
        ):
            asked = {"prompt": "Is water wet? ", "structured_outputs": constraint, "max_tokens": 9}
            answer = (await client.post("/v1/completions", json=asked)).json()
            assert answer["choices"][0]["text"] in ("yes", "no")


class City(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=15)]
    size: Literal["small", "large"]
    twin: Annotated[str, pydantic.Field(max_length=15)] | None


async def test_the_official_client_parses_its_models(model_server: RunningServer) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{model_server.url}/v1", api_key="none", timeout=120
    ) as client:
        model = (await client.models.list()).data[0].id
        answer = await client.chat.completions.parse(
            model=model, messages=MESSAGES, response_format=City, max_tokens=60, seed=2
        )
    assert isinstance(answer.choices[0].message.parsed, City)


async def test_what_cannot_be_honoured_is_refused(model_server: RunningServer) -> None:
    refused = {
        "not": {"not": {"type": "string"}},
        "uniqueItems": {"type": "array", "uniqueItems": True},
        "says nothing": {},
    }
    async with client_of(model_server) as client:
        for word, schema in refused.items():
            asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            response = await client.post(CHAT, json=body(response_format=asked))
            error = response.json()["error"]
            assert response.status_code == 400 and word in error["message"], error
            assert error["param"].startswith("response_format")
        for fields in (
            {"structured_outputs": {"json": PERSON}},
            {"response_format": None, "structured_outputs": {"regex": "a", "choice": ["b"]}},
            {"response_format": None, "structured_outputs": {}},
            {"response_format": {"type": "xml"}},
            {"response_format": {"type": "json_schema"}},
            {"min_tokens": 3},
        ):
            response = await client.post(CHAT, json=body(**fields))
            assert response.status_code == 400, response.text


@pytest.mark.full
async def test_streams_survive_a_kill(model_path: Path, tmp_path: Path) -> None:
    """State follows from the tokens: the next engine goes on in the middle of a string."""
    flags = ("--kv-cache-memory-bytes", "64M", "--max-queue-age-s", "600")
    server = start_model_server(model_path, tmp_path / "server.log", *flags)
    try:
        await asyncio.to_thread(server.wait_ready)
        asked = [body(seed=at, temperature=at % 2, n=1 + at % 3) for at in range(4)]
        async with client_of(server) as client:
            expected = [one for one, _ in await asyncio.gather(*(read(client, a) for a in asked))]
            tasks = [asyncio.create_task(read(client, one)) for one in asked]
            await asyncio.to_thread(server.wait_at_least, "vllm:num_requests_running", 4)
            engine = await asyncio.to_thread(engine_pid, server)
            os.kill(engine, signal.SIGKILL)
            assert [one for one, _ in await asyncio.gather(*tasks)] == expected
        assert server.metric("headway_engine_restarts_total") == 1
    finally:
        server.process.terminate()
        server.process.wait()


def engine_pid(server: RunningServer) -> int:
    import psutil

    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(one.pid for one in children if "headway.engine_main" in " ".join(one.cmdline()))


@pytest.mark.full
async def test_hostile_grammars_do_not_delay_the_streams_of_others(
    model_server: RunningServer,
) -> None:
    """A client's stream has no longer gaps while another sends the costliest grammars it may."""
    watched = {"messages": MESSAGES, "max_tokens": 250, "temperature": 0, "ignore_eos": True}
    schema = optional(250)
    is_over = False

    async def attack(client: httpx.AsyncClient) -> int:
        num_sent = 0
        while not is_over:
            num_sent += 1
            unique = {**schema, "title": f"{num_sent}", "minProperties": num_sent % 3}
            asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": unique}}
            await client.post(CHAT, json=body(response_format=asked, max_tokens=30))
            for make in (*HOSTILE.values(), *COSTLY.values()):
                try:
                    grammar = make()
                except ValueError:
                    continue
                asked = {"grammar": grammar.partition("\n")[2]}
                fields = {"response_format": None, "structured_outputs": asked, "max_tokens": 30}
                await client.post(CHAT, json=body(**fields))
        return num_sent

    async with client_of(model_server) as client:
        # The first grammar of a process costs it half a second, unless it was idle before.
        assert (await client.post(CHAT, json=body())).status_code == 200
        _, quiet_s = await read(client, watched)
        attackers = [asyncio.create_task(attack(client)) for _ in range(4)]
        await asyncio.sleep(2)
        _, busy_s = await read(client, watched)
        is_over = True
        num_sent = sum(await asyncio.gather(*attackers))
    print(f"longest gap {1000 * quiet_s:.0f} ms alone, {1000 * busy_s:.0f} ms beside {num_sent}")
    assert num_sent and busy_s < max(0.5, 10 * quiet_s)
