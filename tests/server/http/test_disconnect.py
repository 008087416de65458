"""A client that leaves frees what it held, in every phase and for every kind of answer."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx
import pytest

from headway.core import invariants

MESSAGES = [{"role": "user", "content": "hi"}]
LONG = {"max_tokens": 1900}

REQUESTS = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": MESSAGES, "n": 3}),
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/completions", {"prompt": ["x", "y"], "n": 2}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_leaving_frees_the_blocks(fake_server, path, body, is_stream) -> None:
    num_before = fake_server.metric("headway_requests_aborted_total")
    num_samples = (
        len(body["prompt"]) * 2 if isinstance(body.get("prompt"), list) else body.get("n", 1)
    )
    async with httpx.AsyncClient(base_url=fake_server.url, timeout=30) as client:
        request = {**body, **LONG, "stream": is_stream}
        task = asyncio.create_task(read_forever(client, path, request))
        await asyncio.to_thread(fake_server.wait_for, "vllm:num_requests_running", num_samples)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await asyncio.to_thread(fake_server.wait_for, "vllm:num_requests_running", 0)
    for gauge in ("headway_kv_blocks_used", "vllm:kv_cache_usage_perc", "headway_slot_occupancy"):
        await asyncio.to_thread(fake_server.wait_for, gauge, 0)
    assert fake_server.metric("headway_requests_aborted_total") == num_before + num_samples


async def read_forever(client: httpx.AsyncClient, path: str, body: dict) -> None:
    async with client.stream("POST", path, json=body) as response:
        async for _ in response.aiter_bytes():
            pass


async def test_a_storm_of_leavers(fake_server) -> None:
    """Clients that leave at any moment, before, during and after their answer."""

    async def leave_after(seconds: float, is_stream: bool) -> None:
        async with httpx.AsyncClient(base_url=fake_server.url, timeout=30) as client:
            body = {"prompt": "x", "max_tokens": 30, "n": 2, "stream": is_stream}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await read_forever(client, "/v1/completions", body)

    await asyncio.gather(*[leave_after(0.004 * i, i % 2 == 0) for i in range(60)])
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        await asyncio.to_thread(fake_server.wait_for, gauge, 0)
    await asyncio.to_thread(fake_server.wait_for, "headway_kv_blocks_used", 0)
    async with httpx.AsyncClient(base_url=fake_server.url, timeout=30) as client:
        response = await client.post("/v1/completions", json={"prompt": "x"})
        assert response.status_code == 200


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_gone_before_the_answer_begins(local, is_stream) -> None:
    """The generator of a stream has then never run, so its own cleanup has not either."""
    made = await local("abc")
    made.process.is_paused = True
    body = json.dumps({"prompt": "x", "stream": is_stream}).encode()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "query_string": b"",
    }
    messages = [{"type": "http.request", "body": body}]

    async def receive() -> dict:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(_message: object) -> None:
        pass

    await made.app(scope, receive, send)
    assert made.process.added
    assert made.engine.num_requests == 0
    invariants.check_drained(made.process.scheduler)


@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]])
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_cancelled_answer_frees_its_requests(local, prompt, is_stream) -> None:
    made = await local("abc" * 20)
    made.process.is_paused = True
    body = {"prompt": prompt, "stream": is_stream, "max_tokens": 50}
    task = asyncio.create_task(made.client.post("/v1/completions", json=body))
    while made.engine.num_requests < len(prompt):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert made.engine.num_requests == 0
    invariants.check_drained(made.process.scheduler)


async def test_a_slow_reader_loses_nothing(fake_server) -> None:
    """Deltas that pile up while the client does not read are joined, and all of them arrive."""
    body = {"prompt": "x", "max_tokens": 300, "seed": 5}
    async with httpx.AsyncClient(base_url=fake_server.url, timeout=30) as client:
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        text = ""
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as got:
            async for line in got.aiter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    text += choice["text"]
                    if len(text) == 1:
                        await asyncio.sleep(1.0)
        assert len(text) == 300
        assert text == whole
