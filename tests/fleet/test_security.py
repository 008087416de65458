"""A process without the cluster key gets nothing; nonsense ends nothing but its own session."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from benchmarks.support.fleets import Fleet, RunningEngine
from headway.core.params import SamplingParams
from headway.core.request import FinishReason
from headway.engine.process.messages import AddRequest
from headway.fleet.cluster_key import ClusterKey, secure_frontend, write_cluster_key
from headway.fleet.wire import (
    PROTOCOL_VERSION,
    Abort,
    Add,
    Closed,
    EngineUp,
    Heartbeat,
    Hello,
    Pulse,
    decode_engine_message,
    encode,
)
from tests.fleet.loads import bodies, check, run_undisturbed
from tests.fleet.test_checks import mutate
from tests.fleet.test_failover import wait_log

HELLO = encode(Hello(PROTOCOL_VERSION, "test"))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.key"
    write_cluster_key(path)
    return path


class Connect:
    """Makes sockets as a frontend has them, and closes them after the test."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []

    def __call__(self, engine: RunningEngine, key: ClusterKey | None = None) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        if key is not None:
            secure_frontend(dealer, key)
        dealer.connect(engine.address)
        self._sockets.append(dealer)
        return dealer

    def close(self) -> None:
        for dealer in self._sockets:
            dealer.close(linger=0)
        self._context.term()


@pytest.fixture
def connect() -> Iterator[Connect]:
    connect = Connect()
    yield connect
    connect.close()


def answers(dealer: zmq.Socket[bytes], timeout_s: float = 1.5) -> list[object]:
    """Return the messages that come within a time."""
    found, deadline = [], time.monotonic() + timeout_s
    while (left_s := deadline - time.monotonic()) > 0:
        if dealer.poll(int(left_s * 1000)):
            found.append(decode_engine_message(dealer.recv()))
    return found


def test_a_process_without_the_key_gets_no_answer(
    fleet: Fleet, connect: Connect, key_file: Path
) -> None:
    engine = fleet.start_engine({"cluster_key_file": str(key_file)}).wait_ready()
    key = ClusterKey.read(key_file)
    intruders = {
        "no key": None,
        "another key": ClusterKey.of("wrong" * 10),
        "the key of engines as its own": ClusterKey(key.engine, key.engine),
    }
    for name, wrong in intruders.items():
        dealer = connect(engine, wrong)
        dealer.send(HELLO)
        assert answers(dealer, 1.0) == [], name
    half = connect(engine, ClusterKey(key.engine, ClusterKey.of("wrong" * 10).frontend))
    half.send(HELLO)
    assert answers(half, 1.0) == [], "it knows the public key of engines, and no more"
    with socket.create_connection(("127.0.0.1", int(engine.address.rpartition(":")[2]))) as raw:
        raw.sendall(random.Random(1).randbytes(100_000))
    dealer = connect(engine, key)
    dealer.send(HELLO)
    assert isinstance(answers(dealer, 2.0)[0], EngineUp)
    assert engine.log.count("is connected") == 1
    assert "Traceback" not in engine.log


async def test_a_frontend_with_another_key_says_what_is_wrong(
    fleet: Fleet, key_file: Path, tmp_path: Path
) -> None:
    fleet.start_engine({"cluster_key_file": str(key_file)}).wait_ready()
    other = tmp_path / "other.key"
    write_cluster_key(other)
    frontends = [fleet.start_frontend(), fleet.start_frontend(cluster_key_file=str(other))]
    for frontend in frontends:
        await wait_log(frontend, "--cluster-key-file")
    good = fleet.start_frontend(cluster_key_file=str(key_file))
    await asyncio.to_thread(good.wait_ready)
    assert not any(" is up: " in frontend.log for frontend in frontends)


def test_without_a_key_an_engine_listens_on_loopback_only(fleet: Fleet) -> None:
    engine = fleet._start_engine(
        [*fleet.start_engine().command[:3], "tcp://0.0.0.0:1", "{}", "{}", "none"], ""
    )
    assert engine.process.wait(20) != 0


async def test_mutated_frames_end_their_own_session_only(
    fleet: Fleet, connect: Connect, is_full: bool
) -> None:
    """On loopback without a key, so that every frame reaches the decoder."""
    engine = fleet.start_engine(step_s=0.005, num_blocks=2048)
    frontend = fleet.start_frontend()
    await asyncio.to_thread(frontend.wait_ready)
    references = await run_undisturbed(frontend, bodies(60)[:8])
    pid = engine.engine_pid
    running = asyncio.create_task(run_undisturbed(frontend, bodies(60)[:8]))
    num_frames = 10_000 if is_full else 2_000
    good = AddRequest("cmpl-1f", [65, 66], SamplingParams(max_tokens=4), 7, 5.0)
    frames = [
        encode(Add(1, 5.5, good)),
        encode(Abort(1, ["0:cmpl-1f"], FinishReason.STOP)),
        encode(Heartbeat(10)),
        HELLO,
    ]
    draw, answered = random.Random(5), 0
    for number in range(num_frames):
        if number % 20 == 0:
            dealer = connect(engine)
            if number % 40 == 0:
                dealer.send(HELLO)
        dealer.send(mutate(frames[number % 4], draw))
        if number % 20 == 19:
            await asyncio.sleep(0.002)
            while dealer.poll(0):
                message = decode_engine_message(dealer.recv())
                answered += not isinstance(message, EngineUp | Pulse | Closed)
            dealer.close(linger=0)
    check(await running, references)
    check(await run_undisturbed(frontend, bodies(60)[:8]), references)
    assert engine.engine_pid == pid and "replacing" not in engine.log
    assert "Traceback" not in engine.log and engine.process.poll() is None
    # A mutated frame that is still a request may be refused by name, or computed.
    assert answered < num_frames


def test_another_version_is_refused_with_a_reason(fleet: Fleet, connect: Connect) -> None:
    engine = fleet.start_engine().wait_ready()
    dealer = connect(engine)
    dealer.send(encode(Hello(PROTOCOL_VERSION + 1, "test")))
    (message,) = answers(dealer)
    assert isinstance(message, Closed) and "same release" in message.message


def test_a_silent_frontend_loses_its_session(fleet: Fleet, connect: Connect) -> None:
    """It keeps its connection, but its process does nothing: the engine frees its requests."""
    engine = fleet.start_engine(step_s=0.005).wait_ready()
    dealer = connect(engine)
    dealer.send(HELLO)
    up = decode_engine_message(dealer.recv())
    assert isinstance(up, EngineUp)
    request = AddRequest("cmpl-1f", [65], SamplingParams(max_tokens=2000), 7, 5.0)
    dealer.send(encode(Add(up.epoch, 5.0, request)))
    messages = answers(dealer, 8.0)
    assert isinstance(messages[-1], Closed) and "silent" in messages[-1].message
    assert "1 samples" in engine.log
