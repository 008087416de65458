"""Input files of batches, and clients that wait for the end of a batch."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def line(number: int, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    start: dict[str, Any] = {"prompt": f"prompt {number}"}
    if url == CHAT:
        start = {"messages": [{"role": "user", "content": f"prompt {number}"}]}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": {**start, **body}}


def jsonl(lines: list[Any]) -> bytes:
    return "".join(f"{json.dumps(one)}\n" for one in lines).encode()


async def submit(
    client: httpx.AsyncClient,
    lines: list[Any] | bytes,
    endpoint: str = COMPLETIONS,
    window: str = "24h",
    **fields: Any,
) -> dict[str, Any]:
    content = lines if isinstance(lines, bytes) else jsonl(lines)
    files = {"file": ("in.jsonl", content)}
    uploaded = await client.post("/v1/files", files=files, data={"purpose": "batch"})
    assert uploaded.status_code == 200, uploaded.text
    body = {"input_file_id": uploaded.json()["id"], "endpoint": endpoint}
    answer = await client.post("/v1/batches", json={**body, "completion_window": window, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def get(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:
    answer = await client.get(f"/v1/batches/{batch_id}")
    answer.raise_for_status()
    return answer.json()


async def until(
    client: httpx.AsyncClient, batch_id: str, *statuses: str, timeout_s: float = 20.0
) -> dict[str, Any]:
    """Return the batch once it has one of these statuses; without any, once it has ended."""
    wanted = statuses or ("completed", "failed", "expired", "cancelled")
    async with asyncio.timeout(timeout_s):
        while True:
            batch = await get(client, batch_id)
            if batch["status"] in wanted:
                return batch
            await asyncio.sleep(0.01)


async def content(client: httpx.AsyncClient, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of a result file by custom_id, each of which is there once."""
    if file_id is None:
        return {}
    answer = await client.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 200, answer.text
    lines = [json.loads(text) for text in answer.text.splitlines()]
    found = {one["custom_id"]: one for one in lines}
    assert len(found) == len(lines)
    return found
