"""Router processes under real frontends: killed, stopped, started again, and their standby."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import zmq
import zmq.asyncio

from benchmarks.support.fleet_loads import (
    NUM_KINDS,
    bodies,
    check_fault,
    client_of,
    run_undisturbed,
)
from benchmarks.support.fleets import Fleet, RunningRouter
from benchmarks.support.history import record
from benchmarks.support.relay import Relay
from benchmarks.support.servers import RunningServer
from headway.clock import SystemClock
from headway.errors import ConfigError
from headway.fleet.network.cluster_key import ClusterKey, secure_frontend
from headway.fleet.network.endpoints import Endpoint
from headway.fleet.network.wire import Closed
from headway.fleet.router.frontends import FleetRouter
from headway.fleet.router.messages import (
    Arrive,
    EngineFound,
    FrontendsShown,
    ReportSteps,
    RouterRequest,
    SendTo,
    ToFrontend,
)
from headway.fleet.router.process import RouterListener
from headway.fleet.router.wire import (
    ROUTER_VERSION,
    Decided,
    Join,
    RouterFrame,
    Told,
    decode_router_frame,
    encode,
)
from tests.fleet.conftest import NUM_BLOCKS, STEP_S, wait_log, wait_up

KEY = ClusterKey.of("0123456789abcdef" * 2)
JOIN = encode(Join(ROUTER_VERSION, "test", ""))


class Rig:
    """Two routers, two engines, and frontends that use them."""

    def __init__(self, fleet: Fleet, num_frontends: int) -> None:
        self.fleet = fleet
        for _ in range(2):
            fleet.start_engine(step_s=STEP_S, num_blocks=NUM_BLOCKS)
        self.routers = [fleet.start_router() for _ in range(2)]
        names = [one.address for one in self.routers]
        self.servers = [fleet.start_frontend(router=names) for _ in range(num_frontends)]

    async def start(self) -> None:
        for server in self.servers:
            await wait_up(self.fleet, server)
            await self.decides(server, self.routers[0])

    async def decides(self, server: RunningServer, router: RunningRouter) -> None:
        """Wait until a frontend uses a router."""

        def is_used(log: str) -> bool:
            used = [line.split()[-2] for line in log.splitlines() if line.endswith(" decides")]
            return used[-1:] == [router.address]

        await wait_log(server, is_used, 60.0)


async def test_streams_do_not_notice_what_happens_to_the_router(
    fleet: Fleet, is_full: bool
) -> None:
    """Killed, then its standby stopped: the same tokens, and nobody waits for either."""
    rig = Rig(fleet, num_frontends=2 if is_full else 1)
    await rig.start()
    requests = bodies(120, 32 if is_full else NUM_KINDS)
    server, other = rig.servers[0], rig.servers[-1]
    references = await run_undisturbed(server, requests)

    async def kill() -> None:
        rig.routers[0].kill()
        # Requests that arrive in the same moment find an engine too.
        late = await run_undisturbed(other, requests[:2])
        assert [one.num_tokens for one in late] == [one.num_tokens for one in references[:2]]

    await check_fault(server, requests, references, kill)
    for one in rig.servers:
        await rig.decides(one, rig.routers[1])
    assert "is connected" in rig.routers[1].log

    async def stop() -> None:
        rig.routers[1].kill(signal.SIGSTOP)
        began_at = time.monotonic()
        await run_undisturbed(other, requests[:2])
        assert time.monotonic() - began_at < 5.0, "a router that is stopped stops nobody"

    await check_fault(server, requests, references, stop)
    await wait_log(server, "has not answered for")
    rig.routers[1].kill(signal.SIGCONT)
    if is_full:
        rig.routers[0].start()
        for one in rig.servers:
            await rig.decides(one, rig.routers[0])
    await run_undisturbed(server, requests[:2])
    assert "Traceback" not in server.log + rig.routers[0].log + rig.routers[1].log


@pytest.mark.full
async def test_engines_and_frontends_die_under_a_router(fleet: Fleet) -> None:
    rig = Rig(fleet, num_frontends=2)
    await rig.start()
    first, second = rig.servers
    requests = bodies(250)
    references = await run_undisturbed(first, requests)

    async def kill_engine() -> None:
        fleet.engines[0].kill_engine()

    await check_fault(first, requests, references, kill_engine)

    async def kill_frontend() -> None:
        async with client_of(second) as client:
            lost = [asyncio.create_task(record(client, body)) for body in requests[:8]]
            await asyncio.sleep(0.5)
            second.process.kill()
            await asyncio.gather(*lost)

    await check_fault(first, requests, references, kill_frontend)
    await wait_log(rig.routers[0], lambda log: "is gone" in log)
    await run_undisturbed(first, requests[:4])
    assert "Traceback" not in first.log + rig.routers[0].log


@pytest.mark.full
async def test_a_network_that_stalls_between_frontend_and_router(fleet: Fleet) -> None:
    """The connection stands, and nothing comes: requests do not wait for it."""
    fleet.start_engine(step_s=STEP_S, num_blocks=NUM_BLOCKS)
    router = fleet.start_router()
    relay = Relay(int(router.address.rpartition(":")[2]))
    server = fleet.start_frontend(router=[relay.address])
    await wait_up(fleet, server)
    await wait_log(server, f"router {relay.address} decides")
    requests = bodies(120, NUM_KINDS)
    references = await run_undisturbed(server, requests)

    async def stall() -> None:
        relay.stall()
        began_at = time.monotonic()
        await run_undisturbed(server, requests[:2])
        assert time.monotonic() - began_at < 5.0

    await check_fault(server, requests, references, stall)
    await wait_log(server, "has not answered for")
    relay.resume()
    await wait_log(server, lambda log: log.count(" decides") == 2)
    await run_undisturbed(server, requests[:2])
    relay.close()


# ------------------------------------------------------------------- one process


class Peer:
    """A frontend by hand."""

    def __init__(self, context: zmq.asyncio.Context, address: str, key: ClusterKey | None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        if key is not None:
            secure_frontend(self.socket, key)
        self.socket.connect(address)
        self._heard = -1

    async def receive(self, timeout_s: float = 1.0) -> RouterFrame | None:
        """Return the next message, without what the router shows of all frontends each second."""
        try:
            frame = await asyncio.wait_for(self.socket.recv(), timeout_s)
        except TimeoutError:
            return None
        message = decode_router_frame(frame)
        if not isinstance(message, Decided):
            return message
        items: list[ToFrontend] = []
        items += (one for one in message.items if not isinstance(one, FrontendsShown))
        if message.heard == self._heard and not items:
            return await self.receive(timeout_s)
        self._heard = message.heard
        return Decided(message.heard, items)

    async def tell(self, number: int, *items: Any) -> RouterFrame | None:
        await self.socket.send(encode(Told(number, list(items))))
        return await self.receive()


async def with_router(
    test: Callable[[RouterListener, Callable[..., Peer]], Awaitable[None]],
    key: ClusterKey | None = None,
) -> None:
    endpoint = Endpoint.parse("tcp://127.0.0.1:0", "--listen", may_be_any=True)
    listener = RouterListener(endpoint, key, FleetRouter("ttft", SystemClock()), SystemClock())
    running = asyncio.create_task(listener.run())
    context = zmq.asyncio.Context()
    try:
        await test(listener, lambda own=key: Peer(context, listener.address, own))
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        context.destroy(linger=0)
        await listener.close()


async def test_a_frontend_asks_and_is_answered() -> None:
    async def test(listener: RouterListener, connect: Callable[..., Peer]) -> None:
        peer = connect()
        await peer.socket.send(JOIN)
        assert await peer.receive() == Decided(0)
        engine = EngineFound("e", 100, 16, 8, True)
        assert await peer.tell(1, engine) == Decided(1, [ReportSteps(["e"])])
        answer = await peer.tell(2, Arrive(RouterRequest("r", [1, 2], 5)))
        assert isinstance(answer, Decided) and answer.heard == 2
        (send,) = answer.items
        assert isinstance(send, SendTo) and (send.request_id, send.engine) == ("r", "e")

    await with_router(test)


async def test_nonsense_ends_the_session_of_its_frontend_alone() -> None:
    async def test(listener: RouterListener, connect: Callable[..., Peer]) -> None:
        good, bad = connect(), connect()
        for peer in (good, bad):
            await peer.socket.send(JOIN)
            assert await peer.receive() == Decided(0)
        for frame in (b"\xc1", JOIN, encode(Told(1, [Arrive(RouterRequest("", [1], 5))]))):
            await bad.socket.send(frame)
            assert isinstance(await bad.receive(), Closed)
            assert await bad.tell(1) is None, "a connection has one session"
            bad = connect()
            await bad.socket.send(JOIN)
            assert await bad.receive() == Decided(0)
        assert await good.tell(1) == Decided(1)
        old = connect()
        await old.socket.send(encode(Join(99, "test", "")))
        answer = await old.receive()
        assert isinstance(answer, Closed) and "same release" in answer.message

    await with_router(test)


async def test_a_frontend_that_connects_again_has_one_session() -> None:
    async def test(listener: RouterListener, connect: Callable[..., Peer]) -> None:
        join = encode(Join(ROUTER_VERSION, "test", "instance"))
        first, again = connect(), connect()
        await first.socket.send(join)
        await first.receive()
        await first.tell(1, EngineFound("e", 100, 16, 8, True))
        await again.socket.send(join)
        assert await again.receive() == Decided(0)
        assert isinstance(await first.receive(), Closed)
        assert len(list(listener.fleet)) == 1 and not list(listener.fleet.router.engines)

    await with_router(test)


async def test_nobody_is_heard_without_the_key() -> None:
    async def test(_listener: RouterListener, connect: Callable[..., Peer]) -> None:
        for stranger in (connect(None), connect(ClusterKey.of("x" * 40))):
            await stranger.socket.send(JOIN)
            assert await stranger.receive(0.3) is None
        friend = connect()
        await friend.socket.send(JOIN)
        assert await friend.receive() == Decided(0)

    await with_router(test, KEY)


def test_a_router_for_other_machines_needs_a_key() -> None:
    endpoint = Endpoint.parse("tcp://0.0.0.0:0", "--listen", may_be_any=True)
    fleet = FleetRouter("ttft", SystemClock())
    with pytest.raises(ConfigError, match="--cluster-key-file"):
        RouterListener(endpoint, None, fleet, SystemClock())
