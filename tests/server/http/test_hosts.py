"""Which Host a request may name, and that a page of another site gets nothing by DNS rebinding."""

from __future__ import annotations

import pytest

from headway.config import ServerConfig
from headway.errors import ConfigError
from headway.server.http.hosts import HostPolicy, is_loopback
from tests.support.apps import check_error, serving

GOOD = ["localhost", "LOCALHOST", "localhost:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:8000"]
GOOD += ["localhost.", "localhost.:80"]
BAD = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"]
BAD += ["", " ", "localhost/", "localhost/health/live", "user@localhost", "localhost:", "::1"]
BAD += ["localhost:x", "localhost:123456", "localhost,evil", "evil localhost", "0.0.0.0"]


@pytest.mark.parametrize("host", GOOD)
async def test_loopback_names_are_accepted_on_loopback(local, host) -> None:
    async with serving(local) as made:
        for client in (made.public, made.admin):
            assert (await client.get("/version", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize("host", BAD)
async def test_other_names_are_refused_on_loopback(local, host) -> None:
    async with serving(local) as made:
        for client, path in ((made.public, "/v1/models"), (made.admin, "/metrics")):
            for asked in (path, "/nothing", "/health"):
                response = await client.get(asked, headers={"Host": host})
                assert check_error(response, 400)["code"] == "host_not_allowed"
            # Probes come from any address; the answer contains no information.
            for probe in ("/health/live", "/health/ready"):
                assert (await client.get(probe, headers={"Host": host})).status_code == 200


async def test_the_refusal_names_the_flag(local) -> None:
    async with serving(local) as made:
        response = await made.public.get("/v1/models", headers={"Host": "evil.example"})
        assert "--allowed-host" in check_error(response, 400)["message"]


async def test_a_host_is_refused_before_a_key_is_looked_at(local) -> None:
    async with serving(local, api_key=("k",)) as made:
        headers = {"Host": "evil.example", "Authorization": "Bearer k"}
        assert (await made.public.get("/v1/models", headers=headers)).status_code == 400


async def test_allowed_hosts(local) -> None:
    async with serving(local, allowed_host=("api.example", "::2")) as made:
        for host, status in (
            ("api.example", 200),
            ("API.example:443", 200),
            ("[::2]:80", 200),
            ("localhost", 200),
            ("example", 400),
            ("x.api.example", 400),
        ):
            response = await made.public.get("/version", headers={"Host": host})
            assert response.status_code == status, host


async def test_any_host_is_accepted_where_others_can_reach_the_server(local) -> None:
    async with serving(local, host="0.0.0.0") as made:
        response = await made.public.get("/version", headers={"Host": "whatever.example"})
        assert response.status_code == 200
        response = await made.public.get("/version", headers={"Host": "not/a/host"})
        assert response.status_code == 400
        # The admin listener is still on loopback.
        response = await made.admin.get("/version", headers={"Host": "whatever.example"})
        assert response.status_code == 400
    async with serving(local, allowed_host=("*",)) as made:
        response = await made.public.get("/version", headers={"Host": "whatever.example"})
        assert response.status_code == 200


@pytest.mark.parametrize("listen_on", ["127.0.0.1", "0.0.0.0"])
def test_a_request_has_exactly_one_host(listen_on) -> None:
    policy = HostPolicy.of(listen_on, ())
    assert policy.refusal(["localhost"], "1.1") is None
    for values in ([], ["localhost", "localhost"], ["localhost", "evil.example"]):
        assert policy.refusal(values, "1.1")
    assert policy.refusal(["localhost", "localhost"], "1.0")
    # HTTP/1.0 knows no Host; where any would do, none will.
    assert (policy.refusal([], "1.0") is None) == (listen_on == "0.0.0.0")


@pytest.mark.parametrize("name", ["http://a", "a:80", "a/b", "", "a b", "[::1]:80"])
def test_an_allowed_host_is_a_name(name) -> None:
    with pytest.raises(ConfigError, match="--allowed-host"):
        HostPolicy.of("127.0.0.1", (name,))


def test_what_is_loopback() -> None:
    for address in ("127.0.0.1", "127.9.9.9", "127.1", "localhost", "::1", "[::1]"):
        assert is_loopback(address)
    for address in ("0.0.0.0", "::", "192.168.0.1", "127.evil.example", "example", ""):
        assert not is_loopback(address)


def test_settings_of_the_admin_listener() -> None:
    assert ServerConfig().admin_port == 8001
    assert ServerConfig().admin_host == "127.0.0.1"
    assert ServerConfig(admin_port=None).admin_port is None
    with pytest.raises(ConfigError, match="admin_port"):
        ServerConfig(admin_port=70000)
