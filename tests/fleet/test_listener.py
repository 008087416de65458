"""An engine with its listener in this process: what one frontend does is felt by no other."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import zmq
import zmq.asyncio

from headway.clock import SystemClock
from headway.core.params import SamplingParams
from headway.core.request import FinishReason
from headway.engine.process.messages import AddRequest, EventBatch, QuarantinedDigest
from headway.engine.supervise.loss import EngineLoss
from headway.engine.supervise.quarantine import digest_of
from headway.engine.supervise.restart_policy import RestartLimits
from headway.engine.supervise.supervisor import Supervisor
from headway.errors import EngineError, WireError
from headway.fleet.engines import listener, trials
from headway.fleet.engines.listener import EngineIdentity, EngineListener
from headway.fleet.frontends.link import LinkParts, NetworkLink
from headway.fleet.network import connection, wire
from headway.fleet.network.cluster_key import ClusterKey, secure_frontend
from headway.fleet.network.connection import ConnectionLostError
from headway.fleet.network.endpoints import Endpoint
from headway.fleet.network.wire import (
    PROTOCOL_VERSION,
    Abort,
    Add,
    Closed,
    Credit,
    EngineDown,
    EngineMessage,
    EngineUp,
    Heartbeat,
    Hello,
    Pulse,
    Quarantined,
    Reported,
    TriedAlone,
    decode_engine_message,
    encode,
)
from tests.support.local_engine import LocalProcess, ScriptExecutor

HELLO = encode(Hello(PROTOCOL_VERSION, "test"))
IDENTITY = EngineIdentity("model", "tokenizer")
KEY = ClusterKey.of("0123456789abcdef" * 2)
NUM_TOKENS = 100


class Engine:
    """A listener, and the engine process behind it as an object."""

    def __init__(
        self,
        key: ClusterKey | None = None,
        identity: EngineIdentity = IDENTITY,
        orphan_s: float = 30.0,
    ) -> None:
        self.process = LocalProcess(ScriptExecutor([65] * NUM_TOKENS, 0), "fcfs")
        limits = RestartLimits(max_restarts=0)
        supervisor = Supervisor(lambda _: self.process, SystemClock(), limits)  # pyright: ignore
        endpoint = Endpoint("127.0.0.1", 0)
        clock = SystemClock()
        self.listener = EngineListener(endpoint, key, supervisor, identity, clock, orphan_s)
        self.supervisor = supervisor
        self.context = zmq.asyncio.Context()

    def connect(self, key: ClusterKey | None = None) -> Frontend:
        return Frontend(self.context, self.listener.address, key)


class Frontend:
    """The socket of a frontend."""

    def __init__(
        self, context: zmq.asyncio.Context, address: str, key: ClusterKey | None = None
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        if key is not None:
            secure_frontend(self.socket, key)
        self.socket.connect(address)

    async def receive(self, timeout_s: float = 2.0) -> EngineMessage | None:
        """Return the next message that is not a pulse; None if there is none in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    message = decode_engine_message(await self.socket.recv())
                    if not isinstance(message, Pulse):
                        return message
        return None

    async def receive_down(self) -> EngineDown:
        while not isinstance(message := await self.receive(), EngineDown):
            assert isinstance(message, Reported), message
        return message

    async def receive_told(self) -> TriedAlone:
        while not isinstance(message := await self.receive(), TriedAlone):
            assert isinstance(message, Reported), message
        return message

    async def greet(self) -> EngineUp:
        await self.socket.send(HELLO)
        up = await self.receive()
        assert isinstance(up, EngineUp)
        return up

    async def add(self, name: str, max_tokens: int = NUM_TOKENS, **fields: object) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = AddRequest(name, [65], params, 7, 5.0, **fields)  # pyright: ignore
        await self.socket.send(encode(Add(1, 5.0, request)))

    async def answer(self, name: str) -> int:
        """Add a request and return the number of its tokens."""
        await self.add(name)
        num_tokens = 0
        while True:
            message = await self.receive()
            assert isinstance(message, Reported), message
            num_tokens += sum(len(one.token_ids) for one in message.events.tokens)
            if message.events.finished:
                assert message.events.finished[0].reason == FinishReason.LENGTH
                return num_tokens


@asynccontextmanager
async def running(engine: Engine) -> AsyncGenerator[Engine, None]:
    listening = asyncio.create_task(engine.listener.run())
    await engine.supervisor.load()
    supervising = asyncio.create_task(engine.supervisor.run(engine.listener))
    try:
        yield engine
    finally:
        for task in (listening, supervising):
            task.cancel()
        await asyncio.gather(listening, supervising, return_exceptions=True)
        await engine.listener.close()
        engine.context.destroy(linger=0)


async def test_a_connection_gets_one_session() -> None:
    """What it has not read is still queued: a session after another would be without bound."""
    async with running(Engine()) as engine:
        frontend = engine.connect()
        await frontend.greet()
        await frontend.socket.send(b"nonsense")
        await frontend.socket.send(HELLO)
        assert await frontend.receive(0.3) is None
        refused = engine.connect()
        for _ in range(3):
            await refused.socket.send(encode(Hello(PROTOCOL_VERSION + 1, "test")))
        assert isinstance(await refused.receive(), Closed)
        assert await refused.receive(0.3) is None
        assert await engine.connect().greet()


async def test_a_hello_with_a_long_name_is_not_read() -> None:
    async with running(Engine()) as engine:
        frontend = engine.connect()
        await frontend.socket.send(encode(Hello(PROTOCOL_VERSION, "x" * 1_000_000)))
        assert await frontend.receive(0.3) is None
        assert await engine.connect().greet()


async def test_connections_that_had_a_session_are_remembered_within_a_bound() -> None:
    async with running(Engine()) as engine:
        sessions = engine.listener._sessions
        for number in range(3000):
            sessions.end(str(number).encode())
        assert sessions.has_ended(b"2999") and len(sessions._ended) < 2000


async def test_a_frontend_that_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_UNREAD_BYTES", 20_000)
    async with running(Engine()) as engine:
        good, slow = engine.connect(), engine.connect()
        await good.greet()
        await slow.greet()
        for number in range(6):
            await slow.add(f"slow-{number}")
        # It is alive and says so, but has read nothing.
        for _ in range(40):
            await slow.socket.send(encode(Heartbeat(0)))
            await asyncio.sleep(0.01)
        messages = []
        while message := await slow.receive(0.3):
            messages.append(message)
        assert isinstance(messages[-1], Closed) and "does not read" in messages[-1].message
        ends = [one for message in messages[:-1] for one in message.events.finished]
        assert len(ends) < 6, "its requests did not run to their end"
        assert engine.listener._sessions.num_requests == 0


async def test_reports_that_were_read_give_new_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_UNREAD_BYTES", 60_000)
    async with running(Engine()) as engine:
        frontend = engine.connect()
        num_read = len(encode(await frontend.greet()))
        for number in range(4):
            await frontend.add(f"a-{number}")
            has_ended = False
            while not has_ended:
                frame = await asyncio.wait_for(frontend.socket.recv(), 2.0)
                num_read += len(frame)
                await frontend.socket.send(encode(Heartbeat(num_read)))
                message = decode_engine_message(frame)
                assert not isinstance(message, Closed), message
                has_ended = isinstance(message, Reported) and bool(message.events.finished)


async def test_nobody_is_let_in_without_the_authenticator() -> None:
    """As in the moment of a stop: whoever knows the public key of engines has no key yet."""
    async with running(Engine(KEY)) as engine:
        authenticator = engine.listener._socket._authenticator
        assert authenticator is not None
        assert await engine.connect(KEY).greet()
        authenticator.stop()
        engine.listener._socket._authenticator = None
        await asyncio.sleep(0.3)
        stranger = engine.connect(ClusterKey(KEY.engine, ClusterKey.of("x" * 40).frontend))
        await stranger.socket.send(HELLO)
        assert await stranger.receive(0.5) is None


async def test_an_engine_without_kernels_has_one_class_of_its_own() -> None:
    async with running(Engine()) as engine, running(Engine()) as other:
        ups = [await engine.connect().greet() for _ in range(2)]
        assert ups[0].info.numerics == ups[1].info.numerics != ""
        assert (await other.connect().greet()).info.numerics != ups[0].info.numerics


async def test_a_newer_attempt_ends_the_older_and_gets_all_events() -> None:
    async with running(Engine()) as engine:
        frontend = engine.connect()
        await frontend.greet()
        await frontend.add("a")
        await frontend.add("a", attempt=1)
        names: list[str] = []
        while not names:
            message = await frontend.receive()
            assert isinstance(message, Reported)
            finished = message.events.finished
            names = [one.request_id for one in finished if one.reason == FinishReason.LENGTH]
        assert names == ["1:a"]
        assert engine.listener._sessions.num_requests == 0


def make_link(engine: Engine, **fields: object) -> NetworkLink:
    parts = LinkParts(engine.context, None, "test", "tokenizer", SystemClock())
    host, _, port = engine.listener.address.removeprefix("tcp://").rpartition(":")
    return NetworkLink(Endpoint(host, int(port)), replace(parts, **fields))  # pyright: ignore


async def refusal_of(link: NetworkLink, log: Callable[[], str]) -> str:
    """Return why a link does not use its engine."""
    loading = asyncio.create_task(link.load())
    try:
        async with asyncio.timeout(3.0):
            while not log():
                await asyncio.sleep(0.01)
        assert not link.is_up and not link.is_connected and link.info is None
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await link.stop()
    return log()


@pytest.mark.parametrize(
    ("credit", "problem"),
    [(Credit(0, 5), "credit.num_requests 0"), (Credit(1, -1), "credit.num_tokens -1")],
)
async def test_an_engine_with_impossible_facts_is_not_used(
    caplog: pytest.LogCaptureFixture, credit: Credit, problem: str
) -> None:
    async with running(Engine(identity=replace(IDENTITY, credit=credit))) as engine:
        link = make_link(engine)
        assert problem in await refusal_of(link, lambda: caplog.text)


async def test_an_address_with_another_model_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that starts again may have other weights than the engines in use."""
    async with (
        running(Engine(identity=replace(IDENTITY, weights="a"))) as first,
        running(Engine(identity=replace(IDENTITY, weights="b"))) as second,
    ):
        link = make_link(first)
        await link.load()
        other = make_link(second, weights=link._parts.weights)
        other.info = link.info  # of the engine that was there before
        assert "other weights" in await refusal_of(other, lambda: caplog.text)
        mixed = make_link(second, weights=link._parts.weights, may_mix_weights=True)
        await mixed.load()
        await mixed.stop()
        await link.stop()
        # The weights of an engine that is gone bind nobody.
        await other.load()
        await other.stop()


async def test_a_link_without_a_socket_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(Engine()) as engine:
        link, make = make_link(engine), engine.context.socket
        num_calls = 0

        def socket(kind: int) -> zmq.asyncio.Socket:
            nonlocal num_calls
            num_calls += 1
            if num_calls in (1, 3):  # the socket itself, and its monitor
                raise zmq.ZMQError(errno.EMFILE)
            return make(kind)

        monkeypatch.setattr(engine.context, "socket", socket)
        await asyncio.wait_for(link.load(), 5.0)
        assert link.is_up
        await link.stop()
        with pytest.raises(ConnectionLostError, match="cannot be connected to"):
            connection.PeerConnection(
                engine.context, Endpoint("*", 1), None, link._parts.dialect, SystemClock()
            )


async def test_a_quarantine_reaches_the_other_frontends_and_is_kept() -> None:
    async with running(Engine()) as engine:
        first, second = engine.connect(), engine.connect()
        for frontend in (first, second):
            await frontend.greet()
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        digest = digest_of(AddRequest("any", [65], params, 1, 0.0))
        told = Quarantined([QuarantinedDigest(digest, 60.0), QuarantinedDigest(b"short", 60.0)])
        await first.socket.send(encode(told))
        heard = await second.receive()
        assert isinstance(heard, Quarantined) and [o.digest for o in heard.entries] == [digest]
        await first.socket.send(encode(told))
        assert await second.receive(0.1) is None, "it is passed on once"
        # A frontend that does not know yet is refused, and costs nobody an engine.
        await second.add("cmpl-1")
        message = await second.receive()
        assert isinstance(message, Reported) and "change the" in message.events.refused[0].message
        assert not engine.process.added
        late = engine.connect()
        await late.greet()
        assert isinstance(await late.receive(), Quarantined)


async def test_two_frontends_share_an_engine() -> None:
    async with running(Engine()) as engine:
        frontends = [engine.connect() for _ in range(3)]
        for frontend in frontends:
            await frontend.greet()
        # The same ids, at the same time.
        answers = await asyncio.gather(*(frontend.answer("cmpl-1") for frontend in frontends))
        assert answers == [NUM_TOKENS] * 3


async def test_all_samples_of_a_large_request_are_taken() -> None:
    """After a failover each sample is sent alone, with its prompt, beyond the credit in sum."""
    identity = replace(IDENTITY, credit=Credit(num_requests=1, num_tokens=1))
    async with running(Engine(identity=identity)) as engine:
        frontend = engine.connect()
        await frontend.greet()
        for index in range(4):
            name = f"a#{index}" if index else "a"
            await frontend.add(name, index=index, num_prompt_tokens=1)
        ends: list[FinishReason] = []
        while len(ends) < 4:
            message = await frontend.receive()
            assert isinstance(message, Reported)
            assert not message.events.refused
            ends += [one.reason for one in message.events.finished]


async def test_a_command_that_no_engine_reads_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine would end the connection, and with it all other requests."""
    monkeypatch.setattr(wire, "MAX_COMMAND_BYTES", 1000)
    async with running(Engine()) as engine:
        link = make_link(engine)
        await link.load()
        large = AddRequest("a", [65] * 2000, SamplingParams(max_tokens=9), 7, 5.0)
        with pytest.raises(WireError, match="an engine reads 1000"):
            await link.send(large)
        assert link.has_room(10**9), "it does not count"
        await link.stop()


async def added(engine: Engine, num: int) -> list[str]:
    """Wait until the process has so many requests; return the wire ids of all."""
    async with asyncio.timeout(5):
        while len(engine.process.added) < num:
            await asyncio.sleep(0.01)
    return [one.id.partition(":")[2] for one in engine.process.added]


async def begin_trial(engine: Engine) -> tuple[Frontend, Frontend]:
    """Return two frontends; the paused process has one request of the first, tried alone."""
    first, second = engine.connect(), engine.connect()
    await first.greet()
    await second.greet()
    engine.process.is_paused = True
    await first.add("suspect", num_crashes=2)
    await added(engine, 1)
    return first, second


async def test_a_request_on_trial_is_alone_in_the_process() -> None:
    async with running(Engine()) as engine:
        _, second = await begin_trial(engine)
        await second.add("other")
        await second.add("left")
        await second.socket.send(encode(Abort(1, [wire.wire_id(0, "left")])))
        ended: list[str] = []
        while not ended:  # the host answers for a request that the process does not have
            message = await second.receive()
            assert isinstance(message, Reported)
            ended += [one.request_id for one in message.events.finished]
        assert len(engine.process.added) == 1
        engine.process.is_paused = False
        engine.process._wake.set()
        assert (await added(engine, 2))[1] == wire.wire_id(0, "other")
        while len(ended) < 2:
            message = await second.receive()
            assert isinstance(message, Reported)
            ended += [one.request_id for one in message.events.finished]
        assert ended == [wire.wire_id(0, one) for one in ("left", "other")]


async def test_frontends_hear_whether_another_may_have_ended_the_process() -> None:
    async with running(Engine()) as engine:
        frontends = [engine.connect() for _ in range(3)]
        for frontend in frontends:
            await frontend.greet()
        engine.process.is_paused = True
        for number, frontend in enumerate(frontends[:2]):
            await frontend.add(f"r{number}")
        await added(engine, 2)
        ids = frozenset(one.id for one in engine.process.added)

        async def hear(loss: EngineLoss) -> list[EngineDown]:
            await engine.listener.on_engine_down(loss)
            return [await frontend.receive_down() for frontend in frontends]

        first, second, third = await hear(EngineLoss(ids, has_failed=True))
        assert first == EngineDown([wire.wire_id(0, "r0")], True, True, [])
        assert second == EngineDown([wire.wire_id(0, "r1")], True, True, [])
        # The step is known, and the third frontend had no request in it.
        assert third == EngineDown([], has_failed=False, is_shared=True, held_ids=[])
        # Without a new request of anybody else, it is the own one.
        await engine.listener.on_engine_up()
        for frontend in frontends:
            assert isinstance(await frontend.receive(), EngineUp)
        params = SamplingParams(max_tokens=9)
        alone = AddRequest("alone", [65], params, 7, 5.0, num_crashes=2)
        await frontends[0].socket.send(encode(Add(2, 5.0, alone)))
        await added(engine, 3)
        held = AddRequest("held", [65], params, 7, 5.0)
        await frontends[1].socket.send(encode(Add(2, 5.0, held)))
        await asyncio.sleep(0.1)
        told = await frontends[0].receive()
        assert told == TriedAlone(wire.wire_id(0, "alone"), True)
        first, second, _ = await hear(EngineLoss(frozenset({engine.process.added[2].id})))
        assert not first.is_shared
        assert second == EngineDown([], False, True, [wire.wire_id(0, "held")])


class Owner:
    """Notes how its engine was lost."""

    def __init__(self) -> None:
        self.loss = asyncio.get_running_loop().create_future()

    def has_work_in_engine(self) -> bool:
        return True

    async def on_engine_up(self) -> None: ...

    async def on_report(self, report: EventBatch) -> None: ...

    async def on_engine_down(self, loss: EngineLoss) -> int:
        self.loss.set_result(loss)
        return 0

    def on_give_up(self, error: EngineError) -> None: ...


@pytest.mark.parametrize("num_held", [1, 1000])
async def test_held_requests_that_are_quarantined_meanwhile_are_refused(num_held: int) -> None:
    """One after the other: not each within the refusal of the one before."""
    async with running(Engine()) as engine:
        first, second = await begin_trial(engine)
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        held = [AddRequest(f"held-{number}", [65], params, 7, 5.0) for number in range(num_held)]
        for one in held:
            await second.socket.send(encode(Add(1, 5.0, one)))
        while len(engine.listener._trials.held_ids) < num_held:
            await asyncio.sleep(0.01)
        await first.socket.send(encode(Quarantined([QuarantinedDigest(digest_of(held[0]), 60.0)])))
        await asyncio.sleep(0.1)
        engine.process.is_paused = False
        engine.process._wake.set()
        refused: list[str] = []
        while len(refused) < num_held:
            message = await second.receive()
            assert message is not None
            if isinstance(message, Reported):
                refused += [one.request_id for one in message.events.refused]
        assert refused == [wire.wire_id(0, one.id) for one in held]
        assert len(engine.process.added) == 1
        assert await second.answer("next") == NUM_TOKENS


async def test_a_request_on_trial_hears_when_it_is_no_longer_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "MAX_TRIAL_S", 0.2)
    monkeypatch.setattr(trials, "MAX_DRAIN_S", 0.2)
    async with running(Engine()) as engine:
        first, second = engine.connect(), engine.connect()
        await first.greet()
        await second.greet()
        engine.process.is_paused = True
        await first.add("slow", num_crashes=2)
        assert await first.receive_told() == TriedAlone(wire.wire_id(0, "slow"), True)
        await second.add("deadly", num_crashes=2)
        assert await first.receive_told() == TriedAlone(wire.wire_id(0, "slow"), False)


@pytest.mark.parametrize("is_alone", [True, False])
async def test_a_lost_connection_is_proof_only_if_the_engine_said_alone(
    is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "MAX_DRAIN_S", 0.1)
    async with running(Engine()) as engine:
        engine.process.is_paused = True
        link, other, owner = make_link(engine), engine.connect(), Owner()
        await link.load()
        await other.greet()
        if not is_alone:
            await other.add("other")
            await added(engine, 1)
        run = asyncio.create_task(link.run(owner))
        request = AddRequest("a", [65], SamplingParams(max_tokens=9), 7, 5.0, num_crashes=2)
        await link.send(request)
        await added(engine, 1 if is_alone else 2)
        await asyncio.sleep(0.1)
        lost, link._connection = link._connection, None
        await engine.listener.on_report(EventBatch())  # the link finds that it has none
        loss = await asyncio.wait_for(owner.loss, 20)
        assert loss == EngineLoss(has_failed=True, is_shared=not is_alone)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await link.stop()
        assert lost is not None
        await lost.close()
