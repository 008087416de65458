"""Every refusal has OpenAI's shape, the right status, and names what is wrong."""

from __future__ import annotations

import pytest

from headway.core.plan import Failure
from headway.core.request import FailureCause

MESSAGES = [{"role": "user", "content": "hi"}]


def check_shape(response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x", "temperature": -1}, "temperature"),
        ("/v1/completions", {"prompt": "x", "wrong": 1}, "wrong"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, "prompt"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"9999": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [9999]}, "stop_token_ids"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [{}]}, "tools[0].type"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_invalid_requests(local, path, body, param, is_stream) -> None:
    made = await local()
    error = check_shape(await made.client.post(path, json={**body, "stream": is_stream}), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert made.engine.num_requests == 0


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 300}, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 10**30}, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "n": 9}, "n"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * 300}]},
            "messages",
        ),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 300}, "max_tokens"),
        (
            "/v1/chat/completions",
            {"messages": MESSAGES, "max_completion_tokens": 300},
            "max_completion_tokens",
        ),
    ],
)
async def test_requests_that_can_never_fit(local, path, body, param) -> None:
    made = await local()
    error = check_shape(await made.client.post(path, json=body), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert b'reason="never_fits"} 1.0' in made.metrics.render()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_unknown_model(local, path) -> None:
    made = await local()
    body = {"model": "other", "prompt": "x", "messages": MESSAGES}
    body.pop("messages" if path == "/v1/completions" else "prompt")
    error = check_shape(await made.client.post(path, json=body), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_unknown_route_and_method(local) -> None:
    made = await local()
    for path in ("/", "/v1", "/v1/nothing", "/docs", "/metrics", "/redoc"):
        assert check_shape(await made.client.get(path), 404)["code"] == "not_found"
    response = await made.client.get("/v1/completions")
    assert check_shape(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


async def test_an_engine_that_is_not_ready(local) -> None:
    made = await local(is_started=False)
    response = await made.client.post("/v1/completions", json={"prompt": "x"})
    assert check_shape(response, 503)["type"] == "service_unavailable_error"
    assert int(response.headers["retry-after"]) <= 5


async def test_the_unexpected_is_a_500_that_tells_nothing(local, monkeypatch, caplog) -> None:
    made = await local()

    def explode(*_args: object) -> None:
        raise RuntimeError("secret detail of the failure")

    monkeypatch.setattr(made.engine, "submit", explode)
    response = await made.client.post("/v1/completions", json={"prompt": "x"})
    assert check_shape(response, 500)["type"] == "server_error"
    assert "secret" not in response.text
    assert "secret" in caplog.text
    assert response.headers["x-request-id"]


async def test_only_a_failure_by_the_grammar_is_told_to_the_client(local) -> None:
    message = "the grammar cannot go on: it is too costly"
    for cause, status in ((FailureCause.ENGINE, 500), (FailureCause.GRAMMAR, 400)):
        made = await local([97, Failure(message, cause)])
        response = await made.client.post("/v1/completions", json={"prompt": "x"})
        error = check_shape(response, status)
        assert (error["message"] == message) == (status == 400)


@pytest.mark.parametrize(
    ("offered", "is_echoed"),
    [("abc-123", True), ("x" * 128, True), ("x" * 129, False), ("a\tb", False), ("", False)],
)
async def test_request_ids(local, offered, is_echoed) -> None:
    made = await local()
    headers = {"X-Request-Id": offered}
    response = await made.client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    answered = response.headers["x-request-id"]
    assert (answered == offered) == is_echoed
    assert 0 < len(answered) <= 128
    assert offered == "" or offered not in response.json()["id"]
    refused = await made.client.post("/v1/completions", json={}, headers=headers)
    assert (refused.headers["x-request-id"] == offered) == is_echoed
