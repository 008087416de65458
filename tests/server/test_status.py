"""Models, health, version, and metrics as a scraper sees them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway._version import __version__


async def test_models(local) -> None:
    made = await local()
    listed = (await made.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["tiny", "alias/tiny"]
    assert listed["data"][0]["object"] == "model"
    assert listed["data"][0]["max_model_len"] == 200
    for name in ("tiny", "alias/tiny"):
        assert (await made.client.get(f"/v1/models/{name}")).json()["id"] == name
    response = await made.client.get("/v1/models/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("is_started", [False, True])
async def test_health(local, is_started) -> None:
    made = await local(is_started=is_started)
    expected = 200 if is_started else 503
    assert (await made.client.get("/health/live")).status_code == 200
    assert (await made.client.get("/health/ready")).status_code == expected
    assert (await made.client.get("/health")).status_code == expected
    assert (await made.client.get("/v1/models")).status_code == 200
    assert (await made.client.get("/metrics")).status_code == 200


async def test_version(local) -> None:
    made = await local()
    assert (await made.client.get("/version")).json() == {"version": __version__}


async def test_metrics_after_requests(local) -> None:
    made = await local("abc")
    for _ in range(3):
        await made.client.post("/v1/completions", json={"prompt": "x", "n": 2, "max_tokens": 3})
    await made.client.post("/v1/completions", json={"prompt": ""})
    response = await made.client.get("/metrics")
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
