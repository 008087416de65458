"""One connection of a frontend to an engine or a router, from its first message to its loss.

The socket never connects again by itself: a lost connection is the end of a session, and the peer
has ended what the session had. NetworkLink and RouterLink open another connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from headway.clock import Clock
from headway.errors import HeadwayError, WireError
from headway.fleet.network.cluster_key import ClusterKey, secure_frontend
from headway.fleet.network.endpoints import Endpoint
from headway.fleet.network.wire import (
    HEARTBEAT_S,
    MAX_REPORT_BYTES,
    MAX_SILENCE_S,
    PROTOCOL_VERSION,
    SOCKET_SILENCE_MS,
    Closed,
    EngineMessage,
    Heartbeat,
    Hello,
    decode_engine_message,
    encode_command,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
CONNECT_TIMEOUT_MS = 5000
MAX_TICK_S = 1.0
"""Most that one reading of the clock adds to a silence: this process itself may have been busy."""
_EVENTS = (
    zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
)


class ConnectionLostError(HeadwayError):
    """The peer is out of reach."""


class SessionClosedError(ConnectionLostError):
    """The peer has ended the session."""


@dataclass(frozen=True, slots=True)
class PeerDialect(Generic[T]):
    """What is said over a connection: the messages of an engine, or of a router."""

    peer: str
    hello: bytes
    """The first message."""
    decode: Callable[[bytes], T | Closed]
    make_heartbeat: Callable[[int], bytes]
    """Returns the message that is sent at intervals, by the number of bytes read."""


def engine_dialect(name: str, instance: str = "") -> PeerDialect[EngineMessage]:
    """Return what a process of this name says to an engine, and what the engine answers."""
    return PeerDialect(
        "engine",
        encode_command(Hello(PROTOCOL_VERSION, name, instance)),
        decode_engine_message,
        lambda num_read_bytes: encode_command(Heartbeat(num_read_bytes)),
    )


class PeerConnection(Generic[T]):
    """A socket to one engine or router, and the events of its connection."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: Endpoint,
        key: ClusterKey | None,
        dialect: PeerDialect[T],
        clock: Clock,
    ) -> None:
        """Connect in the background, and say hello.

        Raises ConnectionLostError if there can be no connection, as without a free descriptor.
        """
        self._clock = clock
        self._num_read_bytes = 0
        self._read_at = clock.now()
        self._silent_s = 0.0
        self._was_connected = False
        self._problem = ""
        """Why there will be no further messages; empty while the connection stands."""
        try:
            self._socket = socket = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise ConnectionLostError(f"there is no socket: {error.strerror}") from error
        socket.linger = 0
        socket.ipv6 = endpoint.is_ipv6
        socket.reconnect_ivl = -1
        socket.connect_timeout = CONNECT_TIMEOUT_MS
        socket.maxmsgsize = MAX_REPORT_BYTES
        socket.heartbeat_ivl = int(HEARTBEAT_S * 1000)
        socket.heartbeat_timeout = SOCKET_SILENCE_MS
        socket.sndhwm = 0  # bounded by the credit
        if key is not None:
            secure_frontend(socket, key)
        monitor: zmq.asyncio.Socket | None = None
        try:
            self._monitor = monitor = socket.get_monitor_socket(_EVENTS)
            socket.connect(endpoint.address)
        except zmq.ZMQError as error:
            if monitor is not None:
                monitor.close(linger=0)
            socket.close(linger=0)
            raise ConnectionLostError(f"it cannot be connected to: {error.strerror}") from error
        self._poller = zmq.asyncio.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._dialect = dialect
        self._heartbeats = asyncio.create_task(self._send_heartbeats())

    async def send(self, frame: bytes) -> None:
        """Send a message; a lost connection is noticed when receiving."""
        try:
            await self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            logger.debug("a message was not sent: the connection is lost")

    async def receive(self) -> T:
        """Return the next message; raise ConnectionLostError once there will be none."""
        while True:
            # What came before a loss is there already: nothing is waited for any more.
            timeout_ms = 0 if self._problem else int(HEARTBEAT_S * 1000)
            ready = dict(await self._poller.poll(timeout_ms))
            frame = await self._take_frame() if self._socket in ready else None
            if frame is not None:
                return self._read(frame)
            if self._monitor in ready:
                await self._read_monitor()
            elif self._problem:
                raise ConnectionLostError(self._problem)
            self._note_silence()

    async def _take_frame(self) -> bytes | None:
        """Return a frame; None if there is none, although the socket was readable.

        The frame of a peer that is gone may vanish in between.
        """
        try:
            return await self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _read(self, frame: bytes) -> T:
        self._num_read_bytes += len(frame)
        self._silent_s, self._read_at = 0.0, self._clock.now()
        try:
            message = self._dialect.decode(frame)
        except WireError as error:
            peer = self._dialect.peer
            raise ConnectionLostError(f"a message of the {peer} cannot be read: {error}") from error
        if isinstance(message, Closed):
            peer = self._dialect.peer
            raise SessionClosedError(f"the {peer} ended the session: {message.message[:500]}")
        return message

    async def _read_monitor(self) -> None:
        """Note that the connection is lost; messages that came before are still to be read."""
        event = await recv_monitor_message(self._monitor, zmq.NOBLOCK)
        if event["event"] == zmq.EVENT_CONNECTED:
            self._was_connected = True
        elif not self._was_connected:
            self._problem = "nobody listens there"
        elif self._num_read_bytes:
            self._problem = "the connection is lost"
        else:
            self._problem = (
                "the connection ended in the handshake; both sides need the same "
                "--cluster-key-file, or none"
            )

    def _note_silence(self) -> None:
        now = self._clock.now()
        self._silent_s += min(now - self._read_at, MAX_TICK_S)
        self._read_at = now
        if self._silent_s > MAX_SILENCE_S:
            peer = self._dialect.peer
            raise ConnectionLostError(f"the {peer} is silent for {self._silent_s:.0f} s")

    async def _send_heartbeats(self) -> None:
        await self.send(self._dialect.hello)
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self.send(self._dialect.make_heartbeat(self._num_read_bytes))

    async def close(self) -> None:
        self._heartbeats.cancel()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
