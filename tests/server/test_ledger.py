"""What is in the ledger is what was streamed: over real sockets, through aborts and crashes."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.support.streamed import StreamedAnswer, ask
from tests.server.test_crash import body, engine_pids, wait_restart

COLUMNS = (
    "request_id, client_id, prompt_tokens, cached_tokens, output_tokens, recomputed_tokens, "
    "finish_reason, cost_e12, queue_s"
)
Rows = dict[str, dict[str, Any]]


def ledger_url(folder: Path) -> str:
    return f"sqlite://{folder}/ledger.db"


def rows_in(folder: Path) -> Rows:
    """By request id."""
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        connection.row_factory = sqlite3.Row
        found = connection.execute(f"SELECT {COLUMNS} FROM headway_requests").fetchall()
    assert len({row["request_id"] for row in found}) == len(found)
    return {row["request_id"]: dict(row) for row in found}


def wait_rows(folder: Path, number: int, timeout_s: float = 30.0) -> Rows:
    deadline = time.monotonic() + timeout_s
    found: Rows = {}
    while len(found) < number and time.monotonic() < deadline:
        time.sleep(0.05)
        if (folder / "ledger.db").exists():
            found = rows_in(folder)
    assert len(found) == number
    return found


def bodies() -> list[dict[str, Any]]:
    return [
        *(body(number, max_tokens=60) for number in range(4)),
        body(4, n=3, max_tokens=40),
        body(5, prompt=["one", "another", "a third"], n=2, max_tokens=30),
        body(6, stop=["a", "e"], max_tokens=200),
        body(7, stop=["qq"], n=2, max_tokens=50),
        body(8, prompt="prompt 1 " * 20, max_tokens=20),
    ]


def client_of(server: Any) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits)


async def test_the_ledger_has_what_the_answers_say(launch, tmp_path: Path) -> None:
    server = launch(server={"ledger_url": ledger_url(tmp_path)}).wait_ready()
    async with client_of(server) as client:
        answers = await asyncio.gather(*(ask(client, fields) for fields in [*bodies(), *bodies()]))
        answers.append(await ask(client, bodies()[-1]))  # cached by now, however they came
        whole = (await client.post("/v1/completions", json=body(1, n=2))).json()
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 7}
        chatted = (await client.post("/v1/chat/completions", json=chat)).json()
    rows = wait_rows(tmp_path, len(answers) + 2)
    for one in answers:
        one.check(rows[one.id])
        assert rows[one.id]["finish_reason"] in ("stop", "length")
    for answer in (whole, chatted):
        row = rows[answer["id"]]
        assert row["output_tokens"] == answer["usage"]["completion_tokens"]
    assert any(row["cached_tokens"] for row in rows.values())
    assert server.stop() == 0
    assert list((tmp_path / "ledger.db.spool").iterdir()) == []


async def test_an_answer_of_the_last_moment_has_its_row(launch, tmp_path: Path) -> None:
    """The engine has yet to say that it ended the sample when the server stops."""
    server = launch(step_s=1.0, server={"ledger_url": ledger_url(tmp_path)}).wait_ready()
    async with client_of(server) as client:
        fields = body(1, stop=list("abcdefghijklmnop"), max_tokens=200)
        answer = (await client.post("/v1/completions", json=fields)).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert server.stop() == 0
    row = wait_rows(tmp_path, 1)[answer["id"]]
    assert row["output_tokens"] == answer["usage"]["completion_tokens"]


@pytest.mark.timing
async def test_an_answer_not_read_to_its_end_counts_its_output(launch, tmp_path: Path) -> None:
    """The engine is stopped, so that no token is in flight when the client disconnects."""
    server = launch(step_s=0.01, server={"ledger_url": ledger_url(tmp_path)}).wait_ready()
    answer = StreamedAnswer()
    fields = body(1, max_tokens=2000, stream=True)
    async with client_of(server) as client:
        async with client.stream("POST", "/v1/completions", json=fields) as response:
            lines = response.aiter_lines()
            while answer.num_letters < 20:
                answer.read(await anext(lines))
            os.kill(engine_pids(server)[-1], signal.SIGSTOP)
            try:
                while True:
                    line = await asyncio.wait_for(anext(lines), 1.0)
                    answer.read(line)
            except TimeoutError:
                pass
        # Answers to later requests: the server has seen the disconnect before the next token.
        for _ in range(5):
            assert (await client.get("/health/live")).status_code == 200
        os.kill(engine_pids(server)[-1], signal.SIGCONT)
        await asyncio.to_thread(server.wait_for, "vllm:num_requests_running", 0)
    (row,) = wait_rows(tmp_path, 1).values()
    assert (row["request_id"], row["finish_reason"]) == (answer.id, "abort")
    assert row["output_tokens"] == answer.num_letters >= 20


async def test_clients_that_leave_at_any_moment(launch, tmp_path: Path) -> None:
    server = launch(step_s=0.005, server={"ledger_url": ledger_url(tmp_path)}).wait_ready()
    async with client_of(server) as client:
        leavers = await asyncio.gather(
            *(ask(client, body(number, max_tokens=400), number) for number in range(1, 30))
        )
        await asyncio.to_thread(server.wait_for, "vllm:num_requests_running", 0)
    rows = wait_rows(tmp_path, len(leavers))
    for answer in leavers:
        row = rows[answer.id]
        assert row["finish_reason"] == "abort"
        # What was on the way to it counts as well; it is a fraction of a second's worth.
        assert answer.num_letters <= row["output_tokens"] < 400
    total = sum(row["output_tokens"] for row in rows.values())
    assert server.metric("vllm:generation_tokens_total") == total


async def until(server: Any, workers: list[asyncio.Task[None]], name: str, least: float) -> None:
    deadline = time.monotonic() + 60
    # In a thread: the event loop has the streams of the test to read.
    while await asyncio.to_thread(server.metric, name) < least:
        for worker in workers:
            if worker.done():
                worker.result()
        assert time.monotonic() < deadline, server.log[-3000:]
        await asyncio.sleep(0.05)


async def test_engines_that_are_killed(launch, tmp_path: Path, is_full: bool) -> None:
    num_kills = 20 if is_full else 6
    settings = {"ledger_url": ledger_url(tmp_path), "max_engine_restarts": 1000}
    settings |= {"max_queue_age_s": 600.0, "max_queue_wait_s": 600.0}
    server = await asyncio.to_thread(launch(step_s=0.005, server=settings).wait_ready)
    answers: list[StreamedAnswer] = []
    left: list[StreamedAnswer] = []
    is_over = False

    async def keep_asking(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
        while not is_over:
            answers.append(await ask(client, fields))
            left.append(await ask(client, body(99, max_tokens=300), 25))

    async with client_of(server) as client:
        workers = [asyncio.create_task(keep_asking(client, fields)) for fields in bodies()]
        for number in range(num_kills):
            os.kill(engine_pids(server)[-1], signal.SIGKILL)
            await wait_restart(server, number)
            await asyncio.to_thread(server.wait_ready)
            # No request may be a suspect at the next kill: all run again, and make progress.
            await until(server, workers, "vllm:num_requests_running", len(workers))
            gained = await asyncio.to_thread(server.metric, "vllm:generation_tokens_total")
            await until(server, workers, "vllm:generation_tokens_total", gained + 400)
        is_over = True
        await asyncio.gather(*workers)
        await asyncio.to_thread(server.wait_for, "vllm:num_requests_running", 0)
    rows = wait_rows(tmp_path, len(answers) + len(left))
    for one in answers:
        one.check(rows[one.id])
    for one in left:
        assert one.num_letters <= rows[one.id]["output_tokens"] <= 300
    total = sum(row["output_tokens"] for row in rows.values())
    assert server.metric("vllm:generation_tokens_total") == total
    assert sum(row["recomputed_tokens"] for row in rows.values()) > 0
    assert server.metric("headway_engine_restarts_total") == num_kills, server.log
    restart_s = server.metric("headway_wait_seconds_total")
    assert restart_s == pytest.approx(sum(row["queue_s"] for row in rows.values()), abs=0.01)
    assert server.stop() == 0


async def test_a_server_killed_while_the_ledger_is_locked(launch, tmp_path: Path) -> None:
    """Complete answers are in the ledger after another server has started."""
    settings = {"ledger_url": ledger_url(tmp_path)}
    server = await asyncio.to_thread(launch(server=settings).wait_ready)
    async with client_of(server) as client:
        answers = [await ask(client, body(0))]
        wait_rows(tmp_path, 1)
        lock = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        answers += await asyncio.gather(*(ask(client, fields) for fields in bodies()))
        explained = await client.get(f"/v1/requests/{answers[-1].id}/explanation")
        assert explained.status_code == 200, "what has just ended is known without the database"
    deadline = time.monotonic() + 10
    while server.metric("headway_ledger_rows_pending") < len(bodies()):
        assert time.monotonic() < deadline
    assert server.metric("headway_ledger_failing") in (0, 1)
    server.process.kill()
    server.process.wait()
    lock.execute("ROLLBACK")
    lock.close()
    assert len(rows_in(tmp_path)) == 1
    await asyncio.to_thread(launch(server=settings).wait_ready)
    rows = wait_rows(tmp_path, len(answers))
    for one in answers:
        one.check(rows[one.id])
