"""GET /v1/streams/{id}: what a client gets that comes back, and what everybody else gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.core import invariants
from headway.server import streams
from headway.server.schema.request import AnswerOptions
from headway.server.streams import NOTE_VERSION, StreamNote, decode_note, encode_note
from headway.tenancy.keys import digest_of, write_digest
from headway.text.reply import ReplyForm
from tests.support.apps import FIXED_ID, check_error, serving

NAME = f"cmpl-{FIXED_ID}"
SCRIPT = "".join(chr(109 + i % 8) for i in range(60))
OPTIONS = {"include_usage": True, "resumable": True}
KEYS = ("a", "b")


class Reader:
    """A client that reads a stream over ASGI, and may leave at any time."""

    def __init__(
        self, app: Any, path: str, body: dict[str, Any] | None = None, **more: str
    ) -> None:
        self.status = 0
        self.body = b""
        self._left = asyncio.Event()
        self._content = b"" if body is None else json.dumps(body).encode()
        self._has_sent = False
        headers = {"host": "localhost", "content-type": "application/json", **more}
        headers["content-length"] = str(len(self._content))
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "GET" if body is None else "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(key.encode(), value.encode()) for key, value in headers.items()],
            "client": ("127.0.0.1", 5),
            "server": ("localhost", 80),
            "scheme": "http",
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._has_sent:
            self._has_sent = True
            return {"type": "http.request", "body": self._content, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")

    @property
    def events(self) -> list[tuple[str, Any]]:
        """Ids and data of the whole events so far."""
        found = []
        for block in self.body.decode().split("\n\n")[:-1]:
            fields = dict(line.split(": ", 1) for line in block.split("\n"))
            if "data" in fields:
                data = fields["data"]
                found.append((fields.get("id", ""), data if data == "[DONE]" else json.loads(data)))
        return found

    @property
    def last_id(self) -> str:
        return [name for name, _ in self.events if name][-1]

    async def read(self, num_events: int) -> None:
        async with asyncio.timeout(5):
            while len(self.events) < num_events:
                await asyncio.sleep(0)

    async def leave(self) -> None:
        self._left.set()
        await asyncio.wait_for(asyncio.gather(self.task, return_exceptions=True), 5)

    async def end(self) -> None:
        async with asyncio.timeout(5):
            await self.task


def choices(events: list[tuple[str, Any]], index: int = 0) -> list[Any]:
    found = [one["choices"][0] for _, one in events if one != "[DONE]" and one["choices"]]
    return [one for one in found if one["index"] == index]


def text_of(events: list[tuple[str, Any]], index: int = 0) -> str:
    return "".join(one["text"] for one in choices(events, index))


def post(made: Any, path: str = "/v1/completions", **fields: Any) -> Reader:
    body = {"prompt": "x", "max_tokens": 40, "stream": True, "stream_options": OPTIONS, **fields}
    return Reader(made.apps.public, path, body)


def resume(made: Any, after: str = "", **headers: str) -> Reader:
    given = {"last-event-id": after, **headers} if after else headers
    return Reader(made.apps.public, f"/v1/streams/{NAME}", None, **given)


async def drained(made: Any) -> None:
    async with asyncio.timeout(5):
        while made.process.scheduler.requests or made.engine.num_requests:
            await asyncio.sleep(0.01)
    invariants.check_drained(made.process.scheduler)


@asynccontextmanager
async def paused(made: Any) -> AsyncIterator[None]:
    made.process.is_paused = True
    yield
    made.process.is_paused = False
    made.process._wake.set()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"logprobs": 2, "n": 2},
        {"stop": ["mno"], "logprobs": 0},
        {"stop": ["mno"], "min_tokens": 20},
    ],
)
async def test_the_rest_of_a_stream_is_exactly_what_was_missing(local, fields: Any) -> None:
    """After whichever event: no token twice, none missing, one end."""
    async with serving(local, SCRIPT) as made:
        whole = post(made, **fields)
        await whole.end()
        everything = whole.events
        usage = everything[-2][1]["usage"]
        ends = (0, 1, len(everything) - 3, len(everything) - 2)
        for number in sorted({*ends, *range(0, len(everything) - 1, 5)}):
            name = everything[number][0]
            rest = resume(made, after=name)
            await rest.end()
            assert rest.status == 200
            joined = everything[: number + 1] + rest.events
            for index in range(fields.get("n", 1)):
                expected, got = choices(everything, index), choices(joined, index)
                assert text_of(joined, index) == text_of(everything, index)
                ends = [one["finish_reason"] for one in got if one["finish_reason"]]
                assert len(ends) == 1
                if "logprobs" in fields:
                    for part in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                        assert [one for c in got for one in c["logprobs"][part]] == [
                            one for c in expected for one in c["logprobs"][part]
                        ]
            assert rest.events[-1][1] == "[DONE]" and rest.events[-2][1]["usage"] == usage
        again = resume(made)
        await again.end()
        assert text_of(again.events) == text_of(everything)
        await drained(made)


async def test_a_chat_stream_names_the_role_once(local) -> None:
    async with serving(local, SCRIPT) as made:
        messages = [{"role": "user", "content": "hi"}]
        whole = Reader(
            made.apps.public,
            "/v1/chat/completions",
            {"messages": messages, "n": 2, "stream": True, "stream_options": OPTIONS},
        )
        await whole.end()
        for number, (name, _) in enumerate(whole.events[:-1]):
            path = f"/v1/streams/chatcmpl-{FIXED_ID}?after={name}"
            rest = Reader(made.apps.public, path)
            await rest.end()
            joined = whole.events[: number + 1] + rest.events
            for index in range(2):
                deltas = [one["delta"] for one in choices(joined, index)]
                assert [one.get("role") for one in deltas].count("assistant") == 1
                assert "".join(one.get("content", "") for one in deltas) == SCRIPT


async def test_a_stream_goes_on_while_its_client_is_away(local) -> None:
    async with serving(local, SCRIPT) as made:
        first = post(made)
        await first.read(5)
        async with paused(made):
            await first.leave()
            assert made.engine.num_requests == 1
        seen = first.events
        async with asyncio.timeout(5):
            while made.engine.num_requests:  # it is computed to its end, and no longer
                await asyncio.sleep(0.01)
        second = resume(made, after=first.last_id)
        await second.end()
        assert text_of(seen) + text_of(second.events) == SCRIPT[:40]
        assert len(made.process.added) == 1
        await drained(made)


async def test_a_client_that_did_not_ask_ends_its_request_when_it_leaves(local) -> None:
    async with serving(local, SCRIPT) as made:
        first = post(made, stream_options={"include_usage": True})
        await first.read(3)
        assert not any(name for name, _ in first.events)
        async with paused(made):
            await first.leave()
            assert made.engine.num_requests == 0
        await drained(made)
        check = resume(made)
        await check.end()
        assert check.status == 404


async def test_nobody_comes_back_in_time(local, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(local, SCRIPT) as made:
        made.context.streams._resume_s = 0.05
        first = post(made)
        await first.read(3)
        async with paused(made):
            await first.leave()
            async with asyncio.timeout(5):
                while made.engine.num_requests:
                    await asyncio.sleep(0.01)
        await drained(made)
        assert len(made.context.streams) == 0
        late = resume(made, after=first.last_id)
        await late.end()
        assert late.status == 404


async def test_the_newest_reader_gets_the_stream(local) -> None:
    async with serving(local, SCRIPT) as made:
        first = post(made)
        await first.read(3)
        async with paused(made):
            second = resume(made, after=first.last_id)
            await second.read(0)
            await asyncio.sleep(0.02)
        num_seen = len(first.events)
        await second.end()
        await asyncio.wait([first.task], timeout=0.2)
        seen = first.events[:num_seen]
        assert len(first.events) == num_seen, "the first reader gets no more"
        assert text_of(seen) + text_of(second.events) == SCRIPT[:40]
        await first.leave()
        await drained(made)


@pytest.mark.parametrize(
    ("after", "status"),
    [
        (f"{NAME}.x", 400),
        (f"cmpl-{'f' * 32}.3", 400),
        (f"{NAME}.{'1,' * 200}", 400),
        ("3", 400),
        (f"{NAME}.3", 200),
        (f"{NAME}.999999999", 200),
    ],
)
async def test_a_cursor_is_of_this_stream_or_refused(local, after: str, status: int) -> None:
    async with serving(local, SCRIPT) as made:
        await post(made).end()
        rest = resume(made, after=after)
        await rest.end()
        assert rest.status == status


async def test_a_stream_with_two_prompts_or_without_events_is_refused_by_name(local) -> None:
    async with serving(local, SCRIPT) as made:
        body = {"prompt": ["x", "y"], "stream": True, "stream_options": {"resumable": True}}
        error = check_error(await made.public.post("/v1/completions", json=body), 400)
        assert error["param"] == "stream_options.resumable"
        body = {"prompt": "x", "stream_options": {"resumable": True}}
        error = check_error(await made.public.post("/v1/completions", json=body), 400)
        assert error["param"] == "stream_options"


async def test_only_its_tenant_learns_that_a_stream_exists(local, tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    lines = [f"  {name}: {{keys: ['{write_digest(digest_of(name.encode()))}']}}" for name in KEYS]
    path.write_text("\n".join(["tenants:", *lines]))
    async with serving(local, SCRIPT, tenants_file=str(path)) as made:
        body = {"prompt": "x", "max_tokens": 9, "stream": True, "stream_options": OPTIONS}
        app = made.apps.public
        mine = Reader(app, "/v1/completions", body, authorization="Bearer a")
        await mine.end()
        answers = {}
        for who in ("", "Bearer a", "Bearer b", "Bearer nobody"):
            for name in (NAME, f"cmpl-{'e' * 32}", "cmpl-1", "x" * 3000, "..%2f"):
                reader = Reader(app, f"/v1/streams/{name}", None, authorization=who)
                await reader.end()
                answers[who, name == NAME] = (reader.status, reader.body)
                if (who, name) != ("Bearer a", NAME):
                    assert reader.status == (404 if who in ("Bearer a", "Bearer b") else 401)
        assert answers["Bearer a", True][0] == 200
        assert answers["Bearer b", True] == answers["Bearer b", False]
        assert answers["", True] == answers["", False]


async def test_a_tenant_that_leaves_many_streams_loses_its_own(
    local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_LEFT_SIZE", 200)
    monkeypatch.setattr(streams, "MIN_LEFT_SIZE", 1)
    async with serving(local, SCRIPT) as made:
        context, ids = made.context, iter(f"{number:032x}" for number in range(99))
        object.__setattr__(context, "new_id", lambda: next(ids))
        for number in range(8):
            await post(made, max_tokens=10 if number == 0 else 40).end()
            if number == 0:
                (small,) = context.streams._streams.values()
                small.tenant = "small"
        kept = {one.tenant for one in context.streams._streams.values()}
        assert "small" in kept and len(context.streams) < 7
        await drained(made)


def test_a_note_is_checked_field_by_field() -> None:
    good = StreamNote(NOTE_VERSION, "cmpl", "tiny", 5, AnswerOptions(), "id")
    names, ends = ("tiny",), frozenset(("cmpl",))
    assert decode_note(encode_note(good)) == good and good.check(ends, names)
    wrong = {
        "version": 9,
        "endpoint": "chatcmpl",
        "model": "other",
        "created": -1,
        "client_id": "x" * 129,
        "reply": ReplyForm("no such form"),
    }
    fields = {name: getattr(good, name) for name in StreamNote.__struct_fields__}
    for name, value in wrong.items():
        assert not StreamNote(**{**fields, name: value}).check(ends, names), name
    assert not StreamNote(**{**fields, "client_id": "a\nb"}).check(ends, names)
    for note in (b"", b"\xc1", b"\x80", encode_note(good)[:-1], encode_note({"version": 1})):
        assert decode_note(note) is None
