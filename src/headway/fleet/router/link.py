"""Connects a frontend to its routers, and has one of them decide.

The first router in the order of the settings that answers is in use; the others stand by. A router
that is lost, or later than SLOW_S, is left at once: the frontend decides by itself, and tells the
next router what is live. A router earlier in the order is used again after HOLD_S without trouble,
so that all frontends come to use the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from math import ceil

from headway.engine.client.async_engine import AsyncEngine
from headway.errors import DeadlineError, WireError
from headway.fleet.frontends.link import MAX_BACKOFF_S, MIN_BACKOFF_S, LinkParts
from headway.fleet.network.connection import ConnectionLostError, PeerConnection, PeerDialect
from headway.fleet.network.endpoints import Endpoint
from headway.fleet.router.messages import Arrive, End, FromFrontend, Restore
from headway.fleet.router.quotas import SharedQuotas
from headway.fleet.router.shared import SharedRouter
from headway.fleet.router.wire import (
    MAX_FRAME_TOKENS,
    MAX_ITEMS,
    ROUTER_VERSION,
    Decided,
    Join,
    RouterFrame,
    Told,
    decode_router_frame,
    encode,
    encode_told,
)

logger = logging.getLogger(__name__)

SLOW_S = 0.5
"""How late the answers of a router may be."""
HOLD_S = 5.0
"""How long a router must be up before it is used in place of another."""
WATCH_S = 0.05


class RouterLink:
    """The connection to one router, and how late it is."""

    def __init__(self, endpoint: Endpoint, parts: LinkParts) -> None:
        """Raise ConfigError if the endpoint needs a cluster key and there is none."""
        endpoint.check_key(parts.key is not None, "--router")
        self.name = endpoint.address
        self.up_since: float | None = None
        """When the router answered first over this connection; None without one."""
        self.on_decided: Callable[[RouterLink, Decided], None] = lambda _link, _decided: None
        self.on_lost: Callable[[RouterLink], None] = lambda _link: None
        self._endpoint = endpoint
        self._parts = parts
        self._connection: PeerConnection[RouterFrame] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._number = 0
        self._unheard: deque[int] = deque()
        self._late_s = 0.0
        self._last_problem = ""

    async def run(self) -> None:
        """Connect, and connect again, until cancelled."""
        backoff_s = MIN_BACKOFF_S
        while True:
            problem = "it is left for another router"
            try:
                await self._serve()
            except ConnectionLostError as error:
                problem = str(error)
            finally:
                was_up, self.up_since = self.up_since is not None, None
                connection, self._connection = self._connection, None
                if connection is not None:
                    await connection.close()
                self.on_lost(self)
            if problem != self._last_problem or was_up:
                logger.warning("router %s: %s", self.name, problem)
                self._last_problem = problem
            backoff_s = MIN_BACKOFF_S if was_up else min(2 * backoff_s, MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    def leave(self) -> None:
        """End the connection; the router forgets this frontend, and another connection begins."""
        if self._reading is not None:
            self._reading.cancel()

    async def tell(self, items: list[FromFrontend]) -> None:
        """Send what has happened; a lost connection is noticed elsewhere."""
        if self._connection is not None:
            await self._connection.send(self._make_frame(items))

    def _make_frame(self, items: list[FromFrontend]) -> bytes:
        self._number += 1
        self._unheard.append(self._number)
        return encode_told(Told(self._number, items))

    async def _serve(self) -> None:
        """Read decisions until the connection is lost, left, or too late."""
        parts = self._parts
        join = encode(Join(ROUTER_VERSION, parts.name, parts.instance))
        self._number, self._late_s = 0, 0.0
        self._unheard.clear()
        self._connection = PeerConnection(
            parts.context,
            self._endpoint,
            parts.key,
            PeerDialect("router", join, decode_router_frame, lambda _: self._make_frame([])),
            parts.clock,
        )
        self._reading = asyncio.create_task(self._read(self._connection))
        try:
            while not self._reading.done():
                await asyncio.wait((self._reading,), timeout=WATCH_S)
                self._note_lateness()
            with contextlib.suppress(asyncio.CancelledError):
                self._reading.result()
        finally:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    def _note_lateness(self) -> None:
        # Steps of one interval: time in which this process itself was busy does not count.
        self._late_s = self._late_s + WATCH_S if self._unheard and self.up_since else 0.0
        if self._late_s > SLOW_S:
            raise ConnectionLostError(f"it has not answered for {self._late_s:.1f} s")

    async def _read(self, connection: PeerConnection[RouterFrame]) -> None:
        while True:
            message = await connection.receive()
            if isinstance(message, Decided):
                self._late_s = 0.0
                while self._unheard and self._unheard[0] <= message.heard:
                    self._unheard.popleft()
                if self.up_since is None:
                    self.up_since = self._parts.clock.now()
                self.on_decided(self, message)


class RouterLinks:
    """The routers of a frontend; one of them decides for its SharedRouter."""

    def __init__(self, endpoints: Sequence[Endpoint], parts: LinkParts) -> None:
        self._links = [RouterLink(endpoint, parts) for endpoint in endpoints]
        self._clock = parts.clock
        self._active: RouterLink | None = None
        self.quotas = SharedQuotas()
        self._shared: SharedRouter | None = None
        self._news = asyncio.Event()
        """Set when there is something to tell, or a decision to follow."""
        for link in self._links:
            link.on_decided, link.on_lost = self._take, self._lose

    def follow(self, shared: SharedRouter) -> SharedRouter:
        """Have this router's requests be decided by router processes, while `run` runs."""
        self._shared = shared
        shared.on_told, shared.quotas = self._news.set, self.quotas
        return shared

    async def run(self, engine: AsyncEngine) -> None:
        """Use the routers until cancelled."""
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(link.run())
            group.create_task(self._watch())
            group.create_task(self._work(engine))

    async def _watch(self) -> None:
        while True:
            self._choose()
            self.quotas.flush()
            if self._shared is not None and self._shared.num_held:
                self._news.set()
            await asyncio.sleep(WATCH_S)

    def _choose(self) -> None:
        """Use the first router that is up; leave one in use only for one that is steady."""
        now, active, shared = self._clock.now(), self._active, self._shared
        for link in self._links:
            if shared is None or link is active:
                return
            if link.up_since is not None and (active is None or now - link.up_since > HOLD_S):
                if active is not None:
                    self._lose(active)
                    active.leave()
                self._active = link
                logger.info("router %s decides", link.name)
                shared.share(now)
                return

    def _lose(self, link: RouterLink) -> None:
        if link is self._active and self._shared is not None:
            self._active = None
            num_asked = self._shared.num_asked
            logger.warning("router %s is left with %d requests", link.name, num_asked)
            self._shared.unshare(self._clock.now())
            self._news.set()

    def _take(self, link: RouterLink, decided: Decided) -> None:
        if link is self._active and self._shared is not None and decided.items:
            self._shared.take(decided.items)
            self._news.set()

    async def _work(self, engine: AsyncEngine) -> None:
        """Follow decisions, and tell what has happened."""
        while True:
            await self._news.wait()
            self._news.clear()
            shared = self._shared
            if shared is None:
                continue
            await engine.send_ready()
            while shared.refusals:
                late = shared.refusals.popleft()
                error = DeadlineError(late.message, max(1, ceil(late.retry_after_s)))
                await engine.refuse_by_id(late.request_id, error)
            items, shared.outbox = shared.outbox, []
            for frame in _frames(items):
                if self._active is not None:
                    try:
                        await self._active.tell(frame)
                    except WireError:
                        logger.exception("router %s cannot be told", self._active.name)
                        self._active.leave()


def _frames(items: list[FromFrontend]) -> list[list[FromFrontend]]:
    """Split what is to be told into messages of bounded size."""
    frames: list[list[FromFrontend]] = []
    num_tokens = MAX_FRAME_TOKENS
    for item in items:
        size = 0
        if isinstance(item, Arrive | Restore):
            size = len(item.request.token_ids)
        elif isinstance(item, End):
            size = len(item.output_ids)
        if not frames or num_tokens + size > MAX_FRAME_TOKENS or len(frames[-1]) >= MAX_ITEMS:
            frames.append([])
            num_tokens = 0
        frames[-1].append(item)
        num_tokens += size
    return frames
