"""A batch of the real model over HTTP gives what the same requests give one by one."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from benchmarks.support.batches import CHAT, content, line, submit, until
from benchmarks.support.servers import RunningServer


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
