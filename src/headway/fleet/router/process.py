"""The router's side of all connections, and the process that it runs in.

A frontend that is gone, silent or sends nonsense loses its session, and the router forgets its
requests: the frontend goes on by itself, and tells of them when it connects again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from dataclasses import dataclass
from itertools import count

from headway.clock import Clock
from headway.errors import WireError
from headway.fleet.network.checks import loggable_name, refuse_version
from headway.fleet.network.cluster_key import ClusterKey
from headway.fleet.network.endpoints import Endpoint
from headway.fleet.network.server_socket import ServerSocket
from headway.fleet.network.wire import MAX_SILENCE_S, Closed
from headway.fleet.router.frontends import FleetRouter, JoinedFrontend
from headway.fleet.router.messages import MAX_FRONTENDS
from headway.fleet.router.wire import (
    MAX_ITEMS,
    ROUTER_VERSION,
    Decided,
    Join,
    decode_join,
    decode_told,
    encode,
)

logger = logging.getLogger(__name__)

MAX_ENDED = 1024
"""Connections without a session that are remembered."""
TICK_S = 0.1
"""How often requests are looked at without news: they age, and may move."""
SHOW_TICKS = 10
"""How many of these pass between two messages about all frontends."""


@dataclass(slots=True, eq=False)
class _Session:
    """One connection of a frontend."""

    identity: bytes
    frontend: JoinedFrontend
    instance: str
    heard_at: float
    heard: int = 0
    """Number of the last message."""
    has_news: bool = True


class RouterListener:
    """Passes what frontends say to a FleetRouter, and its decisions back."""

    def __init__(
        self, endpoint: Endpoint, key: ClusterKey | None, fleet: FleetRouter, clock: Clock
    ) -> None:
        """Bind the socket; raise ConfigError if that is not possible or not safe."""
        self.fleet = fleet
        self._clock = clock
        self._socket = ServerSocket(endpoint, key)
        self._sessions: dict[bytes, _Session] = {}
        self._ended: dict[bytes, None] = {}

    @property
    def address(self) -> str:
        """The address with the port that was bound."""
        return self._socket.address

    async def run(self) -> None:
        """Serve frontends until cancelled."""
        ticking = asyncio.create_task(self._tick_at_intervals())
        try:
            while True:
                await self._receive(await self._socket.receive())
                await self._decide()
        finally:
            ticking.cancel()

    async def close(self) -> None:
        """End all sessions, so that frontends go on by themselves at once."""
        for session in list(self._sessions.values()):
            await self._end(session, "the router stops")
        self._socket.close()

    async def _tick_at_intervals(self) -> None:
        ticked_at = self._clock.now()
        for number in count(1):
            await asyncio.sleep(TICK_S)
            now = self._clock.now()
            # Time in which this process itself was delayed is no silence: messages are unread.
            late_s, ticked_at = max(0.0, now - ticked_at - TICK_S), now
            for session in list(self._sessions.values()):
                session.heard_at += late_s
                if now - session.heard_at > MAX_SILENCE_S:
                    await self._end(session, "it is silent")
            if number % SHOW_TICKS == 0:
                self.fleet.show_frontends()
            await self._decide()

    async def _receive(self, frames: list[bytes]) -> None:
        """Handle one message; one that cannot be handled ends its session, and nothing else."""
        identity, session = frames[0], self._sessions.get(frames[0])
        if identity in self._ended:
            return
        try:
            if len(frames) != 2:
                raise WireError(f"{len(frames)} frames")
            if session is None:
                await self._open(identity, decode_join(frames[1]))
                return
            told = decode_told(frames[1])
            now = self._clock.now()
            session.heard_at, session.heard, session.has_news = now, told.number, True
            for item in told.items:
                self.fleet.handle(session.frontend, item, now)
        except WireError as error:
            if session is None:
                self._remember_ended(identity)
            else:
                await self._end(session, f"a message is not part of the protocol: {error}")
        except Exception:
            logger.exception("a message of a frontend cannot be handled")
            if session is not None:
                await self._end(session, "a message cannot be handled")

    async def _open(self, identity: bytes, join: Join) -> None:
        name = loggable_name(join.frontend)
        refusal = refuse_version("router", ROUTER_VERSION, join.version)
        for before in [] if refusal else list(self._sessions.values()):
            if join.instance and before.instance == join.instance:
                await self._end(before, "the frontend has connected again")
        if not refusal and len(self._sessions) >= MAX_FRONTENDS:
            refusal = f"the router has {len(self._sessions)} frontends, as many as it takes"
        if refusal:
            logger.warning("frontend %s is refused: %s", name, refusal)
            self._remember_ended(identity)
            await self._socket.send(identity, encode(Closed(refusal)))
            return
        logger.info("frontend %s is connected", name)
        frontend = self.fleet.join(name)
        self._sessions[identity] = _Session(identity, frontend, join.instance, self._clock.now())

    async def _end(self, session: _Session, reason: str) -> None:
        """End the session of a frontend, and forget its requests."""
        if self._sessions.pop(session.identity, None) is None:
            return
        frontend = session.frontend
        logger.info(
            "frontend %s is gone (%s); %d requests", frontend.name, reason, len(frontend.requests)
        )
        self._remember_ended(session.identity)
        self.fleet.leave(frontend, self._clock.now())
        await self._socket.send(session.identity, encode(Closed(reason)))

    def _remember_ended(self, identity: bytes) -> None:
        """Have a connection get no session from now on."""
        self._ended[identity] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    async def _decide(self) -> None:
        """Send what is decided now, and how far each frontend was heard."""
        self.fleet.tick(self._clock.now())
        for session in list(self._sessions.values()):
            outbox = session.frontend.outbox
            while session.has_news or outbox:
                session.has_news = False
                decided = Decided(session.heard, outbox[:MAX_ITEMS])
                del outbox[:MAX_ITEMS]
                if not await self._socket.send(session.identity, encode(decided)):
                    await self._end(session, "the connection is lost")
                    break


async def host_router(listener: RouterListener) -> int:
    """Serve until a signal; return the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    logger.info("the router listens on %s", listener.address)
    serving = asyncio.create_task(listener.run())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        return 0
    finally:
        for task in (serving, stopping):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await listener.close()
