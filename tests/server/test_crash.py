"""Engines that die, hang or talk nonsense, under streams that must not notice."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.support.servers import RunningServer
from headway.engine.supervise.loss import NUM_CLEARING_TOKENS

POISON = "\x01"


def engine_pids(server) -> list[int]:
    return [int(pid) for pid in re.findall(r"^engine (\d+)$", server.log, re.MULTILINE)]


def body(number: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": f"prompt {number}", "max_tokens": 300, "seed": number, **fields}


async def read(client: httpx.AsyncClient, fields: dict[str, Any]) -> tuple[dict[int, str], int]:
    """The text of each choice of a stream, and how many tokens the server counted."""
    texts: dict[int, str] = {}
    num_tokens = 0
    streamed = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=streamed) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
    return texts, num_tokens


async def wait_restart(server, num_before: int) -> None:
    deadline = time.monotonic() + 30
    # In a thread: the event loop has the streams of the test to read.
    while await asyncio.to_thread(server.metric, "headway_engine_restarts_total") == num_before:
        assert time.monotonic() < deadline, server.log
        await asyncio.sleep(0.02)


TOKENS = "vllm:generation_tokens_total"
NUM_RUNNING = 12
"""Of 22 samples: on a busy machine, the first have ended before the last run."""


def bodies() -> list[dict[str, Any]]:
    return [
        *(body(number) for number in range(12)),
        *(body(number, n=3, max_tokens=100) for number in range(12, 15)),
        body(15, stop=["qq"], logprobs=2),
    ]


Outputs = list[tuple[dict[int, str], int]]


@pytest.fixture(scope="module")
def expected(fake_server: RunningServer) -> Outputs:
    """What an undisturbed server, whose steps are short, makes of the bodies."""

    async def read_all() -> Outputs:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=fake_server.url, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(read(client, fields) for fields in bodies()))

    return asyncio.run(read_all())


async def check_survival(server, disturb, expected: Outputs) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        tasks = [asyncio.create_task(read(client, fields)) for fields in bodies()]
        await asyncio.to_thread(server.wait_at_least, "vllm:num_requests_running", NUM_RUNNING)
        await disturb()
        assert await asyncio.gather(*tasks) == expected
    server.wait_for("vllm:num_requests_running", 0, timeout_s=30.0)
    server.wait_for("headway_kv_blocks_used", 0, timeout_s=30.0)
    # Each sample ended once, however many engines it ran in.
    assert server.metric("vllm:request_success_total") == 22
    assert server.metric("vllm:generation_tokens_total") == sum(n for _, n in expected)


async def test_streams_survive_three_kills(launch, expected: Outputs) -> None:
    server = await asyncio.to_thread(launch(step_s=0.01).wait_ready)

    async def kill() -> None:
        for number in range(3):
            os.kill(engine_pids(server)[-1], signal.SIGKILL)
            await wait_restart(server, number)
            await asyncio.to_thread(server.wait_ready)
            await asyncio.sleep(0.6)

    await check_survival(server, kill, expected)
    assert server.metric("headway_requests_resubmitted_total") >= 16


async def test_streams_survive_an_engine_that_fails(launch) -> None:
    """Every engine fails at its step 150, until what is left takes fewer."""
    server = await asyncio.to_thread(launch(step_s=0.005, fails_at_step=150).wait_ready)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        texts, num_tokens = await read(client, body(1, max_tokens=400))
    assert (len(texts[0]), num_tokens) == (400, 400)
    assert server.metric("headway_engine_restarts_total") == 2
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        assert (await read(client, body(1, max_tokens=100)))[0][0] == texts[0][:100]


async def test_streams_survive_an_engine_that_hangs(launch, expected: Outputs) -> None:
    server = await asyncio.to_thread(launch(step_s=0.01, server={"engine_hang_s": 4.0}).wait_ready)

    async def stop() -> None:
        os.kill(engine_pids(server)[-1], signal.SIGSTOP)
        began_at = time.monotonic()
        await wait_restart(server, 0)
        assert time.monotonic() - began_at > 3.5

    await check_survival(server, stop, expected)
    assert "ended no step for 4 s" in server.log


@pytest.mark.parametrize(
    ("setting", "max_restarts"), [("poison_token", 2), ("decode_poison_token", 3)]
)
async def test_a_poisonous_request_is_quarantined_and_the_rest_go_on(
    launch, expected: Outputs, setting: str, max_restarts: int
) -> None:
    server = await asyncio.to_thread(launch(step_s=0.01, **{setting: 1}).wait_ready)
    poison = {"prompt": f"x{POISON}", "max_tokens": 5}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:

        async def drop_poison() -> None:
            response = await client.post("/v1/completions", json=poison)
            assert response.status_code == 500, server.log
            assert response.json()["error"]["code"] == "request_quarantined"
            assert response.headers["x-should-retry"] == "false"

        tasks = [asyncio.create_task(read(client, fields)) for fields in bodies()]
        await asyncio.to_thread(server.wait_at_least, "vllm:num_requests_running", NUM_RUNNING)
        # A request that has made a few tokens is no likely cause of the failure to come.
        num_tokens = await asyncio.to_thread(server.metric, TOKENS)
        while (
            await asyncio.to_thread(server.metric, TOKENS) < num_tokens + 22 * NUM_CLEARING_TOKENS
        ):
            await asyncio.sleep(0.01)
        await drop_poison()
        num_restarts = server.metric("headway_engine_restarts_total")
        assert num_restarts <= max_restarts
        assert await asyncio.gather(*tasks) == expected
        # Asked once more, it is refused without costing another engine.
        await drop_poison()
    assert server.metric("headway_engine_restarts_total") == num_restarts
    assert server.log.count("is quarantined") == 1


@pytest.mark.full
async def test_a_request_that_hangs_engines_is_quarantined(launch) -> None:
    """Its step takes longer than others would wait for a request on trial."""
    settings = {"engine_hang_s": 6.0}
    server = await asyncio.to_thread(launch(hang_token=1, server=settings).wait_ready)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        hang = client.post("/v1/completions", json={"prompt": f"x{POISON}", "max_tokens": 5})
        hanging = asyncio.create_task(hang)
        await asyncio.sleep(0.5)
        texts, _ = await read(client, body(1, max_tokens=20))
        response = await hanging
        assert response.status_code == 500, server.log
        assert response.json()["error"]["code"] == "request_quarantined"
        assert await read(client, body(1, max_tokens=20)) == (texts, _)
    assert server.metric("headway_engine_restarts_total") <= 3


async def test_requests_wait_while_an_engine_is_replaced(launch) -> None:
    server = await asyncio.to_thread(launch(load_s=1.0, step_s=0.02).wait_ready)
    os.kill(engine_pids(server)[-1], signal.SIGKILL)
    await wait_restart(server, 0)
    assert httpx.get(f"{server.url}/health/ready").json() == {"status": "loading"}
    assert httpx.get(f"{server.url}/health").status_code == 503
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        texts, _ = await read(client, body(1, max_tokens=20))
        leaver = asyncio.create_task(read(client, body(2)))
        await asyncio.to_thread(server.wait_for, "vllm:num_requests_running", 1)
        os.kill(engine_pids(server)[-1], signal.SIGKILL)
        await wait_restart(server, 1)
        leaver.cancel()  # while no engine knows of it
        await asyncio.gather(leaver, return_exceptions=True)
    assert len(texts[0]) == 20
    server.wait_for("headway_requests_aborted_total", 1)
    server.wait_ready()
    assert server.metric("vllm:num_requests_running") == 0
    assert server.stop() == 0


async def test_too_many_failures_end_in_a_clean_503(launch, tmp_path: Path) -> None:
    cause = tmp_path / "cause"
    server = await asyncio.to_thread(
        launch(
            step_s=0.01, dies_loading_file=str(cause), server={"max_engine_restarts": 2}
        ).wait_ready
    )
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        stream = asyncio.create_task(client.post("/v1/completions", json=body(1, stream=True)))
        await asyncio.to_thread(server.wait_for, "vllm:num_requests_running", 1)
        await asyncio.sleep(0.1)
        cause.touch()
        os.kill(engine_pids(server)[-1], signal.SIGKILL)
        text = (await stream).text
        assert '"service_unavailable_error"' in text and text.endswith("data: [DONE]\n\n")
        refused = await client.post("/v1/completions", json=body(1))
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert (await client.get("/health/ready")).json() == {"status": "failed"}
        assert (await client.get("/health/live")).status_code == 503
    assert server.metric("headway_engine_restarts_total") == 2
    assert server.process.poll() is None
    assert server.stop() == 0
