"""Background responses: they go on without a client, and are read again from their log."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from headway.core.params import SamplingParams
from headway.server import background
from headway.server.background import estimate_bytes, has_room
from headway.tenancy.keys import digest_of, write_digest
from tests.server.api.test_responses import ADD, check_events, events_of, without_cached
from tests.server.api.test_streams import Reader, drained, paused
from tests.server.api.test_tools import SCRIPT as CALLS
from tests.server.api.test_tools import THINKS
from tests.support.apps import check_error, serving

PATH = "/v1/responses"
SCRIPT = "".join(chr(109 + i % 8) for i in range(60))
BODY = {"input": "hi", "max_output_tokens": 40, "background": True}
MIB = 1024**2


def numbered() -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"{next(numbers):032x}"


@asynccontextmanager
async def served(local: Any, script: Any = SCRIPT, **options: Any) -> AsyncIterator[Any]:
    """A server with an id for each response; nothing runs at the end."""
    async with serving(local, script, new_id=numbered(), **options) as made:
        yield made
        await drained(made)
        made.context.background.check()


def post(made: Any, **fields: Any) -> Reader:
    return Reader(made.apps.public, PATH, {**BODY, "stream": True, **fields})


def read(made: Any, response_id: str, after: int | None = None, **headers: str) -> Reader:
    query = "" if after is None else f"&starting_after={after}"
    return Reader(made.apps.public, f"{PATH}/{response_id}?stream=true{query}", None, **headers)


def data_of(reader: Reader) -> list[Any]:
    return [data for _, data in reader.events]


async def create(made: Any, **fields: Any) -> dict[str, Any]:
    response = await made.public.post(PATH, json={**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def get(made: Any, response_id: str) -> dict[str, Any]:
    response = await made.public.get(f"{PATH}/{response_id}")
    assert response.status_code == 200, response.text
    return response.json()


async def events_in(made: Any, response_id: str) -> list[dict[str, Any]]:
    """All events of a response that has ended."""
    text = (await made.public.get(f"{PATH}/{response_id}?stream=true")).text
    return events_of(text.removeprefix(": resumed\n\n"))


async def until_ended(made: Any, response_id: str) -> dict[str, Any]:
    async with asyncio.timeout(5):
        while (answer := await get(made, response_id))["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    return answer


async def test_the_answer_is_that_of_a_request_which_waits(local) -> None:
    script = f"<think>\nhm </think>\n{CALLS}"
    fields: Any = {"tools": [ADD, {"type": "web_search"}, {"type": "function", "name": "now"}]}
    fields |= {"max_output_tokens": None, "metadata": {"a": "b"}, "top_logprobs": 1}
    async with served(local, script, template=THINKS) as made:
        whole = await made.public.post(PATH, json={**BODY, **fields, "background": False})
        async with paused(made):
            response = await made.public.post(PATH, json={**BODY, **fields})
            assert response.headers["x-headway-ignored-tools"] == "web_search"
            begun = response.json()
            assert begun["status"] == "queued" and begun["background"] and begun["store"]
            assert begun["usage"] is None and begun["output"] == []
            assert await get(made, begun["id"]) == begun
        ended = without_cached(await until_ended(made, begun["id"]))
        ids = json.dumps(whole.json()["id"]), json.dumps(begun["id"])
        expected = {**whole.json(), "background": True, "store": True}
        assert {**ended, "output": None, "id": None} == {
            **without_cached(expected),
            "output": None,
            "id": None,
        }
        assert ids[0] != ids[1] and len(ended["output"]) == len(expected["output"]) == 4
        events = await events_in(made, begun["id"])
        assert without_cached(check_events(events)) == ended


async def test_the_rest_is_what_comes_after_each_event(local) -> None:
    async with served(local) as made:
        whole = post(made)
        await whole.end()
        events = data_of(whole)
        last = check_events(events[:-1])
        assert last["status"] == "incomplete" and events[-1] == "[DONE]"
        for number in range(len(events) - 1):
            rest = read(made, last["id"], number)
            await rest.end()
            assert data_of(rest) == events[number + 1 :]
        again = read(made, last["id"])
        await again.end()
        assert data_of(again) == events
        assert len(made.process.added) == 1


async def test_it_goes_on_while_its_clients_come_and_go(local) -> None:
    async with served(local) as made:
        first = post(made)
        await first.read(7)
        async with paused(made):
            seen = data_of(first)
            await first.leave()
            name = seen[0]["response"]["id"]
            now = await get(made, name)
            assert now["status"] == "in_progress" and now["output"][0]["status"] == "in_progress"
            texts = [one["delta"] for one in seen if one["type"].endswith("text.delta")]
            assert now["output"][0]["content"][0]["text"].startswith("".join(texts))
            readers = [read(made, name, seen[-1]["sequence_number"]) for _ in range(3)]
            await asyncio.sleep(0.02)
            await readers.pop().leave()
        for reader in readers:  # two at a time, unlike the readers of a resumable stream
            await reader.end()
            assert check_events([*seen, *data_of(reader)[:-1]])["status"] == "incomplete"
        assert made.engine.num_requests == 0


async def test_nobody_has_to_read_it(local) -> None:
    async with served(local) as made:
        begun = await create(made)
        async with asyncio.timeout(5):
            while made.engine.num_requests:
                await asyncio.sleep(0.01)
        assert (await until_ended(made, begun["id"]))["usage"]["output_tokens"] == 40


async def test_a_response_is_cancelled_once(local) -> None:
    async with served(local) as made:
        reader = post(made)
        await reader.read(6)
        made.process.is_paused = True
        name = data_of(reader)[0]["response"]["id"]
        first, second = await asyncio.gather(
            *[made.public.post(f"{PATH}/{name}/cancel") for _ in range(2)]
        )
        assert first.status_code == 200 and first.json() == second.json()
        assert first.json()["status"] == "cancelled" and first.json()["error"] is None
        assert first.json()["output"][0]["status"] == "incomplete"
        await reader.end()
        *_, last, done = data_of(reader)
        assert last["type"] == "response.failed" and done == "[DONE]"
        assert last["response"] == first.json() == await get(made, name)
        assert made.engine.num_requests == 0
        made.process.is_paused = False
        ended = await until_ended(made, (await create(made))["id"])
        again = await made.public.post(f"{PATH}/{ended['id']}/cancel")
        assert again.json() == ended and ended["status"] == "incomplete"


async def test_a_queued_response_can_be_cancelled_as_a_request(local) -> None:
    async with served(local) as made:
        made.process.is_paused = True
        name = (await create(made))["id"]
        assert (await made.public.delete(f"/v1/requests/{name}")).status_code == 200
        ended = await until_ended(made, name)
        assert ended["status"] == "cancelled" and ended["output"] == []
        events = await events_in(made, name)
        kinds = [event["type"] for event in events]
        assert kinds == ["response.created", "response.queued", "response.failed"]
        made.process.is_paused = False


async def test_a_request_that_waits_is_no_background_response(local) -> None:
    async with served(local) as made:
        made.process.is_paused = True
        reader = post(made, background=False)
        while not made.process.added:
            await asyncio.sleep(0.01)
        path = f"{PATH}/{made.process.added[0].id}"
        for method, name in (("POST", f"{path}/cancel"), ("GET", path), ("DELETE", path)):
            error = check_error(await made.public.request(method, name), 400)
            assert error["code"] == "not_a_background_response"
        made.process.is_paused = False
        made.process._wake.set()
        await reader.end()
        check_error(await made.public.post(f"{path}/cancel"), 404)


async def test_a_deleted_response_is_gone(local) -> None:
    async with served(local) as made:
        ended = (await create(made))["id"]
        await until_ended(made, ended)
        running = post(made)
        await running.read(5)
        made.process.is_paused = True
        for name in (ended, data_of(running)[0]["response"]["id"]):
            response = await made.public.delete(f"{PATH}/{name}")
            assert response.json() == {"id": name, "object": "response", "deleted": True}
            check_error(await made.public.get(f"{PATH}/{name}"), 404)
            check_error(await made.public.delete(f"{PATH}/{name}"), 404)
        await running.end()  # its reader has the end
        assert data_of(running)[-2]["response"]["status"] == "cancelled"
        assert len(made.context.background) == 0 and not made.context.background._spaces
        made.process.is_paused = False


async def test_failures_are_the_end_of_the_log(local) -> None:
    for script, num_output in (([97, 98, None], 1), ([None], 0)):
        async with served(local, script) as made:
            ended = await until_ended(made, (await create(made))["id"])
            assert ended["status"] == "failed" and ended["error"]["code"] == "server_error"
            assert len(ended["output"]) == num_output
            events = await events_in(made, ended["id"])
            assert events[-2]["type"] == "error" and events[-1]["response"] == ended
            assert "secret" not in str(events)


async def test_a_server_that_stops_ends_it(local) -> None:
    async with serving(local, SCRIPT) as made:
        made.process.is_paused = True
        reader = post(made)
        await reader.read(2)
        await made.engine.close()
        await reader.end()
        assert data_of(reader)[-2]["response"]["status"] == "failed"


async def test_it_expires(local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "KEEP_S", 0.05)
    async with served(local) as made:
        made.process.is_paused = True
        name = (await create(made))["id"]
        await asyncio.sleep(0.1)
        assert (await get(made, name))["status"] == "queued"  # one that runs does not expire
        made.process.is_paused = False
        made.process._wake.set()
        async with asyncio.timeout(5):
            while (await made.public.get(f"{PATH}/{name}")).status_code == 200:
                await asyncio.sleep(0.01)
        assert not made.context.background._spaces and not made.context.background._expiries


@pytest.fixture
def two_tenants(tmp_path: Path) -> str:
    path = tmp_path / "tenants.yaml"
    lines = [f"  {name}: {{keys: ['{write_digest(digest_of(name.encode()))}']}}" for name in "ab"]
    path.write_text("\n".join(["tenants:", *lines]))
    return str(path)


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


async def test_another_tenant_learns_nothing(local, two_tenants: str) -> None:
    async with served(local, tenants_file=two_tenants) as made:
        made.process.is_paused = True
        name = (await made.public.post(PATH, json=BODY, headers=key("a"))).json()["id"]
        unknown = "resp_" + "f" * 32
        for method, rest in (
            ("GET", ""),
            ("GET", "?stream=true"),
            ("GET", "?stream=true&starting_after=0"),
            ("POST", "/cancel"),
            ("DELETE", ""),
        ):
            answers = [
                await made.public.request(method, f"{PATH}/{one}{rest}", headers=key("b"))
                for one in (name, unknown)
            ]
            assert [answer.status_code for answer in answers] == [404, 404]
            assert answers[0].json() == answers[1].json()
        answer = await made.public.get(f"{PATH}/{name}", headers=key("a"))
        assert answer.json()["status"] == "queued"
        made.process.is_paused = False
        made.process._wake.set()


async def test_a_full_log_refuses_its_tenant_only(
    local, two_tenants: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MAX_BYTES", 8 * background.MIN_BYTES)
    async with served(local, tenants_file=two_tenants) as made:

        async def create_as(name: str) -> Any:
            return await made.public.post(PATH, json=BODY, headers=key(name))

        answers = [await create_as("a") for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 4 + [429]
        error = check_error(answers[-1], 429)
        assert "DELETE /v1/responses/{id}" in error["message"]
        assert answers[-1].headers["retry-after"] == "5"
        assert len(made.process.added) == 4, "a refused response is not computed"
        answers += [await create_as("b") for _ in range(3)]
        assert [answer.status_code for answer in answers[5:]] == [200, 200, 429]
        names = [answer.json()["id"] for answer in answers[:4]]
        for name in names:  # none of them has lost an event
            reader = read(made, name, None, authorization="Bearer a")
            await reader.end()
            assert check_events(data_of(reader)[:-1])["usage"]["output_tokens"] == 40
        check_error(await create_as("a"), 429)
        for name in names[:3]:
            await made.public.delete(f"{PATH}/{name}", headers=key("a"))
        assert (await create_as("a")).status_code == 200


async def test_a_refused_response_takes_no_room(local) -> None:
    async with served(local) as made:

        async def refuse(*_args: Any, **_options: Any) -> Any:
            raise RuntimeError("an error of any kind")

        submit, made.engine.submit = made.engine.submit, refuse
        check_error(await made.public.post(PATH, json=BODY), 500)
        made.engine.submit = submit
        assert not made.context.background._spaces


def test_there_is_room_for_others_whoever_asks() -> None:
    half = background.MAX_BYTES // 2
    assert has_room(half, own=1, of_gateway=1, total=1) is False
    assert has_room(half - 1, own=1, of_gateway=1, total=1) is True
    # The first of a tenant needs some room only.
    assert has_room(half, own=0, of_gateway=0, total=half + half - 1) is True
    assert has_room(1, own=0, of_gateway=0, total=2 * half) is False
    # Many tenants of one gateway leave a quarter to others.
    parts = background.MAX_BYTES // 4
    assert has_room(1, own=0, of_gateway=3 * parts - 1, total=3 * parts - 1) is True
    assert has_room(1, own=0, of_gateway=3 * parts, total=3 * parts) is False


def test_an_estimate_counts_tokens_and_the_body() -> None:
    params = SamplingParams(max_tokens=1000)
    assert estimate_bytes(0, params, 1000) == 1000 * background.TOKEN_BYTES
    assert estimate_bytes(0, params, 1) == background.MIN_BYTES
    assert estimate_bytes(MIB, params, 1) > background.NUM_ECHOES * MIB


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 0}, {"top_logprobs": 3}])
async def test_a_log_stays_below_its_estimate(local, monkeypatch, fields: Any) -> None:
    monkeypatch.setattr(background, "MIN_BYTES", 0)
    fields = {"include": ["message.output_text.logprobs"], **fields} if fields else {}
    async with served(local, "m" * 150) as made:
        text = "x" * 1000
        reader = post(made, max_output_tokens=150, metadata={"a": text[:512]}, user=text, **fields)
        await reader.read(2)
        (space,) = made.context.background._spaces.values()
        await reader.end()
        (log,) = made.context.background._logs.values()
        sizes = [background.OBJECT_BYTES + len(event) for event in log._events]
        assert log.num_bytes == sum(sizes) < space.num_bytes
        assert made.context.background._spaces[log.id].num_bytes == log.num_bytes


REFUSED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "not kept": ({"store": False}, {}, "store"),
    "a text": ({"background": "true"}, {}, "background"),
    "a number": ({"background": 1}, {}, "background"),
    "a repeated request": ({}, {"Idempotency-Key": "k"}, "background"),
}


async def test_what_cannot_be_honoured_is_refused_by_name(local) -> None:
    async with served(local) as made:
        for fields, headers, param in REFUSED.values():
            response = await made.public.post(PATH, json={**BODY, **fields}, headers=headers)
            assert check_error(response, 400)["param"] == param
        assert not made.process.added and not made.context.background._spaces
        name = (await create(made, store=True))["id"]
        await until_ended(made, name)
        for query, param in {
            "starting_after=1": "starting_after",
            "stream=false&starting_after=1": "starting_after",
            "stream=true&starting_after=-1": "starting_after",
            "stream=true&starting_after=": "starting_after",
            "stream=true&starting_after=1.0": "starting_after",
            "stream=true&starting_after=999": "starting_after",
            f"stream=true&starting_after={'9' * 5000}": "starting_after",
            "stream=true&starting_after=%D9%A1": "starting_after",
            "stream=yes": "stream",
            "include_obfuscation=true": "include_obfuscation",
            "include=x": "include",
            "stream=true&stream=true": None,
        }.items():
            error = check_error(await made.public.get(f"{PATH}/{name}?{query}"), 400)
            assert error["param"] == param, query
        check_error(await made.public.post(f"{PATH}/{name}/cancel?a=1"), 400)
        check_error(await made.public.put(f"{PATH}/{name}"), 405)
        check_error(await made.public.get(f"{PATH}/{name}/cancel"), 405)
        check_error(await made.public.get(f"{PATH}/{name}/input_items"), 404)
        flags = "stream=false&include_obfuscation=false"
        assert (await made.public.get(f"{PATH}/{name}?{flags}")).status_code == 200


async def test_the_official_client(local) -> None:
    async with served(local) as made:
        client = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="x", http_client=made.public
        )
        asked: Any = {"model": "tiny", "input": "hi", "max_output_tokens": 40, "background": True}
        begun = await client.responses.create(**asked)
        assert begun.status == "queued" and begun.background
        while (ended := await client.responses.retrieve(begun.id)).status in (
            "queued",
            "in_progress",
        ):
            await asyncio.sleep(0.01)
        assert ended.output_text == SCRIPT[:40]
        stream = await client.responses.create(**asked, stream=True)
        events: list[Any] = [event async for event in stream]
        name = events[0].response.id
        rest = await client.responses.retrieve(name, stream=True, starting_after=4)
        assert [event async for event in rest] == events[5:]
        assert (await client.responses.cancel(name)).status == "incomplete"
        await client.responses.delete(name)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(name)
