"""What a real server wrote into its ledger is simulated: requests of two tenants, end to end."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from headway.cli.observe.ledger import open_ledger
from headway.observe.ledger.store import TimeRange, UnreadableRow
from headway.observe.trace.account import RequestAccount
from headway.sim.prediction.setup import Setup
from headway.sim.profile.catalog import find_profile
from headway.sim.recording.accounts import load_of_accounts
from headway.sim.recording.items import RecordedItem
from headway.tenancy.edit import add_tenant
from tests.cli.test_cli import headway
from tests.server.test_crash import body
from tests.server.test_ledger import ledger_url, wait_rows

PROFILE = "smollm2-135m-2-cores"
SHARED = "You answer in one word. " * 20


async def ask(client: httpx.AsyncClient, key: str, **fields: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    answer = await client.post("/v1/completions", json=body(0, **fields), headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def leave(client: httpx.AsyncClient, key: str) -> None:
    """Ask for a long answer, and disconnect after some of it."""
    fields = body(99, stream=True, max_tokens=1500)
    headers = {"Authorization": f"Bearer {key}"}
    async with client.stream("POST", "/v1/completions", json=fields, headers=headers) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                return


async def serve_two_tenants(launch: Any, folder: Path) -> list[dict[str, Any]]:
    """Have a server write its ledger; return the answers that were whole."""
    tenants = folder / "tenants.yaml"
    bulk = add_tenant(tenants, "bulk", {"weight": 0.5, "quotas": {"kv_share": 0.5}}).key
    chat = add_tenant(tenants, "chat", {"weight": 2.0}).key
    assert bulk and chat
    settings = {"ledger_url": ledger_url(folder), "tenants_file": str(tenants)}
    server = await asyncio.to_thread(launch(server=settings, step_s=0.005).wait_ready, chat)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        answers = [await ask(client, chat, prompt=SHARED, max_tokens=4)]
        answers += await asyncio.gather(
            *(ask(client, chat, prompt=f"{SHARED}{n}", max_tokens=4 + n) for n in range(12)),
            *(ask(client, bulk, prompt=f"{n} " * 40, max_tokens=30, priority=2) for n in range(8)),
            ask(client, chat, prompt=["one", "a second prompt"], n=2, max_tokens=7, ttft_ms=60_000),
        )
        await leave(client, bulk)
    wait_rows(folder, len(answers) + 1)
    assert server.stop() == 0, server.log
    return answers


def accounts_in(folder: Path) -> list[RequestAccount]:
    with open_ledger(ledger_url(folder)) as ledger:
        found = list(ledger.store.accounts(TimeRange()))
    assert not any(isinstance(one, UnreadableRow) for one in found)
    return [one for one in found if isinstance(one, RequestAccount)]


def check_accounts(accounts: list[RequestAccount], answers: list[dict[str, Any]]) -> None:
    by_id = {one.id: one for one in accounts}
    assert [one.arrived_at for one in accounts] == sorted(one.arrived_at for one in accounts)
    for answer in answers:
        found, usage = by_id.pop(answer["id"]), answer["usage"]
        assert found.num_prompt_tokens == usage["prompt_tokens"]
        assert (
            found.num_output_tokens == usage["completion_tokens"] <= found.max_tokens * found.n * 2
        )
        is_chat = found.tenant == "chat"
        assert (found.weight, found.max_kv_share) == ((2.0, 1.0) if is_chat else (0.5, 0.5))
        assert found.priority == (0 if is_chat else 2)
        is_several = found.num_parts > 1
        assert (found.n, found.num_parts) == ((2, 4) if is_several else (1, 1))
        assert found.target_ttft_s == (60.0 if is_several else None)
    (gone,) = by_id.values()
    assert (gone.finish_reason, gone.tenant, gone.max_tokens) == ("abort", "bulk", 1500)
    assert 0 < gone.num_output_tokens < 1500
    assert gone.first_token_s is not None and gone.duration_s > gone.first_token_s


def check_load(accounts: list[RequestAccount]) -> None:
    capacity = Setup.of(find_profile(PROFILE)).spec.capacity
    load = load_of_accounts(accounts, capacity)
    items = [one for one in load.workload.requests if isinstance(one, RecordedItem)]
    assert load.counts.num_even == 0
    several = accounts[[one.num_parts for one in accounts].index(4)]
    chosen = [one for one in items if one.terms.targets.ttft_s == 60.0]
    assert {len(one.prompt_token_ids) for one in chosen} == {len("one"), len("a second prompt")}
    assert sum(one.num_output_tokens for one in chosen) == several.num_output_tokens
    for one in accounts:
        if one.num_parts == 1:
            length = one.num_prompt_tokens, one.num_output_tokens, one.tenant
            at = pytest.approx(one.arrived_at - accounts[0].arrived_at, abs=1e-5)
            assert any(
                length == (len(item.prompt_token_ids), item.num_output_tokens, item.tenant)
                and at == item.at
                for item in items
            )
    long = [one for one in accounts if one.num_prompt_tokens >= len(SHARED)]
    cached = [one for one in long if one.num_cached_tokens]
    assert cached, "the system prompt was cached"
    starts = Counter(
        one.prompt_token_ids[0] for one in items if len(one.prompt_token_ids) >= len(SHARED)
    )
    assert sorted(starts.values()) == [1] * (len(long) - len(cached)) + [len(cached)]


def make_some_rows_old(path: Path, accounts: list[RequestAccount]) -> None:
    """Have one row as an older release wrote it, and one as none did."""
    new = ("max_tokens", "n", "priority", "weight", "max_kv_share", "is_spot", "target_ttft_s")
    old = {k: v for k, v in msgspec.to_builtins(accounts[0]).items() if k not in new}
    with closing(sqlite3.connect(path)) as connection:
        for one, content in ((accounts[0], json.dumps(old)), (accounts[1], "{")):
            connection.execute(
                "UPDATE headway_requests SET account = ? WHERE request_id = ?", [content, one.id]
            )
        connection.commit()


async def test_requests_of_a_server_are_simulated(launch: Any, tmp_path: Path) -> None:
    answers = await serve_two_tenants(launch, tmp_path)
    accounts = accounts_in(tmp_path)
    check_accounts(accounts, answers)
    check_load(accounts)
    document = tmp_path / "figures.json"
    arguments = (
        "simulate", PROFILE, "--from-ledger", ledger_url(tmp_path), "--runs", "1",
        "--set", "policy=fcfs", "--tenant", "bulk.weight=2", "--json", str(document),
    )  # fmt: skip
    done = await asyncio.to_thread(headway, *arguments)
    assert done.returncode == 0, done.stderr
    about = json.loads(document.read_text())["about"]
    assert f"; {len(answers) + 1} requests of the ledger, coarse" in about
    assert "1 had several prompts or samples, which are requests here (26 in all)" in about
    assert "left out" not in about and "older" not in about
    assert re.search(r"^ *chat +17 ", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^ *bulk +9 ", done.stdout, re.MULTILINE), done.stdout
    make_some_rows_old(tmp_path / "ledger.db", accounts)
    done = await asyncio.to_thread(headway, *arguments)
    assert done.returncode == 0, done.stderr
    about = json.loads(document.read_text())["about"]
    assert f"; {len(answers)} requests of the ledger, coarse" in about
    assert "1 left out that cannot be read" in about and "1 by an older release" in about
