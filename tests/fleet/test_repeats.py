"""Requests with an Idempotency-Key that are sent again to another frontend."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx

from benchmarks.faults.frontend_kills import COMPUTED
from benchmarks.support.fleet_loads import RUNNING
from benchmarks.support.fleets import Fleet
from benchmarks.support.ledgers import read_ledger
from tests.fleet.test_frontend_kills import clients_of, start

LONG = {"prompt": "a long one", "seed": 5, "max_tokens": 150, "n": 3}
SHORT = {"prompt": "a short one", "seed": 6, "max_tokens": 5}


async def post(client: httpx.AsyncClient, body: dict[str, Any], key: str = "") -> httpx.Response:
    headers = {"Idempotency-Key": key} if key else {}
    return await client.post("/v1/completions", json=body, headers=headers)


def texts(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


async def test_a_repeat_finds_its_answer_at_another_frontend(fleet: Fleet, tmp_path: Path) -> None:
    """Ended or running: the same answer, computed once, one row in the ledger."""
    ledger = tmp_path / "ledger.db"
    servers = await start(fleet, num_engines=1, ledger_url=f"sqlite://{ledger}")
    async with clients_of(servers) as (first, second):
        reference = texts(await post(first, LONG))
        ended = await post(first, SHORT, "ended")
        again = await post(second, SHORT, "ended")
        assert again.json()["id"] == ended.json()["id"] and texts(again) == texts(ended)
        assert (await post(second, {**SHORT, "max_tokens": 6}, "ended")).status_code == 422
        servers[1].wait_for(RUNNING, 0)
        before = servers[1].metric(COMPUTED)
        lost = asyncio.create_task(post(first, LONG, "lost"))
        await asyncio.to_thread(servers[1].wait_for, RUNNING, 3)
        servers[0].process.kill()
        with contextlib.suppress(httpx.HTTPError):
            await lost
        answer = await post(second, LONG, "lost")
        assert texts(answer) == reference
        assert texts(await post(second, LONG, "lost")) == reference
        servers[1].wait_for(RUNNING, 0)
        # The prompt but for its cached block, and the tokens of three samples.
        assert servers[1].metric(COMPUTED) - before <= len(LONG["prompt"]) + 3 * 150
        ids = {ended.json()["id"]: 5, answer.json()["id"]: 450}
        async with asyncio.timeout(20):
            while {name: read_ledger(ledger).get(name) for name in ids} != ids:
                await asyncio.sleep(0.1)
        assert len(read_ledger(ledger)) == 3
