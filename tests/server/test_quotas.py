"""Quotas over HTTP: what is charged for each way a request can end, and what its answer says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.clock import VirtualClock
from headway.server.http.rate_headers import duration
from headway.tenancy.keys import digest_of, write_digest
from tests.support.apps import check_error

HEADERS = {"Authorization": "Bearer a"}
PATH = "/v1/completions"


def written(**quotas: int) -> str:
    entries = ", ".join(f"{name}: {value}" for name, value in quotas.items())
    return (
        f"tenants: {{alice: {{keys: ['{write_digest(digest_of(b'a'))}'], quotas: {{{entries}}}}}}}"
    )


@pytest.fixture
async def serve(local: Any, tmp_path: Path):
    """A server with one tenant, under a clock that stands still."""

    async def make(script: Any = "abcdef", settings: Any = None, **quotas: int) -> SimpleNamespace:
        path = tmp_path / "tenants.yaml"
        path.write_text(written(**quotas))
        made = await local(
            script, clock=VirtualClock(5.0), tenants_file=str(path), **(settings or {})
        )
        made.client.headers.update(HEADERS)
        made.path = path
        return made

    return make


async def left(made: Any) -> tuple[int, int]:
    """Requests and tokens that are left, as an answer says that costs neither."""
    headers = (await made.client.get("/v1/models")).headers
    return tuple(int(headers[f"x-ratelimit-remaining-{kind}"]) for kind in ("requests", "tokens"))  # pyright: ignore


async def test_every_answer_says_what_is_left(serve) -> None:
    made = await serve(requests_per_minute=60, tokens_per_minute=600)
    response = await made.client.post(PATH, json={"prompt": [1, 2, 3], "max_tokens": 4})
    assert response.json()["usage"]["total_tokens"] == 7
    assert {
        name: value for name, value in response.headers.items() if name.startswith("x-ratelimit")
    } == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "593",
        "x-ratelimit-reset-tokens": "700ms",
    }


async def test_a_tenant_without_limits_gets_no_rate_headers(serve) -> None:
    made = await serve()
    response = await made.client.post(PATH, json={"prompt": "x"})
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("x-ratelimit")]


async def test_too_many_requests(serve) -> None:
    made = await serve(requests_per_minute=2, tokens_per_minute=1000)
    for _ in range(2):
        assert (await made.client.post(PATH, json={"prompt": "x"})).status_code == 200
    refused = await made.client.post(PATH, json={"prompt": "x"})
    assert check_error(refused, 429)["code"] == "rate_limit_exceeded"
    assert refused.headers["retry-after"] == "30"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert b'reason="requests_per_minute"} 1.0' in made.metrics.render()
    assert (await made.client.get("/v1/models")).status_code == 200  # asks for no work
    made.admission.clock.advance_to(35.0)
    assert (await made.client.post(PATH, json={"prompt": "x"})).status_code == 200


async def test_too_many_tokens(serve) -> None:
    made = await serve(requests_per_minute=100, tokens_per_minute=60)
    body = {"prompt": [[1] * 20, [2] * 20], "max_tokens": 4, "n": 2}
    answer = (await made.client.post(PATH, json=body)).json()
    assert answer["usage"]["total_tokens"] == 56
    assert await left(made) == (98, 4)  # a prompt is a request
    refused = await made.client.post(PATH, json={"prompt": [1] * 20})
    assert "60 tokens per minute and has 4 left; this request needs 20" in refused.text
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "16")
    made.admission.clock.advance_to(21.0)
    assert (await made.client.post(PATH, json={"prompt": [1] * 20})).status_code == 200


async def test_what_is_streamed_is_paid_for_even_into_debt(serve) -> None:
    made = await serve(script="abcdefghij", tokens_per_minute=6, requests_per_minute=9)
    body = {"prompt": [1, 2], "max_tokens": 10, "stream": True}
    assert (await made.client.post(PATH, json=body)).text.endswith("[DONE]\n\n")
    refused = await made.client.post(PATH, json=body)
    assert refused.status_code == 429
    # 2 + 10 of 6 are used: 6 owed, and 2 for the next, at one in 10 seconds.
    assert refused.headers["retry-after"] == "70"
    assert (await left(made))[1] == 0


async def under_way(made: Any, **body: Any) -> asyncio.Task[Any]:
    task = asyncio.create_task(made.client.post(PATH, json={"prompt": [1, 2, 3], **body}))
    while not made.engine.num_requests:
        await asyncio.sleep(0)
    return task


async def test_a_client_that_leaves_pays_for_what_was_made(serve) -> None:
    made = await serve(
        script="x" * 150, tokens_per_minute=1000, requests_per_minute=9, concurrent_requests=1
    )
    body = {"max_tokens": 150, "stream": True, "n": 2}
    task = await under_way(made, **body)
    (stream,) = made.engine._live.by_id.values()
    while stream.num_output_tokens < 20:
        await asyncio.sleep(0)
    refused = await made.client.post(PATH, json={"prompt": "x"})
    assert "its quota concurrent_requests is" in refused.text
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert 0 < stream.num_output_tokens < 300
    assert await left(made) == (8, 1000 - 3 - stream.num_output_tokens)
    assert (await made.client.post(PATH, json={"prompt": "x"})).status_code == 200


async def test_a_client_that_leaves_before_admission_pays_nothing(serve) -> None:
    made = await serve(tokens_per_minute=1000, requests_per_minute=9, concurrent_requests=1)
    made.process.is_paused = True
    task = await under_way(made)
    assert await left(made) == (8, 997)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await left(made) == (8, 1000)


async def test_a_request_refused_after_a_wait_costs_nothing(serve) -> None:
    made = await serve(
        tokens_per_minute=1000,
        requests_per_minute=9,
        concurrent_requests=1,
        settings={"max_queue_age_s": 0.0},
    )
    made.process.is_paused = True
    task = await under_way(made)
    made.admission.clock.advance_to(10**9)
    await made.admission.refuse_expired()
    response = await task
    assert response.status_code == 503
    assert response.headers["x-ratelimit-remaining-tokens"] == "1000"
    made.process.is_paused = False
    assert (await made.client.post(PATH, json={"prompt": "x"})).status_code == 200


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_failure_costs_what_came_before_it(serve, is_stream: bool) -> None:
    made = await serve(script=[97, 98, None], tokens_per_minute=1000, requests_per_minute=9)
    response = await made.client.post(PATH, json={"prompt": [1, 2, 3], "stream": is_stream})
    assert "could not finish" in response.text
    assert await left(made) == (8, 995)
    assert num_in_flight(made) == 0


def num_in_flight(made: Any) -> int:
    return made.directory.by_digest(digest_of(b"a")).meter.num_in_flight


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": [1] * 500}, 400),
        ({"prompt": "x", "n": 0}, 400),
        ({"prompt": "x", "priority": 1}, 400),
        ({"prompt": "x", "model": "y"}, 404),
        ({}, 400),
    ],
)
async def test_a_wrong_request_costs_one_and_no_tokens(serve, body: Any, status: int) -> None:
    made = await serve(tokens_per_minute=1000, requests_per_minute=9, concurrent_requests=1)
    for _ in range(2):
        assert (await made.client.post(PATH, json=body)).status_code == status
    assert await left(made) == (7, 1000)
    assert num_in_flight(made) == 0


async def test_refusals_of_the_server_itself_cost_nothing(serve) -> None:
    made = await serve(tokens_per_minute=1000, requests_per_minute=9)
    made.admission.close()
    assert (await made.client.post(PATH, json={"prompt": "x"})).status_code == 503
    assert await left(made) == (9, 1000)


async def test_several_prompts_are_settled_together(serve) -> None:
    made = await serve(tokens_per_minute=1000, requests_per_minute=9, concurrent_requests=3)
    body = {"prompt": [[1] * 5, [2] * 6, [3] * 7], "n": 2, "max_tokens": 3, "stream": True}
    assert (await made.client.post(PATH, json=body)).status_code == 200
    assert await left(made) == (6, 1000 - 18 - 18)
    response = await made.client.post("/v1/completions", json={**body, "stream": False})
    assert response.json()["usage"]["total_tokens"] == 36
    assert await left(made) == (3, 1000 - 72)


async def test_a_reload_keeps_what_was_used(serve) -> None:
    made = await serve(tokens_per_minute=1000, requests_per_minute=9)
    await made.client.post(PATH, json={"prompt": [1, 2, 3], "max_tokens": 4})
    assert await left(made) == (8, 993)
    made.path.write_text(written(tokens_per_minute=2000, requests_per_minute=5))
    await made.watch.poll()
    assert await left(made) == (5, 993)


async def test_a_reload_while_a_request_runs(serve) -> None:
    made = await serve(tokens_per_minute=1000, requests_per_minute=9, concurrent_requests=1)
    made.process.is_paused = True
    task = await under_way(made, max_tokens=4)
    made.path.write_text(
        written(tokens_per_minute=1000, requests_per_minute=9, concurrent_requests=2)
    )
    await made.watch.poll()
    made.process.is_paused = False
    made.process._wake.set()
    assert (await task).status_code == 200
    assert await left(made) == (8, 993)
    assert num_in_flight(made) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (0.0004, "1ms"),
        (0.12, "120ms"),
        (1.0, "1s"),
        (8.64, "8.64s"),
        (59.9999, "1m0s"),
        (360.0, "6m0s"),
        (86.4, "1m26.4s"),
        (7260.0, "2h1m0s"),
    ],
)
def test_times_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
