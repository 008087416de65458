"""With keys, everything but the liveness probe asks for one; and where keys come from."""

from __future__ import annotations

import hashlib
import stat
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.requests import Request
from typer.testing import CliRunner

from headway.cli.app import make_app
from headway.clock import SystemClock
from headway.config import ServerConfig
from headway.errors import ConfigError
from headway.server.http.auth import Authentication
from headway.server.http.errors import ANTHROPIC_PATH, ApiError
from headway.server.http.proxies import TrustedProxies
from headway.tenancy import Directory
from headway.tenancy.keys import make_key
from headway.tenancy.keys_file import key_for, load_keys
from tests.support.apps import check_error, routes_of, serving

KEYS = ("first-key", "second-key")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
UNKNOWN = ("/", "/v1", "/v1/nothing", "/docs", "/metricz", "/health/live/", "//health/live", "/%00")


@asynccontextmanager
async def guarded(local):
    async with serving(local, api_key=KEYS) as made:
        yield made


def paths_of(app) -> list[str]:
    found = {path for _, path in routes_of(app)}
    assert len(found) >= 5
    return sorted(path.replace("{name:path}", "tiny").replace("{rest:path}", "x") for path in found)


async def test_nothing_but_probes_and_static_files_answers_without_a_key(local) -> None:
    async with guarded(local) as made:
        is_open = {"/health/live", "/health/ready", *made.files}
        for client, app in ((made.public, made.apps.public), (made.admin, made.apps.admin)):
            for path in (*paths_of(app), *UNKNOWN):
                for method in METHODS:
                    response = await client.request(method, path)
                    if method == "GET" and path in is_open:
                        assert response.status_code == 200
                        continue
                    assert response.status_code == 401, (method, path)
                    assert response.headers["www-authenticate"] == "Bearer"
                    assert "allow" not in response.headers
                    assert not any(key in response.text for key in KEYS)
                    if path.startswith(ANTHROPIC_PATH):
                        assert method == "HEAD" or "authentication_error" in response.text
                    elif method != "HEAD":
                        assert response.json()["error"]["code"] == "invalid_api_key"


async def test_with_a_key_wrong_paths_get_404_and_methods_405(local) -> None:
    async with guarded(local) as made:
        headers = {"Authorization": "Bearer first-key"}
        for path in ("/", "/v1", "/v1/nothing", "/docs", "/redoc", "/metrics"):
            response = await made.public.get(path, headers=headers)
            assert check_error(response, 404)["code"] == "not_found"
        for method, path, allow in (
            ("GET", "/v1/completions", "POST"),
            ("HEAD", "/v1/models", "GET"),
            ("POST", "/health/live", "GET"),
            ("OPTIONS", "/v1/chat/completions", "POST"),
        ):
            response = await made.public.request(method, path, headers=headers)
            assert (response.status_code, response.headers["allow"]) == (405, allow)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "first-key",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Bearer first-ke",
        "Bearer first-keyx",
        "Basic first-key",
        "Bearer first-key second-key",
        f"Bearer {hashlib.sha256(b'first-key').hexdigest()}",
    ],
)
async def test_wrong_keys(local, header) -> None:
    async with guarded(local) as made:
        for client, path in ((made.public, "/v1/models"), (made.admin, "/metrics")):
            response = await client.get(path, headers={"Authorization": header})
            assert response.status_code == 401


async def test_two_authorization_headers_are_none(local) -> None:
    async with guarded(local) as made:
        headers = [("Authorization", "Bearer first-key"), ("Authorization", "Bearer second-key")]
        assert (await made.public.get("/v1/models", headers=headers)).status_code == 401


async def test_a_key_may_come_as_x_api_key(local) -> None:
    async with guarded(local) as made:
        for headers, status in (
            ([("x-api-key", "first-key")], 200),
            ([("X-Api-Key", " second-key ")], 200),
            ([("x-api-key", "")], 401),
            ([("x-api-key", "wrong")], 401),
            ([("x-api-key", "Bearer first-key")], 401),
            ([("x-api-key", "first-key"), ("x-api-key", "first-key")], 401),
            # The key of a gateway beside that of this server, and the other way round.
            ([("x-api-key", "wrong"), ("Authorization", "Bearer first-key")], 200),
            ([("x-api-key", "first-key"), ("Authorization", "Bearer wrong")], 401),
            ([("x-api-key", "first-key"), ("Authorization", "Basic first-key")], 401),
        ):
            response = await made.public.get("/v1/models", headers=headers)
            assert response.status_code == status, headers


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_any_of_the_keys_opens(local, key, scheme) -> None:
    async with guarded(local) as made:
        headers = {"Authorization": f"{scheme} {key}"}
        for path in ("/v1/models", "/openapi.json", "/version", "/health", "/health/ready"):
            assert (await made.public.get(path, headers=headers)).status_code == 200
        for path in ("/version", "/health", "/health/ready"):
            assert (await made.admin.get(path, headers=headers)).status_code == 200


async def test_metrics_are_for_an_admin_or_for_the_only_tenant(local, tmp_path) -> None:
    path = tmp_path / "tenants.yaml"
    names = {key: key_for(key).tenant for key in KEYS}
    path.write_text(f"tenants: {{{names['first-key']}: {{admin: true}}}}")
    cases: list[tuple[dict[str, Any], dict[str, int]]] = [
        ({"api_key": KEYS[:1]}, {"first-key": 200}),
        ({"api_key": KEYS}, {"first-key": 403, "second-key": 403}),
        ({"api_key": KEYS, "tenants_file": str(path)}, {"first-key": 200, "second-key": 403}),
    ]
    for settings, expected in cases:
        async with serving(local, **settings) as made:
            for key, status in expected.items():
                headers = {"Authorization": f"Bearer {key}"}
                response = await made.admin.get("/metrics", headers=headers)
                assert response.status_code == status
                if status == 403:
                    assert check_error(response, 403)["code"] == "admin_only"
                    assert "headway_" not in response.text


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1/%6dodels", "/V1/models", "/v1/models/", "/health/../v1/models"]
)
@pytest.mark.parametrize("host", ["localhost", "localhost/health/live?", "evil/health"])
async def test_no_spelling_of_a_path_or_host_gets_around_the_key(local, path, host) -> None:
    async with guarded(local) as made:
        response = await made.public.get(path, headers={"Host": host})
        assert response.status_code in (400, 401)
        assert "tiny" not in response.text


async def test_a_body_is_not_read_without_a_key(local) -> None:
    async with serving(local, api_key=KEYS, max_body_bytes=10) as made:
        response = await made.public.post("/v1/completions", content=b"x" * 1000)
        assert response.status_code == 401


async def test_without_keys_nothing_is_asked(local) -> None:
    async with serving(local) as made:
        assert (await made.public.get("/v1/models")).status_code == 200
        assert (await made.admin.get("/metrics")).status_code == 200


async def tenant_of(keys, header: str) -> str:
    seen = []
    nobody: Any = None

    async def handler(scope, receive, send) -> None:
        seen.append(Request(scope).state.tenant)

    scope = {"type": "http", "headers": [(b"authorization", header.encode())]}
    directory = Directory(SystemClock(), {key.digest: key.tenant for key in keys})
    await Authentication(handler, directory, TrustedProxies.of(()))(scope, nobody, nobody)
    return seen[0]


async def test_handlers_see_the_tenant() -> None:
    keys = (key_for("first", "alice"), key_for("second"))
    assert await tenant_of(keys, "Bearer first") == "alice"
    digest = hashlib.sha256(b"second").hexdigest()
    assert await tenant_of(keys, "Bearer second") == f"key-{digest[:8]}"
    assert await tenant_of((), "Bearer whatever") == ""
    with pytest.raises(ApiError):
        await tenant_of(keys, "Bearer third")


def test_keys_of_the_file_and_of_the_flag_both_open(tmp_path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# staff\n\n  {key_for('k1', 'alice').line}  \n{key_for('k2', 'bob').line}")
    keys = load_keys(ServerConfig(api_keys_file=str(path), api_key=("k3",)))
    assert [key.tenant for key in keys][:2] == ["alice", "bob"]
    assert keys[2] == key_for("k3")
    assert load_keys(ServerConfig()) == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "headway keys new"),
        ("", "headway keys new"),
        ("# nothing but words\n", "headway keys new"),
        ("hw-a-key-in-the-clear\n", "headway keys hash"),
        (f"sha256:{'a' * 63} short\n", "line 1"),
        (f"sha256:{'A' * 64} upper\n", "line 1"),
        (f"# x\nsha256:{'a' * 64}\n", "line 2"),
        (f"md5:{'a' * 32} old\n", "line 1"),
        (f"sha256:{'a' * 64} two words\n", "line 1"),
        (f"sha256:{'a' * 64} {'x' * 65}\n", "name"),
        (f"sha256:{'a' * 64} a/b\n", "name"),
        (f"sha256:{'a' * 64} one\nsha256:{'a' * 64} other\n", "another name"),
        (b"\xff\xfe", "cannot read"),
    ],
)
def test_a_keys_file_that_is_not_right_is_refused(tmp_path, content, says) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=says) as caught:
        load_keys(ServerConfig(api_keys_file=str(path), api_key=("x",)))
    assert "in-the-clear" not in str(caught.value)


def test_keys_new_prints_the_key_once_and_keeps_its_hash(tmp_path) -> None:
    path = tmp_path / "keys"
    secrets = []
    for name in ("alice", "bob", "alice"):
        result = CliRunner().invoke(make_app(), ["keys", "new", name, "--file", str(path)])
        assert result.exit_code == 0
        secrets.append(result.stdout.strip())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert all(secret.startswith("hw-") and len(secret) >= 46 for secret in secrets)
    assert not any(secret in path.read_text() for secret in secrets)
    keys = load_keys(ServerConfig(api_keys_file=str(path)))
    names = ("alice", "bob", "alice")
    assert keys == tuple(key_for(*pair) for pair in zip(secrets, names, strict=True))


def test_keys_new_leaves_a_file_that_is_not_right_alone(tmp_path) -> None:
    path = tmp_path / "keys"
    path.write_text("what is this")
    result = CliRunner().invoke(make_app(), ["keys", "new", "alice", "--file", str(path)])
    assert isinstance(result.exception, ConfigError)
    assert path.read_text() == "what is this"
    path.write_text(key_for("x", "no-line-end").line)
    assert (
        CliRunner().invoke(make_app(), ["keys", "new", "bob", "--file", str(path)]).exit_code == 0
    )
    assert len(load_keys(ServerConfig(api_keys_file=str(path)))) == 2


def test_keys_hash_reads_from_standard_input() -> None:
    result = CliRunner().invoke(make_app(), ["keys", "hash", "alice"], input="my-key\n")
    assert result.stdout.strip() == key_for("my-key", "alice").line
    result = CliRunner().invoke(make_app(), ["keys", "hash"], input="my-key\n")
    assert result.stdout.strip() == key_for("my-key").line
    assert isinstance(
        CliRunner().invoke(make_app(), ["keys", "hash"], input="").exception, ConfigError
    )
    bad = CliRunner().invoke(make_app(), ["keys", "new", "not a name"])
    assert isinstance(bad.exception, ConfigError)


def test_keys_differ() -> None:
    assert len({make_key() for _ in range(100)}) == 100
