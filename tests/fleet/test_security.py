"""A process without the cluster key gets nothing; nonsense ends nothing but its own session."""

from __future__ import annotations

import asyncio
import random
import socket
import time

import pytest

from benchmarks.faults import mutated_frames
from benchmarks.support.fleets import Fleet
from headway.clock import SystemClock
from headway.errors import ConfigError
from headway.fleet.engines import listener
from headway.fleet.engines.listener import EngineListener
from headway.fleet.network import server_socket
from headway.fleet.network.cluster_key import ClusterKey
from headway.fleet.network.endpoints import Endpoint
from headway.fleet.network.wire import PROTOCOL_VERSION, Closed, EngineUp, Hello, Reported, encode
from tests.fleet.test_listener import (
    HELLO,
    IDENTITY,
    KEY,
    Engine,
    make_link,
    refusal_of,
    running,
)

OTHER = ClusterKey.of("wrong" * 10)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(None, id="no key"),
        pytest.param(OTHER, id="another key"),
        pytest.param(ClusterKey(KEY.engine, KEY.engine), id="the key of engines as its own"),
        pytest.param(ClusterKey(KEY.engine, OTHER.frontend), id="the public key of engines only"),
    ],
)
async def test_a_process_without_the_key_gets_no_answer(wrong: ClusterKey | None) -> None:
    async with running(Engine(KEY)) as engine:
        intruder = engine.connect(wrong)
        await intruder.socket.send(HELLO)
        assert await intruder.receive(0.7) is None
        assert len(engine.listener._sessions) == 0
        assert isinstance(await engine.connect(KEY).greet(), EngineUp)


async def test_bytes_that_are_no_handshake_harm_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers may connect and say anything; connections without a handshake end in time."""
    monkeypatch.setattr(server_socket, "HANDSHAKE_MS", 500)
    async with running(Engine(KEY)) as engine:
        good = engine.connect(KEY)
        await good.greet()
        address = ("127.0.0.1", int(engine.listener.address.rpartition(":")[2]))
        draw = random.Random(1)
        silent = [socket.create_connection(address) for _ in range(100)]
        for _ in range(50):
            with socket.create_connection(address) as raw:
                raw.settimeout(1.0)
                # A greeting as ZeroMQ sends it, then nonsense, or nonsense at once.
                greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47)
                raw.sendall(greeting[: draw.choice((0, 11, 64))] + draw.randbytes(10_000))
        assert await good.answer("cmpl-1") == 100
        deadline = time.monotonic() + 5.0
        for one in silent:
            one.settimeout(max(0.1, deadline - time.monotonic()))
            while await asyncio.to_thread(one.recv, 4096):
                pass  # the greeting of the engine, then the end
            one.close()
        assert await engine.connect(KEY).greet()
        assert len(engine.listener._sessions) == 2


@pytest.mark.parametrize("key", [None, OTHER])
async def test_a_frontend_with_another_key_says_what_is_wrong(
    caplog: pytest.LogCaptureFixture, key: ClusterKey | None
) -> None:
    async with running(Engine(KEY)) as engine:
        link = make_link(engine, key=key)
        assert "--cluster-key-file" in await refusal_of(link, lambda: caplog.text)


async def test_without_a_key_an_engine_listens_on_loopback_only() -> None:
    async with running(Engine()) as engine:
        with pytest.raises(ConfigError, match="headway keys cluster"):
            EngineListener(Endpoint("0.0.0.0", 1), None, engine.supervisor, IDENTITY, SystemClock())


async def test_another_version_is_refused_with_a_reason() -> None:
    async with running(Engine()) as engine:
        frontend = engine.connect()
        await frontend.socket.send(encode(Hello(PROTOCOL_VERSION + 1, "test")))
        message = await frontend.receive()
        assert isinstance(message, Closed) and "same release" in message.message


async def test_a_silent_frontend_loses_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its connection, but its process does nothing: the engine frees its requests."""
    monkeypatch.setattr(listener, "MAX_SILENCE_S", 0.4)
    monkeypatch.setattr(listener, "HEARTBEAT_S", 0.1)
    async with running(Engine()) as engine:
        engine.process.is_paused = True
        frontend = engine.connect()
        await frontend.greet()
        await frontend.add("cmpl-1f")
        while isinstance(message := await frontend.receive(3.0), Reported):
            pass
        assert isinstance(message, Closed) and "silent" in message.message
        assert engine.listener._sessions.num_requests == 0


async def test_mutated_frames_end_their_own_session_only(fleet: Fleet, is_full: bool) -> None:
    engine = fleet.start_engine(step_s=0.005, num_blocks=2048).wait_ready()
    frontend = fleet.start_frontend()
    num_frames, num_streams = (10_000, 8) if is_full else (300, 2)
    report = await mutated_frames.run(engine, frontend, num_frames, 5, num_streams)
    print(report)
    assert not mutated_frames.failures_in(report), report
