"""Idempotency-Key: a request that is sent again gets its first answer, and nobody else does."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from headway.server import streams
from headway.tenancy.keys import digest_of, write_digest
from tests.server.api.test_streams import SCRIPT, Reader, drained, paused, text_of
from tests.support.apps import check_error, serving

BODY = {"prompt": "x", "max_tokens": 40}
KEY = {"Idempotency-Key": "order-7"}


async def send(made: Any, headers: dict[str, str] = KEY, **fields: Any) -> Any:
    return await made.public.post("/v1/completions", json={**BODY, **fields}, headers=headers)


def new_ids(made: Any) -> None:
    """Have requests get different ids, as outside of tests."""
    numbers = count()
    object.__setattr__(made.context, "new_id", lambda: f"{next(numbers):032x}")


def tenants_file(folder: Path, **settings: str) -> str:
    path = folder / "tenants.yaml"
    lines = [
        f"  {name}: {{keys: ['{write_digest(digest_of(name.encode()))}'], {more}}}"
        for name, more in settings.items()
    ]
    path.write_text("\n".join(["tenants:", *lines]))
    return str(path)


def reader(made: Any, **fields: Any) -> Reader:
    return Reader(
        made.apps.public, "/v1/completions", {**BODY, **fields}, **{"idempotency-key": "k"}
    )


@pytest.mark.parametrize(
    "fields", [{}, {"n": 3}, {"logprobs": 2}, {"stop": ["rs"]}, {"echo": None}]
)
async def test_the_same_request_again_gets_the_same_answer(local, fields: Any) -> None:
    async with serving(local, SCRIPT) as made:
        new_ids(made)
        first = await send(made, **fields)
        again = await send(made, **fields)
        assert first.status_code == 200 and again.json() == first.json()
        assert len(made.process.added) == 1
        other = await send(made, {"Idempotency-Key": "order-8"}, **fields)
        assert other.json()["id"] != first.json()["id"]
        assert len(made.process.added) == 2
        await drained(made)


async def test_a_stream_again_is_the_whole_stream(local) -> None:
    async with serving(local, SCRIPT) as made:
        first = reader(made, stream=True, n=3)
        await first.end()
        again = reader(made, stream=True, n=3)
        await again.end()
        for index in range(3):
            assert text_of(again.events, index) == text_of(first.events, index) != ""
        assert len(made.process.added) == 1
        await drained(made)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_lost_its_answer_gets_the_running_one(local, is_stream: bool) -> None:
    """The client leaves before the first token: the request goes on, and is found."""
    async with serving(local, SCRIPT) as made:
        async with paused(made):
            first = reader(made, stream=is_stream)
            await asyncio.sleep(0.02)
            await first.leave()
            assert made.engine.num_requests == 1
            again = reader(made, stream=is_stream)
            await asyncio.sleep(0.02)
        await again.end()
        assert again.status == 200 and len(made.process.added) == 1
        if is_stream:
            assert text_of(again.events) == SCRIPT[:40]
        else:
            assert SCRIPT[:40].encode() in again.body
        await drained(made)


async def test_two_at_once_compute_once_and_the_newer_gets_the_answer(local) -> None:
    async with serving(local, SCRIPT) as made:
        async with paused(made):
            both = [reader(made), reader(made)]
            await asyncio.sleep(0.05)
        for one in both:
            await one.end()
        assert [one.status for one in both] == [409, 200]
        assert b"Idempotency-Key" in both[0].body
        assert len(made.process.added) == 1
        await drained(made)


@pytest.mark.parametrize("change", [{"max_tokens": 39}, {"prompt": "y"}, {"stream": True}])
async def test_the_key_with_another_body_is_refused(local, change: Any) -> None:
    async with serving(local, SCRIPT) as made:
        assert (await send(made)).status_code == 200
        error = check_error(await send(made, **change), 422)
        assert error["code"] == "idempotency_key_reused"
        messages = [{"role": "user", "content": "x"}]
        path = "/v1/chat/completions"
        chat = await made.public.post(path, json={"messages": messages}, headers=KEY)
        check_error(chat, 422)
        assert len(made.process.added) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb", "\u00e4"])
async def test_a_bad_key_is_refused(local, key: str) -> None:
    async with serving(local, SCRIPT) as made:
        headers = [(b"Idempotency-Key", key.encode())]
        response = await made.public.post("/v1/completions", json=BODY, headers=headers)
        assert check_error(response, 400)["code"] == "invalid_idempotency_key"
        twice = [(b"Idempotency-Key", b"a"), (b"Idempotency-Key", b"b")]
        response = await made.public.post("/v1/completions", json=BODY, headers=twice)
        check_error(response, 400)
        assert not made.process.added


async def test_several_prompts_are_refused_by_name(local) -> None:
    async with serving(local, SCRIPT) as made:
        assert check_error(await send(made, prompt=["x", "y"]), 400)["param"] == "prompt"
        assert (await send(made)).status_code == 200, "a refused request does not use up its key"


async def test_the_same_key_of_another_tenant_is_another_request(local, tmp_path: Path) -> None:
    path = tenants_file(tmp_path, a="", b="")
    async with serving(local, SCRIPT, tenants_file=path) as made:
        new_ids(made)
        answers = {}
        for name in "abab":
            headers = {**KEY, "Authorization": f"Bearer {name}"}
            answers[name, name in answers] = (await send(made, headers)).json()
        ids = {name: answer["id"] for (name, _), answer in answers.items()}
        assert ids["a"] != ids["b"] and len(made.process.added) == 2


async def test_a_repeat_takes_no_concurrency_and_counts_as_a_request(local, tmp_path: Path) -> None:
    quotas = "quotas: {concurrent_requests: 1, requests_per_minute: 3}"
    path = tenants_file(tmp_path, a=quotas)
    async with serving(local, SCRIPT, tenants_file=path) as made:
        body, key = {**BODY}, {"idempotency-key": "k", "authorization": "Bearer a"}
        app = made.apps.public
        async with paused(made):
            first = Reader(app, "/v1/completions", body, **key)
            await asyncio.sleep(0.02)
            await first.leave()
            again = Reader(app, "/v1/completions", body, **key)
            await asyncio.sleep(0.02)
        await again.end()
        assert again.status == 200
        last = [Reader(app, "/v1/completions", body, **key) for _ in range(2)]
        for one in last:
            await one.end()
        assert sorted(one.status for one in last) == [200, 429], "three requests a minute"
        assert len(made.process.added) == 1
        await drained(made)


async def test_a_tenant_with_many_small_answers_loses_its_own(
    local, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Memory is bounded for all; a flood of keys pushes out no answer of another tenant."""
    monkeypatch.setattr(streams, "MAX_LEFT_SIZE", 8 * streams.MIN_LEFT_SIZE)
    path = tenants_file(tmp_path, flood="", victim="")
    async with serving(local, SCRIPT, tenants_file=path) as made:
        new_ids(made)
        mine = {**KEY, "Authorization": "Bearer victim"}
        # A long prompt counts too: it is kept with the answer.
        body = {"prompt": "v" * 60}
        first = await send(made, mine, **body)
        for number in range(40):
            headers = {"Idempotency-Key": f"{number}", "Authorization": "Bearer flood"}
            assert (await send(made, headers, max_tokens=1)).status_code == 200
        assert len(made.context.streams) <= 9
        num_computed = len(made.process.added)
        assert (await send(made, mine, **body)).json() == first.json()
        assert len(made.process.added) == num_computed
        assert not made.context.streams._turns
        await drained(made)
        assert len(made.context.streams._by_alias) == len(made.context.streams)


async def test_an_answer_expires(local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "REPEAT_S", 0.01)
    async with serving(local, SCRIPT) as made:
        new_ids(made)
        first = await send(made)
        async with asyncio.timeout(5):
            while len(made.context.streams):
                await asyncio.sleep(0.01)
        again = await send(made)
        assert again.json()["id"] != first.json()["id"], "computed and billed again"
        assert len(made.process.added) == 2
