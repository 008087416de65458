"""With keys configured, every route but health asks for one."""

from __future__ import annotations

import pytest

KEYS = ("first-key", "second-key")


def all_routes(app) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    pending = list(app.routes)
    while pending:
        route = pending.pop()
        included = getattr(route, "original_router", None)  # newer FastAPI keeps routers whole
        if included is not None:
            pending.extend(included.routes)
            continue
        path = route.path.replace("{name:path}", "tiny")
        found.extend((method, path) for method in route.methods)
    assert len(found) == 9
    return found


async def test_every_route_but_health_needs_a_key(local) -> None:
    made = await local(api_key=KEYS)
    for method, path in all_routes(made.app):
        response = await made.client.request(method, path)
        if path.startswith("/health"):
            assert response.status_code == 200
            continue
        assert response.status_code == 401, path
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert not any(key in response.text for key in KEYS)


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
    ],
)
async def test_wrong_keys(local, header) -> None:
    made = await local(api_key=KEYS)
    for method, path in all_routes(made.app):
        if not path.startswith("/health"):
            response = await made.client.request(method, path, headers={"Authorization": header})
            assert response.status_code == 401


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_any_of_the_keys_opens(local, key, scheme) -> None:
    made = await local(api_key=KEYS)
    headers = {"Authorization": f"{scheme} {key}"}
    assert (await made.client.get("/v1/models", headers=headers)).status_code == 200
    assert (await made.client.get("/metrics", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "path", ["//v1/models", "/v1/%6dodels", "/V1/models", "/v1/models/", "/health/../v1/models"]
)
@pytest.mark.parametrize("host", ["test", "test/health/live?", "evil/health"])
async def test_no_spelling_of_a_path_gets_around_the_key(local, path, host) -> None:
    made = await local(api_key=KEYS)
    response = await made.client.get(path, headers={"Host": host})
    assert response.status_code in (401, 404)
    assert "tiny" not in response.text


async def test_a_body_is_not_read_without_a_key(local) -> None:
    made = await local(api_key=KEYS, max_body_bytes=10)
    response = await made.client.post("/v1/completions", content=b"x" * 1000)
    assert response.status_code == 401


async def test_without_keys_nothing_is_asked(local) -> None:
    made = await local()
    assert (await made.client.get("/v1/models")).status_code == 200
