"""A batch of the real model over HTTP gives what the same requests give one by one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import jsonschema_rs
import pytest

from benchmarks.support.batches import CHAT, content, line, submit, until
from benchmarks.support.servers import RunningServer
from tests.grammar.test_outputs import PERSON
from tests.server.test_structured import FORMAT
from tests.server.test_tools import TOOLS

UNHONOURED = {"not": {"type": "string"}}


@pytest.mark.model
async def test_a_batch_gives_what_single_requests_give(model_server: RunningServer) -> None:
    lines = [
        line(number, CHAT, seed=number, max_tokens=8, temperature=(number % 2) * 0.8)
        for number in range(20)
    ]
    async with httpx.AsyncClient(base_url=model_server.url, timeout=120) as client:
        batch = await submit(client, lines, CHAT)
        ended = await until(client, batch["id"], timeout_s=120)
        found = await content(client, ended["output_file_id"])
        alone = await asyncio.gather(*(client.post(CHAT, json=one["body"]) for one in lines))
        explained = await client.get(f"/v1/requests/{found['r0']['id']}/explanation")
    assert ended["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    for one, answer in zip(lines, alone, strict=True):
        body = found[one["custom_id"]]["response"]["body"]
        assert body["choices"] == answer.json()["choices"]
    assert explained.json()["id"] == found["r0"]["response"]["body"]["id"]


@pytest.mark.model
async def test_lines_follow_their_schemas_and_tools(model_server: RunningServer) -> None:
    unhonoured = {"type": "json_schema", "json_schema": {"name": "x", "schema": UNHONOURED}}
    lines = [
        line(0, CHAT, seed=1, max_tokens=40, temperature=0, response_format=FORMAT),
        line(1, CHAT, seed=1, max_tokens=40, tools=TOOLS, tool_choice="required"),
        line(2, CHAT, response_format=unhonoured),
    ]
    async with httpx.AsyncClient(base_url=model_server.url, timeout=120) as client:
        ended = await until(client, (await submit(client, lines, CHAT))["id"], timeout_s=120)
        found = await content(client, ended["output_file_id"])
        errors = await content(client, ended["error_file_id"])
        alone = await asyncio.gather(*(client.post(CHAT, json=one["body"]) for one in lines))
    assert ended["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    for one, answer in zip(lines[:2], alone, strict=False):
        (choice,) = found[one["custom_id"]]["response"]["body"]["choices"]
        assert without_ids(choice) == without_ids(answer.json()["choices"][0])
        assert choice["finish_reason"] == "length" or is_valid(choice["message"])
    assert errors["r2"]["response"]["status_code"] == alone[2].status_code == 400
    assert errors["r2"]["response"]["body"]["error"] == alone[2].json()["error"]


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice without the ids of calls, which follow from the id of the request."""
    calls = choice["message"].get("tool_calls") or ()
    return {
        **choice,
        "message": {**choice["message"], "tool_calls": [c["function"] for c in calls]},
    }


def is_valid(message: dict[str, Any]) -> bool:
    if not message.get("tool_calls"):
        return jsonschema_rs.is_valid(PERSON, json.loads(message["content"]))
    calls = [one["function"] for one in message["tool_calls"]]
    schemas = {one["function"]["name"]: one["function"].get("parameters", {}) for one in TOOLS}
    return all(
        jsonschema_rs.is_valid(schemas[one["name"]], json.loads(one["arguments"])) for one in calls
    )
