"""Batches over a scripted engine: validation, results, ends, fairness, quotas and retries."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import openai
import pytest

from benchmarks.support.batches import CHAT, COMPLETIONS, content, jsonl, line, submit, until
from headway.errors import (
    EngineDeadError,
    NeverFitsError,
    OverloadedError,
    QuarantinedError,
    QuotaError,
)
from headway.server.batches import feeder as feeder_module
from headway.server.batches import store as store_module
from headway.server.batches.feeder import Again, Failed, Later, outcome_of
from headway.server.http.errors import UNAVAILABLE, ApiError
from tests.support.apps import check_error, routes_of


@contextlib.asynccontextmanager
async def feeding(made: SimpleNamespace) -> AsyncIterator[None]:
    task = asyncio.create_task(made.apps.feed_batches())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_batch_answers_every_line_as_http_does(batch_app, wall) -> None:
    made = await batch_app("hello")
    client = made.client()
    lines = [line(number, CHAT, seed=number, max_tokens=4) for number in range(20)]
    async with feeding(made):
        batch = await submit(client, lines, CHAT, metadata={"job": "x"})
        assert batch["status"] == "validating"
        assert batch["expires_at"] == batch["created_at"] + 86_400
        ended = await until(client, batch["id"])
        found = await content(client, ended["output_file_id"])
        plain = [(await client.post(CHAT, json=one["body"])).json() for one in lines]
    assert ended["status"] == "completed"
    assert ended["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert ended["error_file_id"] is None and ended["errors"] is None
    assert ended["metadata"] == {"job": "x"}
    for name in ("in_progress_at", "finalizing_at", "completed_at"):
        assert ended[name] == int(wall.now)
    assert found.keys() == {f"r{number}" for number in range(20)}
    for one, answer in zip(lines, plain, strict=True):
        result = found[one["custom_id"]]
        assert set(result) == {"id", "custom_id", "response", "error"}
        assert result["id"].startswith("batch_req_") and result["error"] is None
        response = result["response"]
        assert response["status_code"] == 200 and response["request_id"] == result["id"]
        assert response["body"]["choices"] == answer["choices"]
        assert response["body"]["usage"]["total_tokens"] == answer["usage"]["total_tokens"]
    file = (await client.get(f"/v1/files/{ended['output_file_id']}")).json()
    assert file["purpose"] == "batch_output" and file["bytes"] > 0
    used = {one.terms.tier for one in made.process.added[:20]}
    assert used == {"batch"} and all(one.terms.is_spot for one in made.process.added[:20])
    names = [one.name for one in (made.store.folder.path / "files").iterdir()]
    assert sorted(names) == sorted([batch["input_file_id"], ended["output_file_id"]])


@pytest.mark.parametrize(
    ("lines", "errors"),
    [
        (b"", [("empty_file", None, None)]),
        (b"\n \n", [("empty_file", None, None)]),
        (b"{\n", [("invalid_request", 1, None)]),
        (b"\xff\xfe\n", [("invalid_request", 1, None)]),
        (b"[" * 100_000 + b"\n", [("invalid_request", 1, None)]),
        ([line(1), line(1)], [("duplicate_custom_id", 2, "custom_id")]),
        ([{**line(1), "method": "GET"}], [("invalid_request", 1, "method")]),
        ([{**line(1), "url": CHAT}], [("invalid_request", 1, "url")]),
        ([{**line(1), "custom_id": ""}], [("invalid_request", 1, "custom_id")]),
        ([{**line(1), "extra": 1}], [("invalid_request", 1, None)]),
        ([{**line(1), "body": 7}], [("invalid_request", 1, "body")]),
        ([line(1, max_tokens=-1)], [("invalid_request", 1, "body.max_tokens")]),
        ([line(1, unknown=1)], [("invalid_request", 1, "body.unknown")]),
        ([line(1, stream=True)], [("invalid_request", 1, "body.stream")]),
        ([line(1, deadline_ms=500)], [("invalid_request", 1, "body.deadline_ms")]),
        ([line(1, model="other")], [("model_not_found", 1, "body.model")]),
        (
            [line(1), line(2, n=99), line(3), line(4, top_p=7)],
            [("invalid_request", 2, "body.n"), ("invalid_request", 4, "body.top_p")],
        ),
    ],
)
async def test_a_wrong_file_fails_with_its_lines(batch_app, lines, errors) -> None:
    made = await batch_app()
    client = made.client()
    async with feeding(made):
        ended = await until(client, (await submit(client, lines))["id"])
    assert ended["status"] == "failed" and ended["failed_at"] is not None
    found = [(one["code"], one["line"], one["param"]) for one in ended["errors"]["data"]]
    assert found == errors
    assert all(one["message"] for one in ended["errors"]["data"])
    assert ended["output_file_id"] is None and ended["error_file_id"] is None
    assert not made.process.added


async def test_errors_and_lines_of_a_file_are_bounded(batch_app, monkeypatch) -> None:
    from headway.server.batches import lines as lines_module

    made = await batch_app(max_body_bytes=10_000)
    client = made.client()
    async with feeding(made):
        many = await submit(client, [line(number, n=0) for number in range(500)])
        assert len((await until(client, many["id"]))["errors"]["data"]) == 100
        long = await submit(client, [line(1, prompt="x" * 80_000)])
        errors = (await until(client, long["id"]))["errors"]["data"]
        assert [one["code"] for one in errors] == ["line_too_long"]
        monkeypatch.setattr(lines_module, "MAX_LINES", 3)
        errors = await until(client, (await submit(client, [line(n) for n in range(4)]))["id"])
        assert [one["code"] for one in errors["errors"]["data"]] == ["too_many_lines"]


async def test_a_request_that_never_fits_is_a_line_of_the_error_file(batch_app) -> None:
    made = await batch_app()
    client = made.client()
    lines = [line(1), line(2, max_tokens=5000), line(3)]
    async with feeding(made):
        ended = await until(client, (await submit(client, lines))["id"])
        errors = await content(client, ended["error_file_id"])
        found = await content(client, ended["output_file_id"])
    assert ended["status"] == "completed"
    assert ended["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert set(found) == {"r1", "r3"} and set(errors) == {"r2"}
    response = errors["r2"]["response"]
    assert response["status_code"] == 400 and errors["r2"]["error"] is None
    assert response["body"]["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-0"}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "24 h"}, "completion_window"),
        ({"completion_window": "24h\n"}, "completion_window"),
        ({"completion_window": 24}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "x", "seconds": 3600}}, "output_expires_after"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"other": 1}, "other"),
    ],
)
async def test_a_wrong_batch_is_refused_by_name(batch_app, fields, param) -> None:
    made = await batch_app()
    client = made.client()
    files = {"file": ("in.jsonl", jsonl([line(1)]))}
    file = (await client.post("/v1/files", files=files, data={"purpose": "batch"})).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    error = check_error(await client.post("/v1/batches", json={**body, **fields}), 400)
    assert error["param"] == param
    assert (await client.get("/v1/batches")).json()["data"] == []


async def test_a_policy_without_spot_requests_runs_no_batches(batch_app) -> None:
    made = await batch_app(policy="fcfs")
    client = made.client()
    files = {"file": ("in.jsonl", jsonl([line(1)]))}
    file = (await client.post("/v1/files", files=files, data={"purpose": "batch"})).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    assert "fair" in check_error(await client.post("/v1/batches", json=body), 400)["message"]


async def test_a_tenant_sees_its_own_batches_only(batch_app) -> None:
    made = await batch_app(api_key=("one", "two"))
    one, two = made.client("one"), made.client("two")
    async with feeding(made):
        batch = await submit(one, [line(1)])
        ended = await until(one, batch["id"])
        check_error(await two.get(f"/v1/batches/{batch['id']}"), 404)
        check_error(await two.post(f"/v1/batches/{batch['id']}/cancel"), 404)
        check_error(await two.get(f"/v1/files/{ended['output_file_id']}/content"), 404)
        body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT}
        stolen = await two.post("/v1/batches", json={**body, "completion_window": "1h"})
        assert check_error(stolen, 400)["param"] == "input_file_id"
    assert (await two.get("/v1/batches")).json()["data"] == []
    assert [item["id"] for item in (await one.get("/v1/batches")).json()["data"]] == [batch["id"]]


async def test_a_list_of_batches_has_pages(batch_app) -> None:
    made = await batch_app()
    client = made.client()
    ids = [(await submit(client, [line(1)]))["id"] for _ in range(3)]
    page = (await client.get("/v1/batches?limit=2")).json()
    assert [one["id"] for one in page["data"]] == ids[:0:-1] and page["has_more"]
    rest = (await client.get(f"/v1/batches?after={page['last_id']}")).json()
    assert [one["id"] for one in rest["data"]] == ids[:1]
    check_error(await client.get("/v1/batches?limit=101"), 400)


async def test_cancel_keeps_what_is_done(batch_app, monkeypatch) -> None:
    made = await batch_app("x" * 50, batches={"max_batch_reqs": 2})
    client = made.client()
    async with feeding(made):
        batch = await submit(client, [line(number, max_tokens=40) for number in range(200)])
        while (await until(client, batch["id"], "in_progress"))["request_counts"]["completed"] < 3:
            await asyncio.sleep(0)
        path = f"/v1/batches/{batch['id']}/cancel"
        cancelling = (await client.post(path)).json()
        assert cancelling["status"] == "cancelling" and cancelling["cancelling_at"]
        ended = await until(client, batch["id"])
        found = await content(client, ended["output_file_id"])
        assert ended["status"] == "cancelled" and ended["cancelled_at"]
        assert 3 <= len(found) == ended["request_counts"]["completed"] < 200
        check_error(await client.post(path), 409)
        assert made.engine.num_requests == 0
        deleted = await client.delete(f"/v1/files/{batch['input_file_id']}")
        assert deleted.status_code == 200


async def test_a_batch_that_is_not_checked_yet_can_be_cancelled(batch_app) -> None:
    made = await batch_app()
    client = made.client()
    batch = await submit(client, [line(1)])
    check_error(await client.delete(f"/v1/files/{batch['input_file_id']}"), 409)
    await client.post(f"/v1/batches/{batch['id']}/cancel")
    async with feeding(made):
        ended = await until(client, batch["id"])
    assert ended["status"] == "cancelled" and not made.process.added
    assert ended["output_file_id"] is None


async def test_metrics_count_batches_and_lines(batch_app) -> None:
    made = await batch_app("x" * 20, batches={"max_batch_reqs": 3})
    client = made.client()

    def value(name: str, **labels: str) -> float | None:
        labels = {"model_name": "tiny", "engine": "0", **labels}
        return made.metrics.registry.get_sample_value(name, labels)

    def lines_done() -> tuple[float | None, float | None]:
        name = "headway_batch_lines_done_total"
        return value(name, outcome="completed"), value(name, outcome="failed")

    assert lines_done() == (0, 0) and value("headway_batch_lines_under_way") == 0
    made.process.is_paused = True
    lines = [*(line(number) for number in range(9)), line(9, max_tokens=5000)]
    batch = await submit(client, lines)
    wrong = await submit(client, b"{")
    assert value("headway_batches_open", status="validating") == 2
    async with feeding(made):
        await until(client, wrong["id"])
        await until(client, batch["id"], "in_progress")
        assert value("headway_batches_open", status="validating") == 0
        assert value("headway_batches_open", status="in_progress") == 1
        async with asyncio.timeout(10):
            while value("headway_batch_lines_under_way") != 3:
                await asyncio.sleep(0.01)
        assert lines_done() == (0, 0)
        made.process.is_paused = False
        await until(client, batch["id"])
    assert lines_done() == (9, 1) and value("headway_batch_lines_under_way") == 0
    assert value("headway_batches_open", status="in_progress") == 0


async def test_what_is_not_done_in_time_is_in_the_error_file(batch_app, wall) -> None:
    made = await batch_app("x" * 50, batches={"max_batch_reqs": 2})
    client = made.client()
    async with feeding(made):
        lines = [line(number, max_tokens=40) for number in range(200)]
        batch = await submit(client, lines, window="1h")
        while (await until(client, batch["id"], "in_progress"))["request_counts"]["completed"] < 3:
            await asyncio.sleep(0)
        wall.now += 3601
        ended = await until(client, batch["id"])
        found = await content(client, ended["output_file_id"])
        errors = await content(client, ended["error_file_id"])
    assert ended["status"] == "expired" and ended["expired_at"]
    assert found.keys() | errors.keys() == {f"r{number}" for number in range(200)}
    assert not found.keys() & errors.keys() and len(found) >= 3
    counts = {"total": 200, "completed": len(found), "failed": len(errors)}
    assert ended["request_counts"] == counts
    for one in errors.values():
        assert one["response"] is None and one["error"]["code"] == "batch_expired"


async def test_tenants_and_batches_get_turns(batch_app) -> None:
    made = await batch_app("x" * 20, batches={"max_batch_reqs": 4}, api_key=("one", "two"))
    one, two = made.client("one"), made.client("two")
    large = await submit(one, [line(number, max_tokens=10) for number in range(150)])
    second = await submit(one, [line(number, max_tokens=10) for number in range(20)])
    small = await submit(two, [line(number, max_tokens=10) for number in range(20)])
    async with feeding(made):
        await until(two, small["id"])
        counts = (await one.get(f"/v1/batches/{large['id']}")).json()["request_counts"]
        assert counts["completed"] < 60
        await until(one, second["id"])
        counts = (await one.get(f"/v1/batches/{large['id']}")).json()["request_counts"]
        assert counts["completed"] < 100
        assert (await until(one, large["id"]))["request_counts"]["completed"] == 150


async def test_few_lines_wait_and_ordinary_requests_go_first(batch_app) -> None:
    made = await batch_app("x" * 20)
    client = made.client()
    made.process.is_paused = True
    async with feeding(made):
        batch = await submit(client, [line(number) for number in range(100)])
        await until(client, batch["id"], "in_progress")
        while len(made.engine.waiting) < feeder_module.MAX_WAITING:
            await asyncio.sleep(0)
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(made.engine.waiting) == feeder_module.MAX_WAITING
        assert made.engine.waiting.totals.total.num_requests == 0
        made.process.is_paused = False
        await until(client, batch["id"])


async def test_few_lines_run_beside_ordinary_requests(batch_app) -> None:
    made = await batch_app("x" * 150)
    client = made.client()
    async with feeding(made):
        made.process.is_paused = True
        body = {"prompt": "x", "max_tokens": 150}
        ordinary = asyncio.create_task(client.post(COMPLETIONS, json=body))
        while not made.engine.num_ordinary:
            await asyncio.sleep(0)
        batch = await submit(client, [line(number, max_tokens=100) for number in range(30)])
        await until(client, batch["id"], "in_progress")
        made.process.is_paused = False
        most = 0
        while not ordinary.done():
            most = max(most, made.engine.num_requests - made.engine.num_ordinary)
            await asyncio.sleep(0)
        assert 1 <= most <= feeder_module.NUM_BESIDE
        await until(client, batch["id"])


async def test_lines_count_toward_quotas_and_wait_for_them(batch_app, tmp_path) -> None:
    path = tmp_path / "tenants.yaml"
    digest = "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683"  # of "key"
    path.write_text(
        "tiers:\n  batch: {spot: true, price: {output: 2.0}}\n"
        f"tenants:\n  a: {{keys: ['sha256:{digest}'], quotas: {{requests_per_minute: 30}}}}\n"
    )
    made = await batch_app(tenants_file=str(path))
    client = made.client("key")
    async with feeding(made):
        batch = await submit(client, [line(number) for number in range(100)])
        meter = made.directory.find("a", None).meter
        async with asyncio.timeout(20):
            while meter.requests.num_left(meter.now()) > 1:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        counts = (await client.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]
        assert 20 <= counts["completed"] <= 32 and counts["failed"] == 0
    assert meter.num_in_flight == 0


async def test_the_loss_of_an_engine_is_retried(batch_app, monkeypatch) -> None:
    made = await batch_app("abc")
    client = made.client()
    real, num_failures = made.engine.submit, 0

    async def fail_twice(*args: Any) -> Any:
        nonlocal num_failures
        if num_failures < 2:
            num_failures += 1
            raise EngineDeadError("gone")
        return await real(*args)

    monkeypatch.setattr(made.engine, "submit", fail_twice)
    async with feeding(made):
        ended = await until(client, (await submit(client, [line(1)]))["id"])
    assert ended["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


def test_what_follows_from_an_error() -> None:
    assert outcome_of(QuotaError("x", 7, "requests_per_minute"), 1) == Later(7, True)
    assert outcome_of(OverloadedError("x", 5), 9) == Later(5, False)
    assert outcome_of(ApiError(UNAVAILABLE), 9) == Later(1.0, False)
    for number, again in ((1, True), (2, True), (3, False)):
        outcome = outcome_of(EngineDeadError("x"), number)
        assert isinstance(outcome, Again if again else Failed)
        assert isinstance(outcome_of(RuntimeError("x"), number), Again if again else Failed)
    for error in (NeverFitsError("x", "n"), QuarantinedError("x")):
        assert isinstance(outcome_of(error, 1), Failed)


async def test_the_batches_of_a_tenant_are_bounded(batch_app, monkeypatch) -> None:
    made = await batch_app()
    client = made.client()
    monkeypatch.setattr(store_module, "MAX_OPEN_BATCHES", 2)
    monkeypatch.setattr(store_module, "MAX_BATCHES", 3)
    batches = [await submit(client, [line(1)]) for _ in range(2)]
    body = {"input_file_id": batches[0]["input_file_id"], "endpoint": COMPLETIONS}
    refused = await client.post("/v1/batches", json={**body, "completion_window": "1h"})
    check_error(refused, 429)
    async with feeding(made):
        for batch in batches:
            await until(client, batch["id"])
        later = [await submit(client, [line(1)]) for _ in range(2)]
        await until(client, later[-1]["id"])
    names = [one["id"] for one in (await client.get("/v1/batches")).json()["data"]]
    assert names == [later[1]["id"], later[0]["id"], batches[1]["id"]]


async def test_a_draining_server_leaves_batches_to_the_next(batch_app) -> None:
    made = await batch_app("x" * 50, batches={"max_batch_reqs": 2})
    client = made.client()
    async with feeding(made):
        batch = await submit(client, [line(number, max_tokens=40) for number in range(50)])
        while (await until(client, batch["id"], "in_progress"))["request_counts"]["completed"] < 3:
            await asyncio.sleep(0)
        made.admission.close()
        async with asyncio.timeout(5):
            while made.engine.num_requests:
                await asyncio.sleep(0.01)
        assert (await client.get(f"/v1/batches/{batch['id']}")).json()["status"] == "in_progress"
    made.admission.is_closed = False
    async with feeding(made):
        ended = await until(client, batch["id"])
        found = await content(client, ended["output_file_id"])
    assert ended["status"] == "completed" and len(found) == 50


async def test_the_document_has_its_routes_and_answers(batch_app) -> None:
    made = await batch_app()
    client = made.client()
    document = (await client.get("/openapi.json")).json()
    documented = {
        (method.upper(), path)
        for path, item in document["paths"].items()
        for method in item
        if path.startswith(("/v1/files", "/v1/batches"))
    }
    routes = {one for one in routes_of(made.app) if one[1].startswith(("/v1/files", "/v1/batches"))}
    assert documented == routes and len(routes) == 9

    def check(name: str, answer: Any) -> None:
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema_rs.Draft202012Validator(schema).validate(answer)

    async with feeding(made):
        batch = await submit(client, [line(1), line(2, max_tokens=999)])
        check("Batch", batch)
        check("Batch", await until(client, batch["id"]))
        check("Batch", await until(client, (await submit(client, b"x"))["id"]))
    check("BatchList", (await client.get("/v1/batches")).json())
    check("FileList", (await client.get("/v1/files")).json())
    check("StoredFile", (await client.get(f"/v1/files/{batch['input_file_id']}")).json())
    check("FileDeleted", (await client.delete(f"/v1/files/{batch['input_file_id']}")).json())


async def test_the_official_client(batch_app) -> None:
    made = await batch_app("hello")
    client = openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="x", max_retries=0, http_client=made.client()
    )
    async with feeding(made):
        expires: Any = {"anchor": "created_at", "seconds": 7200}
        content = ("in.jsonl", jsonl([line(1, CHAT), line(2, CHAT)]))
        file = await client.files.create(file=content, purpose="batch", expires_after=expires)
        assert file.expires_at == file.created_at + 7200
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
        )
        batch_id = batch.id
        while batch.status != "completed":
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch_id)
        assert batch.request_counts and batch.request_counts.completed == 2
        assert batch.output_file_id is not None
        text = (await client.files.content(batch.output_file_id)).text
        assert len(text.splitlines()) == 2 and "hello" in text
        assert [one.id async for one in client.batches.list()] == [batch_id]
        assert len([one async for one in client.files.list(purpose="batch")]) == 1
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(batch_id)
        assert (await client.files.delete(file.id)).deleted
