"""The life of the server process: start, readiness, signals, failures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from contextlib import closing

import httpx
import pytest

from headway.config import ServerConfig
from headway.errors import ConfigError
from headway.server import listen


def engine_pid(server) -> int:
    found = re.search(r"^engine (\d+)$", server.log, re.MULTILINE)
    assert found is not None, server.log
    return int(found[1])


def wait_gone(pid: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


def test_a_port_in_use_is_said_at_once() -> None:
    with closing(listen(ServerConfig(port=0, admin_port=0))) as taken:
        port = taken.public.getsockname()[1]
        expected = f"port {port} on 127.0.0.1 is in use; choose another with --port"
        with pytest.raises(ConfigError, match=expected):
            listen(ServerConfig(port=port))
        with pytest.raises(ConfigError, match="choose another with --admin-port"):
            listen(ServerConfig(port=0, admin_port=port))


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        listen(ServerConfig(host="203.0.113.1", port=0))
    with pytest.raises(ConfigError, match="cannot listen"):
        listen(ServerConfig(host="no such host", port=0))


def test_a_port_in_use_starts_no_engine(launch) -> None:
    with closing(listen(ServerConfig(port=0, admin_port=None))) as taken:
        server = launch(port=taken.public.getsockname()[1])
        assert server.process.wait(20) == 2
        assert "is in use" in server.log
        assert "engine" not in server.log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(launch, number) -> None:
    server = launch().wait_ready()
    pid = engine_pid(server)
    assert f"ready on {server.url}" in server.log
    server.process.send_signal(number)
    assert server.process.wait(10) == 0
    wait_gone(pid)
    assert "Traceback" not in server.log


def test_live_while_loading_and_ready_after(launch) -> None:
    server = launch(load_s=1.5)
    deadline = time.monotonic() + 60
    seen = None
    while seen is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            seen = httpx.get(f"{server.url}/health/ready").status_code
    assert seen == 503
    assert httpx.get(f"{server.url}/health/live").status_code == 200
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 503
    server.wait_ready()
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code == 200


@pytest.mark.timing
def test_a_signal_while_loading(launch) -> None:
    server = launch(load_s=60.0)
    deadline = time.monotonic() + 60
    while "engine" not in server.log and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    started_at = time.monotonic()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(10) == 0
    assert time.monotonic() - started_at < 3
    wait_gone(engine_pid(server))
    assert "Traceback" not in server.log


def test_an_engine_that_cannot_load(launch) -> None:
    server = launch(fails_loading=True)
    assert server.process.wait(20) == 1
    assert "the weights are not there" in server.log
    wait_gone(engine_pid(server))


async def open_stream(client: httpx.AsyncClient) -> str:
    body = {"prompt": "x", "max_tokens": 1900, "stream": True}
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for chunk in response.aiter_text():
            text += chunk
    return text


async def start_stream(server, client: httpx.AsyncClient) -> asyncio.Task[str]:
    task = asyncio.create_task(open_stream(client))
    await asyncio.to_thread(server.wait_for, "vllm:num_requests_running", 1)
    return task


async def test_a_stream_in_progress_may_finish(launch) -> None:
    server = await asyncio.to_thread(launch(step_s=0.001).wait_ready)
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        task = await start_stream(server, client)
        server.process.send_signal(signal.SIGTERM)
        text = await task
    assert text.endswith("data: [DONE]\n\n")
    assert "error" not in text
    assert await asyncio.to_thread(server.process.wait, 10) == 0


async def test_a_signal_to_all_processes_lets_a_stream_finish(launch) -> None:
    """systemd signals every process of the service, the engine too."""
    server = await asyncio.to_thread(launch(step_s=0.001).wait_ready)
    pid = engine_pid(server)
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        task = await start_stream(server, client)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
        server.process.send_signal(signal.SIGTERM)
        text = await task
    assert text.endswith("data: [DONE]\n\n")
    assert "error" not in text
    assert await asyncio.to_thread(server.process.wait, 10) == 0
    assert "replacing the engine" not in server.log
    wait_gone(pid)


async def test_a_stream_that_takes_too_long_is_ended_with_an_error(launch) -> None:
    settings = {"shutdown_timeout": 1.0}
    server = await asyncio.to_thread(launch(server=settings, step_s=0.05).wait_ready)
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        task = await start_stream(server, client)
        server.process.send_signal(signal.SIGTERM)
        text = await task
    assert text.endswith("data: [DONE]\n\n")
    assert '"service_unavailable_error"' in text
    assert await asyncio.to_thread(server.process.wait, 10) == 0
    assert "Traceback" not in server.log
    wait_gone(engine_pid(server))


async def test_a_background_response_that_takes_too_long_fails(launch) -> None:
    settings = {"shutdown_timeout": 1.0}
    server = await asyncio.to_thread(launch(server=settings, step_s=0.05).wait_ready)
    body = {"input": "x", "max_output_tokens": 1900, "background": True}
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        short = {**body, "max_output_tokens": 5}
        names = [
            (await client.post("/v1/responses", json=one)).json()["id"] for one in (body, short)
        ]
        texts = [
            asyncio.create_task(client.get(f"/v1/responses/{name}?stream=true")) for name in names
        ]
        await asyncio.to_thread(server.wait_for, "vllm:num_requests_running", 2)
        server.process.send_signal(signal.SIGTERM)
        failed, drained = [(await task).text for task in texts]
    assert failed.endswith("data: [DONE]\n\n") and "event: response.failed" in failed
    assert drained.endswith("data: [DONE]\n\n") and "event: response.incomplete" in drained
    assert await asyncio.to_thread(server.process.wait, 10) == 0
    assert "Traceback" not in server.log


async def test_a_draining_server_refuses_new_requests(launch) -> None:
    server = await asyncio.to_thread(launch(step_s=0.002).wait_ready)
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        task = await start_stream(server, client)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        async with httpx.AsyncClient(base_url=server.url, timeout=5) as latecomer:
            refused = await latecomer.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            ready = await latecomer.get("/health/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
            assert (await latecomer.get("/health/live")).status_code == 200
        text = await task
    assert text.endswith("data: [DONE]\n\n") and "error" not in text
    assert await asyncio.to_thread(server.process.wait, 10) == 0


@pytest.mark.timing
async def test_a_second_signal_ends_it_at_once(launch) -> None:
    server = await asyncio.to_thread(launch(step_s=0.05).wait_ready)
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        task = await start_stream(server, client)
        server.process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.5)
        started_at = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        with contextlib.suppress(httpx.TransportError):
            await task
    assert await asyncio.to_thread(server.process.wait, 10) == 130
    assert time.monotonic() - started_at < 2
    assert "Traceback" not in server.log
    wait_gone(engine_pid(server))


@pytest.mark.timing
def test_statistics_are_logged_and_end_with_an_idle_line(launch) -> None:
    server = launch(step_s=0.002).wait_ready()
    body = {"prompt": "x", "max_tokens": 200}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).status_code == 200
    time.sleep(1.0)
    lines = [line for line in server.log.splitlines() if "tok/s" in line]
    assert any("running 1, waiting 0" in line for line in lines)
    assert "running 0, waiting 0, KV 0.0%" in lines[-1]
    assert "output 0.0 tok/s" in lines[-1]
    assert "output 0.0 tok/s" not in lines[-2]
    assert server.stop() == 0


async def test_background_work_that_fails_starts_again_and_the_server_goes_on(launch) -> None:
    server = launch(module="tests.server.failing_sweep", step_s=0.002)
    server = await asyncio.to_thread(server.wait_ready)
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        text = await open_stream(client)
    assert text.endswith("data: [DONE]\n\n") and "error" not in text
    assert server.log.count("KeyError: 'a fault in the sweep'") == 1
    assert server.log.count("the sweep goes on") == 1
    assert await asyncio.to_thread(server.stop) == 0
