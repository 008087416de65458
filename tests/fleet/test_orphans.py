"""Requests whose frontend is lost: who may adopt them, for how long, and how many there are."""

from __future__ import annotations

import asyncio

import pytest

from headway.core.events import Admitted, Finished, TokensEmitted
from headway.core.params import SamplingParams
from headway.core.request import FinishReason
from headway.core.terms import Terms
from headway.engine.process.messages import AddRequest, EventBatch, Handover, Past, SampleRecord
from headway.fleet.engines import orphans
from headway.fleet.engines.orphans import KeptRequests
from headway.fleet.engines.sessions import Session, Sessions
from headway.fleet.network.wire import (
    PROTOCOL_VERSION,
    Add,
    Adopt,
    Credit,
    HandedOver,
    Hello,
    Reported,
    encode,
)
from tests.fleet.test_listener import NUM_TOKENS, Engine, Frontend, running

NAME = "cmpl-1f"


async def add(
    frontend: Frontend, name: str = NAME, tenant: str = "a", note: bytes = b"note", **more: object
) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    fields = {"terms": Terms(tenant), "note": note, **more}
    request = AddRequest(name, [65], params, 7, 5.0, **fields)  # pyright: ignore
    await frontend.socket.send(encode(Add(1, 5.0, request)))


async def adopt(frontend: Frontend, name: str = NAME, tenant: str = "a") -> Handover:
    """Ask for a request; other messages that come before the answer are dropped."""
    await frontend.socket.send(encode(Adopt(name, tenant)))
    async with asyncio.timeout(2.0):
        while True:
            message = await frontend.receive()
            if isinstance(message, HandedOver):
                return message.handover


async def read_tokens(frontend: Frontend, num_tokens: int) -> list[str]:
    """Read until there are as many tokens; return the wire id of each."""
    names: list[str] = []
    while len(names) < num_tokens:
        message = await frontend.receive()
        assert isinstance(message, Reported), message
        names += [one.request_id for one in message.events.tokens for _ in one.token_ids]
    return names


async def lose(engine: Engine, frontend: Frontend) -> None:
    """Close a connection, and wait until the engine has noticed."""
    sessions = engine.listener._sessions
    num_before = len(sessions)
    frontend.socket.close(linger=0)
    async with asyncio.timeout(3.0):
        while len(sessions) == num_before:
            await asyncio.sleep(0.01)


async def test_an_orphan_runs_on_and_is_handed_over_whole() -> None:
    async with running(Engine()) as engine:
        first, second = engine.connect(), engine.connect()
        await first.greet()
        await second.greet()
        await add(first)
        await read_tokens(first, 3)
        await lose(engine, first)
        handover = await adopt(second)
        command = handover.command
        assert command is not None and (command.id, command.note) == (NAME, b"note")
        assert command.attempt == 1 and command.token_ids == [65]
        (sample,) = handover.samples
        assert len(sample.token_ids) >= 3
        if handover.is_running:
            names = await read_tokens(second, NUM_TOKENS - len(sample.token_ids))
            assert set(names) == {f"1:{NAME}"}
        else:
            assert sample.reason == FinishReason.LENGTH
        assert len(engine.process.added) == 1, "nothing is computed twice"
        await asyncio.sleep(0.05)
        assert engine.listener._sessions.num_requests == 0
        assert not engine.listener._sessions._adopted
        engine.listener._kept.check()


async def test_an_orphan_that_was_paused_goes_on_for_its_new_frontend() -> None:
    async with running(Engine()) as engine:
        first, second = engine.connect(), engine.connect()
        await first.greet()
        await second.greet()
        await add(first)
        await read_tokens(first, 3)
        engine.process.is_paused = True
        await lose(engine, first)
        handover = await adopt(second)
        assert handover.is_running
        engine.process.is_paused = False
        engine.process._wake.set()
        names = await read_tokens(second, NUM_TOKENS - len(handover.samples[0].token_ids))
        assert set(names) == {f"1:{NAME}"}


@pytest.mark.parametrize(
    ("name", "tenant"), [(NAME, "b"), (NAME, ""), ("cmpl-2f", "a"), (NAME.upper(), "a")]
)
async def test_an_orphan_is_for_its_tenant_only(name: str, tenant: str) -> None:
    async with running(Engine()) as engine:
        first, second = engine.connect(), engine.connect()
        await first.greet()
        await second.greet()
        await add(first)
        await lose(engine, first)
        nothing = await adopt(second, name, tenant)
        assert nothing == Handover(name)
        assert (await adopt(second)).command is not None


async def test_without_a_note_a_request_ends_with_its_frontend() -> None:
    async with running(Engine()) as engine:
        engine.process.is_paused = True
        first, second = engine.connect(), engine.connect()
        await first.greet()
        await second.greet()
        await add(first, note=b"")
        await lose(engine, first)
        assert engine.listener._sessions.num_requests == 0
        assert (await adopt(second)).command is None


async def test_a_frontend_that_lives_loses_a_request_that_another_adopts() -> None:
    """The client has come back elsewhere: the newest reader gets the stream."""
    async with running(Engine()) as engine:
        first, second = engine.connect(), engine.connect()
        await first.greet()
        await second.greet()
        await add(first)
        await read_tokens(first, 3)
        engine.process.is_paused = True
        await asyncio.sleep(0.02)
        assert (await adopt(second)).is_running
        engine.process.is_paused = False
        engine.process._wake.set()
        ends = []
        while message := await first.receive(0.5):
            assert isinstance(message, Reported)
            ends += message.events.finished
            if ends:
                assert not message.events.tokens
        assert [(one.request_id, one.reason) for one in ends] == [(f"0:{NAME}", FinishReason.ABORT)]
        # It may take the request back, under yet another attempt.
        back = await adopt(first)
        assert back.command is not None and back.command.attempt == 2
        assert len(engine.process.added) == 1


async def test_an_orphan_ends_when_nobody_asks_for_it_in_time() -> None:
    async with running(Engine(orphan_s=0.05)) as engine:
        engine.process.is_paused = True
        first, second = engine.connect(), engine.connect()
        await first.greet()
        await second.greet()
        await add(first)
        await lose(engine, first)
        async with asyncio.timeout(3.0):
            while engine.listener._sessions.num_requests:
                await asyncio.sleep(0.02)
        assert not engine.process.scheduler.requests
        assert (await adopt(second)).command is None
        assert not len(engine.listener._kept)


async def test_a_frontend_that_is_back_has_no_orphans() -> None:
    """Its connection was lost, not the frontend: it has sent its requests elsewhere."""
    async with running(Engine()) as engine:
        engine.process.is_paused = True
        hello = encode(Hello(PROTOCOL_VERSION, "test", "instance"))
        first, again = engine.connect(), engine.connect()
        await first.socket.send(hello)
        assert await first.receive()
        await add(first)
        await lose(engine, first)
        assert engine.listener._kept.num_orphans == 1
        await again.socket.send(hello)
        assert await again.receive()
        assert engine.listener._kept.num_orphans == 0
        assert not engine.process.scheduler.requests


async def test_a_request_that_is_sent_again_replaces_its_orphan() -> None:
    async with running(Engine()) as engine:
        engine.process.is_paused = True
        first, second = engine.connect(), engine.connect()
        await first.greet()
        await second.greet()
        await add(first)
        await lose(engine, first)
        await add(second, attempt=1)
        async with asyncio.timeout(2.0):
            while len(engine.process.added) < 2:
                await asyncio.sleep(0.01)
        assert engine.listener._sessions.num_requests == 1
        assert set(engine.process.scheduler.requests) == {f"2:1:{NAME}"}


async def test_a_note_that_is_too_long_is_refused() -> None:
    async with running(Engine()) as engine:
        frontend = engine.connect()
        await frontend.greet()
        await add(frontend, note=b"x" * 5000)
        message = await frontend.receive()
        assert isinstance(message, Reported) and "note" in message.events.refused[0].message
        assert not len(engine.listener._kept)


# ---------------------------------------------------------------- what is kept


def command(name: str, tenant: str = "a", num_tokens: int = 1, **more: object) -> AddRequest:
    params = SamplingParams(max_tokens=NUM_TOKENS, **more.pop("params", {}))  # pyright: ignore
    fields = {"terms": Terms(tenant), "note": b"n", **more}
    return AddRequest(name, [65] * num_tokens, params, 7, 5.0, **fields)  # pyright: ignore


def session(number: int = 1) -> Session:
    sessions = Sessions(Credit())
    for _ in range(number - 1):
        sessions.open(b"other", "other", 0.0)
    return sessions.open(b"x", "frontend", 0.0)


def tokens(name: str, *ids: int) -> EventBatch:
    return EventBatch(tokens=[TokensEmitted(name, ids, None)])


def test_output_is_recorded_by_sample_and_attempt() -> None:
    kept, own = KeptRequests(30.0, Credit()), session()
    kept.add(own, command("r", params={"n": 2}))
    kept.record(own, EventBatch(admitted=[Admitted("0:r", 1.0, 0.0, 3, 1, False)]), 1.0)
    kept.record(own, tokens("0:r", 1, 2), 1.0)
    kept.record(own, tokens("0:r#1", 9), 1.0)
    kept.record(own, tokens("1:r", 7), 1.0)  # another attempt
    kept.record(session(2), tokens("0:r", 7), 1.0)
    found = kept.find("r", "a")
    assert found is not None and found.num_cached_tokens == 3
    assert {at: one.token_ids for at, one in found.transcript.samples.items()} == {
        0: [1, 2],
        1: [9],
    }
    kept.check()
    end = EventBatch(finished=[Finished("0:r", 2.0, FinishReason.STOP, 2)])
    kept.record(own, end, 2.0)
    assert found.is_running and not found.transcript.is_finished
    kept.record(own, EventBatch(finished=[Finished("0:r#1", 2.0, FinishReason.ABORT, 1)]), 2.0)
    assert kept.find("r", "a") is None, "nobody waits for a request that was aborted"


def test_a_request_that_has_ended_is_kept_for_as_long_as_an_orphan() -> None:
    kept, own = KeptRequests(30.0, Credit()), session()
    kept.add(own, command("r"))
    kept.record(own, tokens("0:r", 1), 1.0)
    kept.record(own, EventBatch(finished=[Finished("0:r", 2.0, FinishReason.STOP, 1)]), 2.0)
    kept.lose_engine()
    assert not kept.take_expired(31.0) and kept.find("r", "a") is not None
    assert [one.command.id for one in kept.take_expired(33.0)] == ["r"]


def test_samples_that_are_sent_one_by_one_are_one_request() -> None:
    kept, own = KeptRequests(30.0, Credit()), session()
    ended = SampleRecord(0, [1, 2], None, FinishReason.LENGTH)
    first = Past(3, [SampleRecord(1, [5]), ended], num_cached_tokens=1)
    kept.add(own, command("r#1", num_tokens=2, index=1, num_prompt_tokens=1, past=first))
    found = kept.find("r", "a")
    assert found is not None and found.is_partial and found.command.params.n == 3
    kept.add(
        own,
        command(
            "r#2",
            num_tokens=2,
            index=2,
            num_prompt_tokens=1,
            past=Past(3, [SampleRecord(2, [6])]),
        ),
    )
    assert not found.is_partial and found.command.token_ids == [65]
    # The prefix hit of the first admission is billed, not that of a later one with output.
    kept.record(own, EventBatch(admitted=[Admitted("0:r#1", 1.0, 0.0, 2, 2, False)]), 1.0)
    kept.record(own, EventBatch(admitted=[Admitted("0:r", 1.0, 0.0, 2, 2, False)]), 1.0)
    assert found.num_cached_tokens == 1
    kept.record(own, tokens("0:r#2", 7), 1.0)
    assert found.transcript.samples[2].token_ids == [6, 7]
    kept.check()


def test_orphans_wait_for_an_engine_that_is_gone_and_other_requests_do_not() -> None:
    kept, gone, here = KeptRequests(30.0, Credit()), session(), session(2)
    kept.add(gone, command("orphan"))
    kept.add(here, command("live"))
    kept.lose_frontend(gone, 1.0)
    kept.lose_engine()
    found = kept.find("orphan", "a")
    assert found is not None and not found.is_running
    assert kept.find("live", "a") is None


def test_orphans_are_bounded_and_the_largest_tenant_loses_first() -> None:
    kept, gone = KeptRequests(30.0, Credit(num_requests=4, num_tokens=1000)), session()
    kept.add(gone, command("small", "b"))
    for number in range(9):
        kept.add(gone, command(f"large-{number}", "a", num_tokens=10))
    assert len(kept.lose_frontend(gone, 1.0)) == 4
    assert kept.find("small", "b") is not None
    assert kept.find("large-8", "a") is not None, "its newest are left"
    assert len(kept.take_expired(1.0)) == 6, "the others end"
    kept.check()


def test_a_request_with_very_much_output_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handover is one message: it must not look like a frontend that does not read."""
    monkeypatch.setattr(orphans, "MAX_SIZE", 100)
    kept, own = KeptRequests(30.0, Credit()), session()
    kept.add(own, command("r"))
    kept.record(own, tokens("0:r", *range(100)), 1.0)
    assert kept.find("r", "a") is not None
    kept.record(own, tokens("0:r", 1), 1.0)
    assert kept.find("r", "a") is None
    kept.check()


def test_memory_is_bounded_and_the_largest_tenant_loses_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(orphans, "MAX_KEPT_SIZE", 500)
    kept, own = KeptRequests(30.0, Credit()), session()
    kept.add(own, command("small", "b"))
    for number in range(9):
        kept.add(own, command(f"large-{number}", "a"))
        kept.record(own, tokens(f"0:large-{number}", *range(100)), 1.0)
        kept.check()
    assert kept.find("small", "b") is not None
    assert len(kept) == 5
    monkeypatch.setattr(orphans, "MAX_KEPT", 3)
    kept.add(own, command("more", "c"))
    assert len(kept) == 3 and kept.find("small", "b") is not None
