"""Two servers on one port: the one that stops leaves it to the other, and drops nothing."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import httpx

from benchmarks.support.servers import Launcher, free_port

BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 5, "seed": 1}


async def test_a_server_that_stops_leaves_its_port_to_the_other(launch: Launcher) -> None:
    port = free_port()
    shared: dict[str, object] = {"reuse_port": True}
    first = launch(port, shared, step_s=0.01)
    await asyncio.to_thread(first.wait_ready)
    answers: list[int] = []
    is_over = asyncio.Event()

    async def ask(http: httpx.AsyncClient, headers: dict[str, str]) -> None:
        while not is_over.is_set():
            response = await http.post("/v1/completions", json=BODY, headers=headers)
            answers.append(response.status_code)
            await asyncio.sleep(0.01)

    async def stream(http: httpx.AsyncClient) -> str:
        body = {**BODY, "max_tokens": 150, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            return [line async for line in response.aiter_lines() if line][-1]

    async with httpx.AsyncClient(base_url=first.url, timeout=60) as http:
        streaming = asyncio.create_task(stream(http))
        # Half of the clients make a connection for each request, half keep theirs.
        kinds: list[dict[str, str]] = [{}, {"Connection": "close"}]
        asking = [asyncio.create_task(ask(http, kind)) for kind in kinds * 2]
        await asyncio.sleep(0.5)
        second = launch(port, shared, step_s=0.01)
        while "ready on" not in second.log:
            assert second.process.poll() is None, second.log
            await asyncio.sleep(0.05)
        first.process.send_signal(signal.SIGTERM)
        assert await streaming == "data: [DONE]"
        assert await asyncio.to_thread(first.process.wait, 20) == 0
        await asyncio.sleep(0.2)
        is_over.set()
        await asyncio.gather(*asking)
    assert set(answers) == {200}
    assert second.process.poll() is None


async def test_a_server_that_stops_serves_idle_connections_until_they_end(
    launch: Launcher,
) -> None:
    settings: dict[str, object] = {"reuse_port": True, "timeouts": {"keep_alive_s": 3.0}}
    server = await asyncio.to_thread(launch(server=settings).wait_ready)
    async with (
        httpx.AsyncClient(base_url=server.url, timeout=60) as busy,
        httpx.AsyncClient(base_url=server.url, timeout=60) as idle,
    ):
        for http in (idle, busy):
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        while "draining" not in server.log:
            await asyncio.sleep(0.01)
        last = await busy.post("/v1/completions", json=BODY)
        assert (last.status_code, last.headers["connection"]) == (200, "close")
        assert await asyncio.to_thread(server.process.wait, 20) == 0, server.log
