"""GET /trace: who may read it, what is in it, and its bounds."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from headway.observe.trace.account import RequestAccount
from headway.observe.trace.export import (
    TraceEnd,
    TraceHead,
    TraceLine,
    TraceRequest,
    TraceSteps,
    decode_line,
)
from headway.server.api.operate.traces import MAX_READERS, STEPS_PER_LINE, TraceSource
from headway.tenancy.keys import digest_of, write_digest
from tests.observe.test_metrics import step
from tests.support.apps import check_error, serving

SECRET = "a secret prompt"


def lines_of(response: httpx.Response) -> list[TraceLine]:
    assert response.status_code == 200, response.text
    return [decode_line(line) for line in response.content.splitlines()]


def accounts_in(lines: list[TraceLine]) -> list[RequestAccount]:
    return [line.account for line in lines if isinstance(line, TraceRequest)]


async def ask(made, **headers: str) -> None:
    body = {"prompt": SECRET, "max_tokens": 3}
    assert (await made.public.post("/v1/completions", json=body, headers=headers)).is_success


async def test_steps_and_requests_between_a_head_and_an_end(local) -> None:
    async with serving(local, new_id=iter("123456").__next__) as made:
        for _ in range(3):
            await ask(made)
        response = await made.admin.get("/trace", params={"since_s": 60})
        head, *rest, end = lines_of(response)
        assert response.headers["cache-control"] == "no-store"
    assert isinstance(head, TraceHead) and head.since_s == 60 and head.model == "tiny"
    steps = [step for one in rest if isinstance(one, TraceSteps) for step in one.steps]
    assert end == TraceEnd(len(steps), 3, is_complete=True)
    assert [one.step_id for one in steps] == sorted(one.step_id for one in steps)
    assert {one.engine for one in rest if isinstance(one, TraceSteps)} == {"local"}
    found = accounts_in([head, *rest, end])
    assert [one.id for one in found] == ["cmpl-3", "cmpl-2", "cmpl-1"], "the latest first"
    assert SECRET not in response.text


async def test_a_live_request_is_there(local) -> None:
    async with serving(local) as made:
        made.process.is_paused = True
        task = asyncio.create_task(ask(made))
        while not made.engine.num_requests:
            await asyncio.sleep(0)
        (found,) = accounts_in(lines_of(await made.admin.get("/trace")))
        assert found.state == "waiting"
        made.process.is_paused = False
        await made.process.send(None)
        await task


async def test_only_an_administrator_reads_it(local, tmp_path) -> None:
    path = tmp_path / "tenants.yaml"
    root, team = (write_digest(digest_of(one)) for one in (b"root-key", b"team-key"))
    path.write_text(
        f"tenants:\n  root: {{keys: ['{root}'], admin: true}}\n  team: {{keys: ['{team}']}}\n"
    )
    async with serving(local, tenants_file=str(path)) as made:
        check_error(await made.admin.get("/trace"), 401)
        team_key, root_key = ({"Authorization": f"Bearer {one}-key"} for one in ("team", "root"))
        refusal = await made.admin.get("/trace", headers=team_key)
        assert check_error(refusal, 403)["code"] == "admin_only"
        assert len(lines_of(await made.admin.get("/trace", headers=root_key))) == 2
        for headers in (team_key, root_key):
            check_error(await made.public.get("/trace", headers=headers), 404)


@pytest.mark.parametrize("since", ["0", "-1", "nan", "inf", "1e9", "x", ""])
async def test_a_time_that_is_none_is_refused(local, since: str) -> None:
    async with serving(local) as made:
        refusal = await made.admin.get("/trace", params={"since_s": since})
        assert check_error(refusal, 400)["param"] == "since_s"


async def test_what_is_older_is_left_out(local) -> None:
    async with serving(local) as made:
        await ask(made)
        await asyncio.sleep(0.02)
        *_, end = lines_of(await made.admin.get("/trace", params={"since_s": 0.001}))
    assert end == TraceEnd(0, 0, is_complete=True)


async def test_without_a_dashboard_it_is_there_all_the_same(local) -> None:
    async with serving(local, dashboard=False) as made:
        await ask(made)
        assert len(accounts_in(lines_of(await made.admin.get("/trace")))) == 1


async def read(source: TraceSource, since_s: float = 60.0) -> list[TraceLine]:
    sent: list[bytes] = []

    async def send(message) -> None:
        sent.append(message.get("body", b""))

    await source.open(since_s)({"type": "http"}, None, send)  # pyright: ignore
    return [decode_line(line) for line in b"".join(sent).splitlines()]


async def test_the_answer_is_bounded_and_says_so(local) -> None:
    async with serving(local, new_id=map(str, range(100)).__next__) as made:
        for _ in range(20):
            await ask(made)
        made.observers.steps.record("local", [step(1e9)] * (STEPS_PER_LINE + 1))
        whole = await read(TraceSource(made.context))
        assert len(accounts_in(whole)) == 20
        *_, end = cut = await read(TraceSource(made.context, max_bytes=20_000))
    assert isinstance(end, TraceEnd) and not end.is_complete
    assert 0 < len(accounts_in(cut)) == end.num_requests < 20
    assert accounts_in(cut)[0].id == accounts_in(whole)[0].id


async def test_readers_are_few_and_one_that_leaves_makes_room(local) -> None:
    async with serving(local) as made:
        source = TraceSource(made.context)
        held = [source.open(60.0) for _ in range(MAX_READERS)]
        with pytest.raises(Exception, match="traces are being read"):
            source.open(60.0)

        async def fail(_message) -> None:
            raise ConnectionError

        with pytest.raises(ConnectionError):
            await held[0]({"type": "http"}, None, fail)  # pyright: ignore
        assert len(await read(source)) == 2
