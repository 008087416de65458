"""The tenant of a request: by its key, or by the headers of a trusted gateway."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from headway.clock import SystemClock
from headway.config import ServerConfig
from headway.core.terms import Targets, Terms
from headway.errors import ConfigError
from headway.server.http.auth import Authentication
from headway.server.http.proxies import TrustedProxies
from headway.server.listeners import listen
from headway.tenancy import Directory
from headway.tenancy.keys import digest_of, write_digest
from headway.tenancy.roster import parse_roster
from tests.support.apps import check_error

FAIRNESS = ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id")
OBJECTIVE = ("x-gateway-inference-objective", "x-llm-d-inference-objective")
PATH = "/v1/completions"


def hashed(key: str) -> str:
    return write_digest(digest_of(key.encode()))


FILE = f"""
tiers:
  gold: {{weight: 4, ttft_ms: 500, tpot_ms: 50}}
  spare: {{spot: true}}
tenants:
  alice: {{keys: ['{hashed("a")}'], tier: gold, weight: 0.5, quotas: {{kv_share: 0.25}}}}
  bob: {{keys: ['{hashed("b")}'], cache_group: team}}
  root: {{keys: ['{hashed("r")}'], admin: true}}
  gone: {{keys: ['{hashed("g")}'], disabled: true}}
  gateway: {{keys: ['{hashed("w")}'], tier: spare}}
"""
ALICE = Terms("alice", "gold", 2.0, False, 0.25, "alice", Targets(0.5, 0.05))


@pytest.fixture
async def serve(local: Any, tmp_path: Path):
    async def make(trusted: tuple[str, ...] = ("10.0.0.0/8", "::1"), text: str | None = FILE):
        settings: dict[str, Any] = {"trusted_proxy": trusted}
        if text is not None:
            path = tmp_path / "tenants.yaml"
            path.write_text(text)
            settings["tenants_file"] = str(path)
        return await local("abc", **settings)

    return make


async def ask(
    made: SimpleNamespace,
    key: str = "",
    peer: Any = ("127.0.0.1", 5),
    headers: Any = (),
    **body: Any,
) -> httpx.Response:
    transport = httpx.ASGITransport(made.app, client=peer)
    given = list(headers.items() if isinstance(headers, dict) else headers)
    given += [("Authorization", f"Bearer {key}")] if key else []
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post(PATH, json={"prompt": "x", **body}, headers=given)


async def terms(made: SimpleNamespace, *args: Any, **options: Any) -> Terms:
    response = await ask(made, *args, **options)
    assert response.status_code == 200, response.text
    return made.process.added[-1].terms


async def test_the_terms_come_from_the_key(serve) -> None:
    made = await serve()
    assert await terms(made, "a") == ALICE
    assert await terms(made, "b") == Terms("bob", "default", cache_group="group team")
    assert (await terms(made, "w")).is_spot
    assert (await ask(made, "x")).status_code == 401
    assert (await ask(made)).status_code == 401


async def test_a_request_brings_targets_of_its_own(serve) -> None:
    made = await serve()
    asked = await terms(made, "a", ttft_ms=2000, deadline_ms=9000)
    assert asked.targets == Targets(2.0, 0.05, 9.0)
    assert (await terms(made, "b", tpot_ms=10)).targets == Targets(None, 0.01, None)


CLOSED = FILE.replace("spare: {spot: true}", "spare: {allow_targets: false, allow_priority: false}")
FLOORS = FILE.replace("tpot_ms: 50", "tpot_ms: 50, min_ttft_ms: 300, min_tpot_ms: 40")


@pytest.mark.parametrize(
    ("field", "value", "floor"),
    [("ttft_ms", 299, 300), ("tpot_ms", 39.9, 40), ("deadline_ms", 49, 50)],
)
async def test_a_target_below_the_floor_of_the_tier_is_refused(
    serve, field: str, value: float, floor: float
) -> None:
    made = await serve(text=FLOORS)
    error = check_error(await ask(made, "a", **{field: value}), 400)
    assert error["param"] == field
    assert error["message"] == (
        f"{field} must be at least {floor} in tier 'gold' (min_{field}), got {value}"
    )
    assert not made.process.added
    assert (await terms(made, "a", **{field: floor})).tier == "gold"


@pytest.mark.parametrize(
    ("body", "entry"),
    [({"ttft_ms": 60000}, "allow_targets"), ({"priority": 0}, "allow_priority")],
)
async def test_a_tier_may_keep_requests_from_asking(serve, body: Any, entry: str) -> None:
    made = await serve(text=CLOSED)
    error = check_error(await ask(made, "w", **body), 400)
    assert "tier 'spare' does not allow" in error["message"]
    assert entry in error["message"]
    assert (await terms(made, "a", **body)).tenant == "alice", "its neighbours may"


async def test_without_a_tenants_file_targets_have_floors_too(serve) -> None:
    made = await serve(text=None)
    for field in ("ttft_ms", "tpot_ms", "deadline_ms"):
        body: dict[str, Any] = {field: 0.001}
        error = check_error(await ask(made, **body), 400)
        assert "in tier 'default'" in error["message"]
    assert not made.process.added


async def test_a_disabled_tenant_gets_403(serve) -> None:
    made = await serve()
    response = await ask(made, "g")
    error = check_error(response, 403)
    assert (error["code"], error["type"]) == ("tenant_disabled", "permission_error")
    assert b'reason="tenant_disabled"} 1.0' in made.metrics.render()
    assert not made.process.added


async def test_without_keys_one_anonymous_tenant(serve) -> None:
    made = await serve(text=None)
    assert await terms(made) == Terms("", "default")
    assert (await terms(made, peer=("10.1.2.3", 5), headers={FAIRNESS[0]: "x"})).tenant == "x"


@pytest.mark.parametrize("name", FAIRNESS)
@pytest.mark.parametrize("peer", [("10.1.2.3", 5), ("::ffff:10.1.2.3", 5), ("::1", 5)])
async def test_a_trusted_gateway_names_the_tenant(serve, name: str, peer: Any) -> None:
    made = await serve()
    assert await terms(made, "w", peer=peer, headers={name: "alice"}) == ALICE
    guest = await terms(made, "w", peer=peer, headers={name: "user@example:7"})
    assert guest == Terms("user@example:7", "spare", is_spot=True, cache_group="user@example:7")
    assert (await terms(made, "w", peer=peer, headers={name: ""})).tenant == "gateway"
    refused = await ask(made, "w", peer=peer, headers={name: "gone"})
    assert check_error(refused, 403)["code"] == "tenant_disabled"
    assert (await ask(made, peer=peer, headers={name: "alice"})).status_code == 401


@pytest.mark.parametrize("name", OBJECTIVE)
async def test_a_trusted_gateway_names_the_tier(serve, name: str) -> None:
    made = await serve()
    peer = ("10.1.2.3", 5)
    bob = await terms(made, "b", peer=peer, headers={name: "gold"})
    assert bob == Terms("bob", "gold", 4.0, cache_group="group team", targets=Targets(0.5, 0.05))
    both = {name: "default", FAIRNESS[0]: "alice"}
    assert (await terms(made, "w", peer=peer, headers=both)).weight == 0.5
    refused = await ask(made, "w", peer=peer, headers={name: "platinum"})
    assert "no tier 'platinum'" in check_error(refused, 400)["message"]


@pytest.mark.parametrize(
    "peer", [("127.0.0.1", 5), ("11.0.0.1", 5), ("", 0), ("testclient", 1), None]
)
async def test_from_anyone_else_the_headers_are_as_good_as_not_there(serve, peer, caplog) -> None:
    made = await serve()
    headers = {FAIRNESS[0]: "root", OBJECTIVE[1]: "gold", "X-Forwarded-For": "10.0.0.1"}
    for _ in range(2):
        assert (await terms(made, "b", peer=peer, headers=headers)).tier == "default"
        assert made.process.added[-1].terms.tenant == "bob"
    assert caplog.text.count("is no --trusted-proxy") == 1


@pytest.mark.parametrize(
    "headers",
    [
        [(FAIRNESS[0], "alice"), (FAIRNESS[0], "bob")],
        [(FAIRNESS[0], "alice"), (FAIRNESS[1], "bob")],
        [(FAIRNESS[0], "x" * 129)],
        [(FAIRNESS[0], "two words")],
        [(OBJECTIVE[0], "gold"), (OBJECTIVE[1], "spare")],
    ],
)
async def test_ambiguous_gateway_headers_are_refused(serve, headers) -> None:
    made = await serve()
    refused = await ask(made, "w", peer=("10.1.2.3", 5), headers=headers)
    assert check_error(refused, 400)["code"] == "invalid_gateway_header"


async def test_equal_gateway_headers_are_accepted(serve) -> None:
    made = await serve()
    headers = [(FAIRNESS[0], "alice"), (FAIRNESS[1], "alice")]
    assert await terms(made, "w", peer=("10.1.2.3", 5), headers=headers) == ALICE


async def test_handlers_know_the_tenant() -> None:
    seen: list[Any] = []
    nobody: Any = None

    async def handler(scope: Any, _receive: Any, _send: Any) -> None:
        who = Request(scope).state
        seen.append((who.tenant, who.is_admin))

    directory = Directory(SystemClock(), roster=parse_roster(FILE))
    guard = Authentication(handler, directory, TrustedProxies.of(()))
    for key in (b"a", b"b", b"r"):
        headers = [(b"authorization", b"Bearer " + key)]
        await guard({"type": "http", "headers": headers}, nobody, nobody)
    assert seen == [("alice", False), ("bob", False), ("root", True)]


@pytest.mark.parametrize("entry", ["gateway.local", "10.0.0.1/8", "10.0.0.0/33", "", "10.0.0"])
def test_what_is_no_address_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="trusted_proxy must be an address or a network"):
        TrustedProxies.of((entry,))


def test_a_server_does_not_start_with_a_wrong_file(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    with pytest.raises(ConfigError, match="headway tenants add"):
        listen(ServerConfig(tenants_file=str(path), port=0))
    path.write_text(f"tenants: {{alice: {{keys: ['{hashed('a')}']}}}}")
    listen(ServerConfig(tenants_file=str(path), port=0, admin_port=0)).close()
    keys = tmp_path / "keys"
    keys.write_text(f"{hashed('a')} bob\n")
    with pytest.raises(ConfigError, match="is also a key of bob"):
        listen(ServerConfig(tenants_file=str(path), api_keys_file=str(keys), port=0))
    with pytest.raises(ConfigError, match="trusted_proxy"):
        listen(ServerConfig(trusted_proxy=("here",), port=0))


def test_trusting_everyone_is_warned_of(caplog) -> None:
    listen(ServerConfig(trusted_proxy=("0.0.0.0/0",), port=0, admin_port=0)).close()
    assert "any client may name any tenant" in caplog.text
