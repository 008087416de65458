"""GET /v1/requests/{id}/explanation: who may see what, by which id, and what it says."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from typer.testing import CliRunner

from benchmarks.support.servers import RunningServer
from headway.cli.app import make_app
from headway.clock import SystemClock
from headway.core.causes import CauseTime, WaitCause
from headway.core.events import Admitted, Arrived, Finished
from headway.core.request import FinishReason
from headway.core.terms import Terms
from headway.observe import Ledger, RequestTable
from headway.observe.ledger.ledger import Archive
from headway.server.api.operate.explanations import MAX_LOOKUPS
from tests.server.api.test_openapi import document_of, validator
from tests.support.apps import check_error, client_of, serving
from tests.support.rows import make_row, make_writer, wait_until

KEYS = ("key-of-a", "key-of-b")
PATH = "/v1/requests/{}/explanation"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def an_account(tenant: str, name: str = "cmpl-1f") -> Ledger:
    """One that waited for blocks that another tenant held."""
    table = RequestTable()
    ledger = Ledger(table, SystemClock())
    terms = Terms(tenant=tenant)
    causes = (CauseTime(WaitCause.KV_BLOCKS, 1.5),)
    table.consume([Arrived(name, 1.0, 10, terms)])
    table.consume([Admitted(name, 2.5, 1.5, 0, 10, False, causes, "the-other")])
    table.consume([Finished(name, 3.0, FinishReason.STOP, 0)])
    ledger.set_client_id(name, "from-the-header")
    return ledger


def explanations_client(made: Any, ledger: Ledger, **scope: Any) -> httpx.AsyncClient:
    """Of somebody whom the guard let in."""
    from dataclasses import replace

    from starlette.applications import Starlette

    from headway.server.api.operate.explanations import explanations_router
    from headway.server.http.errors import install_error_handlers

    app = Starlette(routes=explanations_router(replace(made.context, ledger=ledger)))
    install_error_handlers(app, lambda _reason: None)

    async def admit(received: Any, receive: Any, send: Any) -> None:
        await app({**received, "state": scope}, receive, send)

    return client_of(admit)


async def ask(made: Any, ledger: Ledger, name: str, **scope: Any) -> httpx.Response:
    async with explanations_client(made, ledger, **scope) as client:
        return await client.get(PATH.format(name))


@pytest.fixture
async def made(local: Any) -> Any:
    async with serving(local) as made:
        yield made


async def test_own_requests_by_both_ids(made: Any) -> None:
    ledger = an_account("a")
    for name in ("cmpl-1f", "from-the-header"):
        answer = (await ask(made, ledger, name, tenant="a")).json()
        assert (answer["id"], answer["object"]) == ("cmpl-1f", "request.explanation")
        assert answer["queue_s"] == 1.5
        assert answer["causes"] == [
            {"cause": "kv_blocks", "seconds": 1.5, "held_by": "another tenant"}
        ]
        assert "1.5 s for KV blocks held mostly by another tenant" in answer["text"]
        assert "the-other" not in str(answer)


async def test_others_requests_look_like_none_at_all(made: Any) -> None:
    ledger = an_account("a")
    unknown = await ask(made, ledger, "cmpl-2f", tenant="b")
    check_error(unknown, 404)
    for name in ("cmpl-1f", "from-the-header"):
        for tenant in ("b", ""):
            assert (await ask(made, ledger, name, tenant=tenant)).content == unknown.content


async def test_an_admin_sees_all_accounts_and_their_tenants(made: Any) -> None:
    ledger = an_account("a")
    for name in ("cmpl-1f", "from-the-header"):
        answer = await ask(made, ledger, name, tenant="root", is_admin=True)
        assert "held mostly by tenant the-other" in answer.json()["text"]


async def test_keys_keep_tenants_apart_over_the_whole_app(local: Any) -> None:
    made = await local("abc", api_key=KEYS)
    client, body = made.client, {"prompt": "hi", "max_tokens": 3}
    answer = await client.post("/v1/completions", json=body, headers=bearer(KEYS[0]))
    ids = (answer.json()["id"], answer.headers["x-request-id"])
    assert ids[0] != ids[1]
    for name in ids:
        found = await client.get(PATH.format(name), headers=bearer(KEYS[0]))
        assert found.status_code == 200
        assert found.json()["num_output_tokens"] == answer.json()["usage"]["completion_tokens"]
        other = await client.get(PATH.format(name), headers=bearer(KEYS[1]))
        check_error(other, 404)
        check_error(await client.get(PATH.format(name)), 401)


async def test_an_id_that_the_client_chose(local: Any) -> None:
    made = await local("abc")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    chosen = {"x-request-id": "order 66"}
    answer = await made.client.post("/v1/chat/completions", json=body, headers=chosen)
    found = await made.client.get(PATH.format("order%2066"))
    assert found.json()["id"] == answer.json()["id"]
    assert found.json()["client_id"] == "order 66"


async def test_a_live_request(local: Any) -> None:
    made = await local("abc" * 30)
    made.process.is_paused = True
    body = {"prompt": "hi", "max_tokens": 50, "n": 2}
    chosen = {"x-request-id": "mine"}
    answer = asyncio.create_task(made.client.post("/v1/completions", json=body, headers=chosen))
    while not made.process.added:
        await asyncio.sleep(0.01)
    waiting = (await made.client.get(PATH.format(made.process.added[0].id))).json()
    assert (waiting["state"], waiting["timeline"][-1]["kind"]) == ("waiting", "waiting")
    assert "so far" in waiting["text"]
    made.process.is_paused = False
    made.process._wake.set()
    usage = (await answer).json()["usage"]
    ended = (await made.client.get(PATH.format("mine"))).json()
    assert (ended["state"], ended["num_parts"]) == ("finished", 2)
    assert ended["num_output_tokens"] == usage["completion_tokens"]
    validator(await document_of(local), "Explanation").validate(ended)
    validator(await document_of(local), "Explanation").validate(waiting)


async def test_requests_that_only_the_database_knows(made: Any, tmp_path: Path) -> None:
    from headway.observe.ledger.databases import make_store

    url = f"sqlite://{tmp_path}/ledger.db"
    writer = make_writer(url, tmp_path / "spool")
    archive = Archive(writer, lambda: make_store(url, is_reader=True))
    ledger = Ledger(RequestTable(), SystemClock(), archive)
    ledger.start()
    writer.put(make_row(1))
    wait_until(lambda: writer.num_pending == 0)
    for name in ("cmpl-1", "client-1"):
        assert (await ask(made, ledger, name, tenant="b")).json()["num_output_tokens"] == 1
        check_error(await ask(made, ledger, name, tenant="a"), 404)
    ledger.close()
    (tmp_path / "ledger.db").write_bytes(b"this is no database" * 100)
    error = check_error(await ask(made, ledger, "cmpl-1", tenant="b"), 503)
    assert "database" not in error["message"] and "ledger" in error["message"]


async def test_a_database_that_takes_its_time_keeps_few_waiting(made: Any) -> None:
    is_free = threading.Event()

    class Slow(Ledger):
        def find_stored(self, name: str, tenant: str | None) -> None:
            is_free.wait(10)

    client = explanations_client(
        made, Slow(RequestTable(), SystemClock(), cast("Archive", object()))
    )
    asked = [asyncio.create_task(client.get(PATH.format("x"))) for _ in range(MAX_LOOKUPS)]
    await asyncio.sleep(0.2)
    check_error(await client.get(PATH.format("x")), 503)
    is_free.set()
    assert [(await one).status_code for one in asked] == [404] * MAX_LOOKUPS
    assert (await client.get(PATH.format("x"))).status_code == 404
    await client.aclose()


@pytest.mark.parametrize("name", ["%00", "x%00y", "%F0%9F%98%80", "%ED%A0%80", "x" * 129, "%0a"])
async def test_what_can_be_no_id_is_not_asked_for(made: Any, name: str) -> None:
    def open_reader() -> Any:
        raise AssertionError("the database was asked")

    archive = Archive(None, open_reader)  # pyright: ignore[reportArgumentType]
    ledger = Ledger(RequestTable(), SystemClock(), archive)
    check_error(await ask(made, ledger, name, tenant=""), 404)


async def test_without_a_ledger_nothing_is_known(local: Any) -> None:
    async with serving(local) as made:
        check_error(await made.public.get(PATH.format("cmpl-1")), 404)


def test_the_command_asks_a_server(fake_server: RunningServer) -> None:
    body = {"prompt": "hi", "max_tokens": 5}
    answer = httpx.post(f"{fake_server.url}/v1/completions", json=body).json()
    ask = ["explain", "--url", fake_server.url]
    result = CliRunner().invoke(make_app(), [*ask, answer["id"]])
    assert f"Request {answer['id']} (tier default) arrived" in result.stdout
    assert "with 5 output tokens" in result.stdout
    unknown = CliRunner().invoke(make_app(), [*ask, "cmpl-none"])
    assert "there is no such request" in str(unknown.exception)
