"""The routes of the dashboard: who may use them, and what they answer."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.support.fleets import Fleet
from benchmarks.support.servers import Launcher, RunningServer
from headway.config import Config, LedgerConfig, ServerConfig
from headway.dashboard.files import CSP
from headway.dashboard.settings import setting_rows
from headway.dashboard.stream import MAX_VIEWERS
from headway.tenancy.keys import digest_of, write_digest
from tests.support.apps import check_error, serving

API = "/dashboard/api"
ADMIN, TENANT = "hw-key-of-the-admin", "hw-key-of-a-tenant"
XSS = (
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "'\"><svg/onload=alert(1)>",
    "javascript:alert(1)", "{{constructor.constructor('alert(1)')()}}", "__proto__", "constructor",
    "</script><script>alert(1)</script>", "\\u003cscript\\u003e", "&lt;b&gt;", "${alert(1)}",
)  # fmt: skip
READS = ("/tenants", "/requests", "/requests/x", "/engines", "/settings", "/stream")
ACTIONS = (("DELETE", "/requests/x"), ("POST", "/drain"), ("POST", "/log-level"))


@pytest.fixture
def tenants_file(tmp_path: Path) -> str:
    path = tmp_path / "tenants.yaml"
    path.write_text(
        "tiers: {gold: {weight: 2, price: {prompt: 1, output: 4}}}\n"
        "tenants:\n"
        f"  root: {{keys: ['{_digest(ADMIN)}'], admin: true}}\n"
        f"  team: {{keys: ['{_digest(TENANT)}'], tier: gold,\n"
        "    quotas: {tokens_per_minute: 1000}}\n"
    )
    return str(path)


def _digest(key: str) -> str:
    return write_digest(digest_of(key.encode()))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_only_an_administrator_gets_data(local, tenants_file) -> None:
    async with serving(local, tenants_file=tenants_file) as made:
        for path in READS:
            assert (await made.admin.get(API + path)).status_code == 401
            response = await made.admin.get(API + path, headers=bearer(TENANT))
            assert check_error(response, 403)["code"] == "admin_only"
        for method, path in ACTIONS:
            assert (await made.admin.request(method, API + path)).status_code == 401
            response = await made.admin.request(method, API + path, headers=bearer(TENANT), json={})
            check_error(response, 403)
        assert not made.context.admission.is_paused
        for path in ("/tenants", "/requests", "/engines", "/settings"):
            response = await made.admin.get(API + path, headers=bearer(ADMIN))
            assert response.status_code == 200
            assert response.headers["cache-control"] == "no-store"
        response = await made.admin.get(f"{API}/requests/x", headers=bearer(ADMIN))
        check_error(response, 404)


async def test_files_need_no_key_and_have_a_strict_policy(local, tenants_file) -> None:
    async with serving(local, tenants_file=tenants_file) as made:
        for client, prefix in ((made.admin, "/dashboard"), (made.public, "/playground")):
            for path in made.files:
                if not path.startswith(prefix):
                    continue
                response = await client.get(path)
                assert response.status_code == 200
                assert response.headers["content-security-policy"] == CSP
                assert response.headers["x-content-type-options"] == "nosniff"
                assert "team" not in response.text
                tag = {"If-None-Match": response.headers["etag"]}
                assert (await client.get(path, headers=tag)).status_code == 304
            check_error(await client.get(f"{prefix}/static/../data.py"), 401)
            check_error(await client.get(f"{prefix}/static/vendor"), 401)


async def test_pages_can_be_turned_off(local) -> None:
    async with serving(local, dashboard=False, playground=False) as made:
        assert not made.files
        check_error(await made.admin.get("/dashboard"), 404)
        check_error(await made.admin.get(f"{API}/settings"), 404)
        check_error(await made.public.get("/playground"), 404)
        assert (await made.admin.get("/metrics")).status_code == 200


async def test_a_tenant_and_its_request(local, tenants_file) -> None:
    async with serving(local, "abc", tenants_file=tenants_file) as made:
        body = {"prompt": "xy", "max_tokens": 3}
        answer = await made.public.post("/v1/completions", json=body, headers=bearer(TENANT))
        rows = (await made.admin.get(f"{API}/tenants", headers=bearer(ADMIN))).json()["tenants"]
        (row,) = rows
        assert (row["tenant"], row["tier"], row["weight"]) == ("team", "gold", 2.0)
        assert (row["counts"]["arrived"], row["counts"]["output_tokens"]) == (1, 3)
        num_prompt = answer.json()["usage"]["prompt_tokens"]
        assert row["counts"]["cost"] == pytest.approx((num_prompt + 4 * 3) / 1e6)
        left, per_minute = row["quotas"]["tokens_per_minute"]
        assert per_minute == 1000 and left <= 1000 - 3
        found = (await made.admin.get(f"{API}/tenants?search=roo", headers=bearer(ADMIN))).json()
        assert [one["tenant"] for one in found["tenants"]] == ["root"]
        listed = (await made.admin.get(f"{API}/requests", headers=bearer(ADMIN))).json()
        request_id = answer.json()["id"]
        assert [one["id"] for one in listed["ended"]] == [request_id]
        path = f"{API}/requests/{request_id}"
        account = (await made.admin.get(path, headers=bearer(ADMIN))).json()
        assert account["tenant"] == "team"
        assert account.get("queue_s", 0) == pytest.approx(
            sum(one["seconds"] for one in account.get("causes", ()))
        )
        response = await made.admin.delete(path, headers=bearer(ADMIN))
        check_error(response, 404)  # it has ended


async def test_an_abort_frees_the_blocks(local) -> None:
    async with serving(local, "a" * 150) as made:
        made.process.is_paused = True  # the request waits until it is aborted
        body = {"prompt": "xy", "max_tokens": 150}
        asking = asyncio.create_task(made.public.post("/v1/completions", json=body))
        async with asyncio.timeout(10):
            while not (live := (await made.admin.get(f"{API}/requests")).json()["live"]):
                await asyncio.sleep(0)
        response = await made.admin.delete(f"{API}/requests/{live[0]['id']}")
        assert response.json() == {"id": live[0]["id"], "aborted": True}
        answer = await asking
        assert answer.status_code == 409
        assert "administrator" in answer.json()["error"]["message"]
        made.process.is_paused = False
        async with asyncio.timeout(10):
            while (await made.admin.get(f"{API}/requests")).json()["num_live"]:
                await asyncio.sleep(0)
        assert made.process.scheduler.kv.pool.num_used == 0


async def test_drain_and_undrain(local) -> None:
    async with serving(local) as made:
        body = {"prompt": "x", "max_tokens": 1}
        assert (await made.admin.post(f"{API}/drain", json={"drain": True})).json() == {
            "status": "draining"
        }
        assert (await made.public.get("/health/ready")).status_code == 503
        response = await made.public.post("/v1/completions", json=body)
        assert "draining" in check_error(response, 503)["message"]
        await made.admin.post(f"{API}/drain", json={"drain": False})
        assert (await made.public.post("/v1/completions", json=body)).status_code == 200


async def test_actions_refuse_what_a_form_of_another_site_could_send(local) -> None:
    async with serving(local) as made:
        for path, body in (("/drain", '{"drain": true}'), ("/log-level", '{"level": "debug"}')):
            plain = {"Content-Type": "text/plain"}
            check_error(await made.admin.post(API + path, content=body, headers=plain), 415)
            for wrong in (
                "{}",
                "[]",
                '{"drain": 1}',
                '{"level": "x"}',
                "{",
                '{"x": 1}',
                "[" * 5000,
            ):
                kind = {"Content-Type": "application/json"}
                check_error(await made.admin.post(API + path, content=wrong, headers=kind), 400)
        assert not made.context.admission.is_paused


async def test_without_keys_actions_are_for_this_machine_only(local) -> None:
    async with serving(local, admin_host="0.0.0.0") as made:
        for method, path in ACTIONS:
            response = await made.admin.request(method, API + path, json={"drain": True})
            assert check_error(response, 403)["code"] == "keys_needed"
        assert not made.context.admission.is_paused
        assert (await made.admin.get(f"{API}/engines")).status_code == 200


async def test_log_level(local) -> None:
    before = logging.getLogger("headway").level
    try:
        async with serving(local) as made:
            response = await made.admin.post(f"{API}/log-level", json={"level": "error"})
            assert response.json() == {"level": "error"}
            assert logging.getLogger("headway").level == logging.ERROR
    finally:
        logging.getLogger("headway").setLevel(before)


def test_settings_show_what_differs_and_no_secrets() -> None:
    url = "postgresql://user:hunter2@db.example/ledger?password=hunter2"
    server = ServerConfig(api_key=("hunter2", "hunter3"), port=1234)
    rows = setting_rows(Config(server=server, ledger=LedgerConfig(ledger_url=url)))
    assert "hunter" not in json.dumps(rows)
    differs = {row["name"]: row["value"] for row in rows if row["differs"]}
    assert differs == {
        "api_key": "2 set",
        "port": "1234",
        "ledger_url": "postgresql://db.example/ledger",
    }
    assert all(row["about"] for row in rows)


# -------------------------------------------------------------- over a socket


@pytest.fixture
def guarded(launch: Launcher, tmp_path: Path) -> Iterator[RunningServer]:
    """A server whose gateway may name tenants as it likes."""
    path = tmp_path / "tenants.yaml"
    path.write_text(f"tenants: {{root: {{keys: ['{_digest(ADMIN)}'], admin: true}}}}")
    settings = {"tenants_file": str(path), "trusted_proxy": ["127.0.0.1"]}
    yield launch(server=settings, scheduling_policy="fair").wait_ready(ADMIN)


def read_frames(response: httpx.Response, count: int) -> list[dict[str, Any]]:
    frames = []
    for line in response.iter_lines():
        if line.startswith("data: "):
            frames.append(json.loads(line.removeprefix("data: ")))
        if len(frames) == count:
            break
    return frames


def test_names_that_look_like_code_arrive_as_text(guarded: RunningServer) -> None:
    with httpx.Client(headers=bearer(ADMIN), timeout=20) as client:
        body = {"prompt": "x", "max_tokens": 2}
        sent = []
        for text in XSS:
            headers = {"x-gateway-inference-fairness-id": text, "X-Request-Id": text}
            answer = client.post(f"{guarded.url}/v1/completions", json=body, headers=headers)
            if answer.status_code == 200:
                sent.append(text)
        assert len(sent) >= 6
        response = client.get(f"{guarded.admin_url}{API}/tenants")
        assert response.headers["content-type"] == "application/json"
        assert {row["tenant"] for row in response.json()["tenants"]} == set(sent)
        with client.stream("GET", f"{guarded.admin_url}{API}/stream") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            (history,) = read_frames(stream, 1)
        assert history["type"] == "history"
        assert set(history["loads"]["tenants"]) <= set(sent)


def test_a_frontend_shows_its_engines(tmp_path: Path, tokenizer_path: Path) -> None:
    fleet = Fleet(tmp_path, tokenizer_path)
    try:
        for _ in range(2):
            fleet.start_engine()
        server = fleet.start_frontend(routing="least-loaded").wait_ready()
        with httpx.Client(timeout=20) as client:
            for number in range(4):
                body = {"prompt": f"{number}", "max_tokens": 40, "ignore_eos": True}
                answer = client.post(f"{server.url}/v1/completions", json=body)
                assert answer.status_code == 200
            found = client.get(f"{server.admin_url}{API}/engines").json()
        assert (found["is_frontend"], found["rule"], found["routers"]) == (True, "least-loaded", [])
        assert {one["name"] for one in found["engines"]} == {one.address for one in fleet.engines}
        assert sum(one["num_routed"] for one in found["engines"]) == 4
        assert all(one["num_own"] == 0 for one in found["engines"])
        # Its steps are known by then.
        assert 0.0 < server.metric("headway_expected_ttft_seconds") < 1.0
    finally:
        fleet.close()


def test_viewers_are_bounded_and_do_not_delay_the_end(launch: Launcher) -> None:
    server = launch().wait_ready()
    url = f"{server.admin_url}{API}/stream"
    with httpx.Client(timeout=20, limits=httpx.Limits(max_connections=None)) as client:
        streams = [
            client.send(client.build_request("GET", url), stream=True) for _ in range(MAX_VIEWERS)
        ]
        assert all(one.status_code == 200 for one in streams)
        refused = client.get(url)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_viewers"
        streams[0].close()
        kinds = [frame["type"] for frame in read_frames(streams[1], 4)]
        assert kinds[:2] == ["history", "now"] and set(kinds) == {"history", "now"}
        answer = client.get(f"{server.admin_url}{API}/engines").json()
        assert answer["status"] == "ready" and len(answer["engines"]) == 1
        assert not answer["is_frontend"] and answer["rule"] is None
        with client.stream("GET", url) as again:  # the first has left
            assert again.status_code == 200
        assert server.stop() == 0
        # uvicorn says so if it has to cancel streams that did not end.
        assert "graceful shutdown exceeded" not in server.log
        for stream in streams[1:]:
            stream.close()
