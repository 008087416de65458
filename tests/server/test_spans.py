"""A real server and a real receiver: traceparent in and out, and spans as the accounts have it."""

from __future__ import annotations

import httpx
import pytest

from benchmarks.support.servers import Launcher
from tests.support.receivers import SpanReceiver

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "a very secret prompt"


def ask(client: httpx.Client, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    body = {"max_tokens": 5, "ignore_eos": True, "n": 2, "temperature": 0.5}
    words = {"messages": [{"role": "user", "content": SECRET}]}
    body |= words if "chat" in path else {"prompt": [SECRET, SECRET]}
    return client.post(path, json=body, headers=headers)


def test_spans_are_those_of_the_account(launch: Launcher) -> None:
    with SpanReceiver() as receiver:
        given = {"otlp_endpoint": receiver.url, "otlp_service_name": "unit", "access_log": True}
        server = launch(server=given).wait_ready()
        with httpx.Client(base_url=server.url, timeout=30) as client:
            parent = f"00-{TRACE}-{PARENT}-01"
            answer = ask(client, traceparent=parent)
            own = ask(client, "/v1/chat/completions", traceparent="garbage")
            unwanted = ask(client, traceparent=parent[:-2] + "00")
            assert "traceparent" not in client.get("/v1/models").headers
            assert "traceparent" not in client.post("/v1/completions", json={}).headers
            ids = [one.json()["id"] for one in (answer, own, unwanted)]
            accounts = [client.get(f"/v1/requests/{one}/explanation").json() for one in ids]
            receiver.wait_for(lambda one: set(ids[:2]) <= one.roots().keys())
            assert server.metric("headway_otlp_requests_dropped") == 0
        assert server.stop() == 0, server.log
        roots = receiver.roots()
    assert set(roots) == set(ids[:2]), "the third was not to be sampled"
    assert answer.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert unwanted.headers["traceparent"].endswith("-00")
    assert not own.headers["traceparent"].startswith(f"00-{TRACE}-")
    for response, account in zip((answer, own), accounts, strict=False):
        root = roots[account["id"]]
        version, trace_id, span_id, flags = response.headers["traceparent"].split("-")
        assert (version, flags) == ("00", "01")
        assert (root.span.trace_id.hex(), root.span.span_id.hex()) == (trace_id, span_id)
        assert root.seconds == pytest.approx(account["duration_s"], abs=1e-6)
        waits = [one for one in receiver.children(root) if one.span.name == "queue"]
        waited_s = sum(one.seconds for one in waits)
        assert waited_s == pytest.approx(account.get("queue_s", 0.0), abs=1e-6)
        first = [one for one in receiver.children(root) if "headway.part" not in one.attributes]
        assert {"prefill", "decode"} <= {one.span.name for one in first}
        assert root.attributes["gen_ai.usage.output_tokens"] == account["num_output_tokens"]
        assert root.attributes["headway.client_id"] == response.headers["x-request-id"]
        assert root.attributes["gen_ai.request.max_tokens"] == 5
        assert root.attributes["gen_ai.request.choice.count"] == 2
    names = [roots[one].span.name for one in ids[:2]]
    assert names == ["text_completion fake", "chat fake"]
    assert roots[ids[0]].span.parent_span_id.hex() == PARENT
    assert roots[ids[0]].resource["service.name"] == "unit"
    assert SECRET not in str(receiver.spans) + server.log


def test_a_receiver_that_is_down_costs_a_request_nothing(launch: Launcher) -> None:
    server = launch(server={"otlp_endpoint": "http://127.0.0.1:9"}).wait_ready()
    with httpx.Client(base_url=server.url, timeout=30) as client:
        assert ask(client).status_code == 200
        server.wait_for("headway_otlp_failing", 1)
        assert ask(client).status_code == 200
        assert server.metric("headway_otlp_requests_pending") == 2
    assert server.stop() == 0
    assert "spans of 2 requests were not sent" in server.log
