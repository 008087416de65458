"""Models, health, version, and metrics as a scraper sees them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway._version import __version__
from tests.support.apps import check_error, serving


async def test_models(local) -> None:
    async with serving(local) as made:
        listed = (await made.public.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["tiny", "alias/tiny"]
        assert listed["data"][0]["object"] == "model"
        assert listed["data"][0]["max_model_len"] == 200
        for name in ("tiny", "alias/tiny"):
            assert (await made.public.get(f"/v1/models/{name}")).json()["id"] == name
        response = await made.public.get("/v1/models/other")
        assert check_error(response, 404)["code"] == "model_not_found"


@pytest.mark.parametrize("is_started", [False, True])
async def test_health(local, is_started) -> None:
    async with serving(local, is_started=is_started) as made:
        expected = 200 if is_started else 503
        for client in (made.public, made.admin):
            assert (await client.get("/health/live")).status_code == 200
            assert (await client.get("/health/ready")).status_code == expected
            assert (await client.get("/health")).status_code == expected
        assert (await made.public.get("/v1/models")).status_code == 200
        assert (await made.public.get("/openapi.json")).status_code == 200
        assert (await made.admin.get("/metrics")).status_code == 200


async def test_version(local) -> None:
    async with serving(local) as made:
        for client in (made.public, made.admin):
            assert (await client.get("/version")).json() == {"version": __version__}


async def test_each_listener_has_its_own_routes(local) -> None:
    async with serving(local) as made:
        check_error(await made.public.get("/metrics"), 404)
        for path in ("/v1/models", "/openapi.json", "/tokenize", "/playground"):
            check_error(await made.admin.get(path), 404)
        for path in ("/dashboard", "/dashboard/api/stream", "/dashboard/api/settings"):
            check_error(await made.public.get(path), 404)


@pytest.mark.parametrize("path", ["/v1/responses/resp_1/input_items", "/v1/messages/batches"])
async def test_what_is_not_offered_is_said(local, path) -> None:
    async with serving(local) as made:
        for response in (
            await made.public.post(path, json={"model": "tiny", "input": "x"}),
            await made.public.get(path),
        ):
            assert response.status_code == 404
            message = response.json()["error"]["message"]
            assert "not offered" in message and path in message


async def test_metrics_after_requests(local) -> None:
    async with serving(local, "abc") as made:
        for _ in range(3):
            body = {"prompt": "x", "n": 2, "max_tokens": 3}
            await made.public.post("/v1/completions", json=body)
        await made.public.post("/v1/completions", json={"prompt": ""})
        response = await made.admin.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, sample.labels.get("finished_reason") or sample.labels.get("reason")): sample
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    values = {key: sample.value for key, sample in samples.items()}
    assert values["vllm:request_success_total", "length"] == 6
    assert values["vllm:generation_tokens_total", None] == 18
    assert values["vllm:prompt_tokens_total", None] == 3
    assert values["vllm:request_params_n_sum", None] == 6
    assert values["vllm:request_params_max_tokens_sum", None] == 9
    assert values["vllm:time_to_first_token_seconds_count", None] == 6
    assert values["vllm:num_requests_running", None] == 0
    assert values["headway_kv_blocks_used", None] == 0
    assert values["headway_kv_blocks_total", None] == 64
    assert values["headway_requests_refused_total", "invalid_request"] == 1
    info = samples["vllm:cache_config_info", None]
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"]) == ("4", "64")
    assert info.labels["model_name"] == "tiny"
