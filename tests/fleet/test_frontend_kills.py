"""Frontends that die under streams, which their clients resume elsewhere."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.faults import frontend_kills
from benchmarks.faults.frontend_kills import Stream, read_ledger, read_stream
from benchmarks.support.fleet_loads import NUM_KINDS, bodies, client_of, until_all_run
from benchmarks.support.fleets import Fleet
from benchmarks.support.history import problems
from benchmarks.support.servers import RunningServer
from headway.tenancy.keys import digest_of, write_digest
from tests.fleet.conftest import NUM_BLOCKS, STEP_S, wait_log, wait_up

LONG = {"prompt": "a long one", "seed": 5, "max_tokens": 250}


async def test_streams_survive_their_frontend(fleet: Fleet, tmp_path: Path, is_full: bool) -> None:
    """The same tokens, each once; nothing is computed twice; one row in the ledger."""
    num_kills, num_streams = (20, 32) if is_full else (1, NUM_KINDS)
    ledger = tmp_path / "ledger.db"
    battery = frontend_kills.fake_battery(fleet, ledger, num_streams, seed=5)
    figures = await frontend_kills.run(battery, num_kills, ledger)
    assert not frontend_kills.failures_in(figures), figures


@pytest.mark.full
@pytest.mark.model
async def test_streams_of_the_model_survive_their_frontend(
    fleet: Fleet, model_path: Path, tmp_path: Path
) -> None:
    battery = frontend_kills.model_battery(fleet, model_path, NUM_KINDS, seed=5)
    figures = await frontend_kills.run(battery, 4, tmp_path / "ledger.db")
    assert not frontend_kills.failures_in(figures), figures


async def start(
    fleet: Fleet, num_frontends: int = 2, num_engines: int = 2, **server: object
) -> list[RunningServer]:
    for _ in range(num_engines):
        fleet.start_engine(step_s=STEP_S, num_blocks=NUM_BLOCKS)
    frontends = [fleet.start_frontend(**server) for _ in range(num_frontends)]
    if "tenants_file" not in server:
        for frontend in frontends:
            await wait_up(fleet, frontend)
    return frontends


@asynccontextmanager
async def clients_of(servers: list[RunningServer]) -> AsyncIterator[list[httpx.AsyncClient]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(client_of(server)) for server in servers]


async def undisturbed(clients: list[httpx.AsyncClient], body: dict[str, Any]) -> Stream:
    stream = Stream(body)
    await read_stream(clients, 0, stream)
    assert not stream.history.errors
    return stream


@pytest.mark.full
async def test_an_adopted_stream_survives_its_engine_and_another_frontend(fleet: Fleet) -> None:
    """Frontend, engine process, frontend: one after the other, under one set of streams."""
    servers = await start(fleet, num_frontends=3)
    requests = [body for body in bodies(250, NUM_KINDS) if "stop" not in body]
    async with clients_of(servers) as clients:
        references = [await undisturbed(clients, body) for body in requests]
        streams = [Stream(body) for body in requests]
        tasks = [asyncio.create_task(read_stream(clients, 0, one)) for one in streams]
        await until_all_run([one.history for one in streams])
        servers[0].process.kill()
        await until_resumed(streams, 1)
        fleet.engines[0].kill_engine()
        await asyncio.sleep(0.3)
        servers[1].process.kill()
        await until_resumed(streams, 2)
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
    pairs = zip(streams, references, strict=True)
    assert not [found for one, right in pairs if (found := problems(one.history, right.history))]


async def until_resumed(streams: list[Stream], num_times: int) -> None:
    """Wait until every stream has got events from as many further frontends."""
    sizes = [len(one.history.times) for one in streams]
    async with asyncio.timeout(20):
        while any(
            one.num_resumed < num_times or len(one.history.times) < size + 3
            for one, size in zip(streams, sizes, strict=True)
        ):
            await asyncio.sleep(0.01)


@pytest.mark.full
async def test_a_stream_moves_between_frontends_that_live(fleet: Fleet, tmp_path: Path) -> None:
    """The client comes back elsewhere: the first frontend ends its part, and it is billed once."""
    ledger = tmp_path / "ledger.db"
    servers = await start(fleet, ledger_url=f"sqlite://{ledger}")
    async with clients_of(servers) as clients:
        reference = await undisturbed(clients, LONG)
        stream = Stream(LONG)
        first = asyncio.create_task(read_stream(clients[:1], 0, stream))
        await until_all_run([stream.history])
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await read_stream(clients[1:], 0, stream)
        assert not problems(stream.history, reference.history)
        await wait_log(servers[1], "is adopted from")
        expected = {one.request_id: one.history.num_tokens for one in (reference, stream)}
        async with asyncio.timeout(20):
            while read_ledger(ledger) != expected:
                await asyncio.sleep(0.1)


@pytest.mark.full
async def test_an_orphan_whose_engine_process_dies_is_sent_again(fleet: Fleet) -> None:
    servers = await start(fleet, num_engines=1)
    async with clients_of(servers) as clients:
        reference = await undisturbed(clients, LONG)
        stream = Stream(LONG)
        reading = asyncio.create_task(read_stream(clients[:1], 0, stream))
        await until_all_run([stream.history])
        servers[0].process.kill()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await wait_log(fleet.engines[0], "1 orphans")
        fleet.engines[0].kill_engine()
        await wait_log(servers[1], "has failed, and starts again")
        await read_stream(clients[1:], 0, stream)  # it waits until the engine is back
        assert not problems(stream.history, reference.history)


@pytest.mark.full
async def test_without_its_engine_a_request_is_asked_again_with_its_seed(fleet: Fleet) -> None:
    servers = await start(fleet, num_engines=2)
    async with clients_of(servers) as clients:
        reference = await undisturbed(clients, LONG)
        stream = Stream(LONG)
        reading = asyncio.create_task(read_stream(clients[:1], 0, stream))
        await until_all_run([stream.history])
        for engine in fleet.engines:
            engine.kill_host()
        servers[0].process.kill()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        fleet.engines[0].restart()
        await wait_log(servers[1], lambda log: log.count(" is up: ") >= 3)
        answer = await clients[1].get(f"/v1/streams/{stream.request_id}")
        assert answer.status_code == 404 and "same seed" in answer.text
        again = await undisturbed(clients[1:], LONG)
        assert not problems(again.history, reference.history)


@pytest.mark.full
async def test_an_orphan_is_adopted_by_its_tenant_only(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    hashed = {name: write_digest(digest_of(name.encode())) for name in ("a", "b")}
    lines = [f"  {name}: {{keys: ['{digest}']}}" for name, digest in hashed.items()]
    path.write_text("\n".join(["tenants:", *lines]))
    servers = await start(fleet, tenants_file=str(path))
    for server in servers:
        await asyncio.to_thread(server.wait_ready, "a")
        await wait_log(server, lambda log: log.count(" is up: ") >= 2)
    async with clients_of(servers) as clients:
        body = {**LONG, "stream": True, "stream_options": {"resumable": True}}
        headers = {"Authorization": "Bearer a"}
        last_id = ""
        async with clients[0].stream(
            "POST", "/v1/completions", json=body, headers=headers
        ) as response:
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    last_id = line.removeprefix("id: ")
                    break
            servers[0].process.kill()
        name = last_id.rpartition(".")[0]
        began_at = time.monotonic()
        for key, status in (("", 401), ("b", 404), ("nobody", 401)):
            given = {"Authorization": f"Bearer {key}"} if key else {}
            answer = await clients[1].get(f"/v1/streams/{name}", headers=given)
            assert answer.status_code == status, answer.text
        unknown = await clients[1].get(f"/v1/streams/cmpl-{'0' * 32}", headers=headers)
        assert unknown.status_code == 404
        assert time.monotonic() - began_at < 5.0
        rest = await clients[1].get(
            f"/v1/streams/{name}", headers={**headers, "Last-Event-ID": last_id}
        )
        assert rest.status_code == 200 and rest.text.endswith("data: [DONE]\n\n")
        chunks = [json.loads(line[6:]) for line in rest.text.splitlines() if line[:7] == "data: {"]
        ends = [c["finish_reason"] for one in chunks for c in one["choices"]]
        assert [end for end in ends if end] == ["length"]
