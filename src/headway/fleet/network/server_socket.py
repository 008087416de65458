"""The socket on which an engine, a router or a manager waits for other processes.

Many connections, each known by the routing id that this socket gives it, so that no peer can take
the place of another.
"""

from __future__ import annotations

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from headway.errors import ConfigError
from headway.fleet.network.cluster_key import ZAP_DOMAIN, ClusterKey, FrontendKeys, secure_engine
from headway.fleet.network.endpoints import Endpoint
from headway.fleet.network.wire import HEARTBEAT_S, MAX_COMMAND_BYTES, SOCKET_SILENCE_MS

HANDSHAKE_MS = 5000
MAX_QUEUED_MESSAGES = 16_384
"""Messages to one frontend that wait for its connection."""
MAX_UNREAD_MESSAGES = 64
"""Messages of one frontend that wait for this process; the rest waits in the connection."""


class ServerSocket:
    """A bound ROUTER socket, encrypted if there is a key."""

    def __init__(
        self,
        endpoint: Endpoint,
        key: ClusterKey | None,
        setting: str = "--listen",
        max_bytes: int = MAX_COMMAND_BYTES,
    ) -> None:
        """Bind; raise ConfigError, which names the setting, if that is not possible or not safe.

        A connection with a frame of more than `max_bytes` ends.
        """
        endpoint.check_key(key is not None, setting)
        self._setting = setting
        self._max_bytes = max_bytes
        self._context = zmq.asyncio.Context()
        # First: an authenticator without a context ends with a traceback.
        self._socket = self._bind(endpoint, key)
        self._authenticator: AsyncioAuthenticator | None = None
        if key is not None:
            self._authenticator = AsyncioAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(ZAP_DOMAIN.decode(), FrontendKeys(key))

    def _bind(self, endpoint: Endpoint, key: ClusterKey | None) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.ROUTER)
        socket.router_mandatory = True  # a frontend that is gone must not look like a slow one
        socket.linger = 0
        socket.ipv6 = endpoint.is_ipv6
        socket.maxmsgsize = self._max_bytes
        socket.handshake_ivl = HANDSHAKE_MS
        socket.heartbeat_ivl = int(HEARTBEAT_S * 1000)
        socket.heartbeat_timeout = SOCKET_SILENCE_MS
        socket.sndhwm = MAX_QUEUED_MESSAGES  # an engine bounds bytes by MAX_UNREAD_BYTES
        socket.rcvhwm = MAX_UNREAD_MESSAGES
        if key is not None:
            secure_engine(socket, key)
        try:
            socket.bind(endpoint.address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"cannot listen on {endpoint.address} ({self._setting}): {error.strerror}"
            ) from error
        return socket

    @property
    def address(self) -> str:
        """The address with the port that was bound."""
        endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        return endpoint.decode().rstrip("\0") if isinstance(endpoint, bytes) else str(endpoint)

    async def receive(self) -> list[bytes]:
        """Return the frames of a message, after the routing id of its connection."""
        return await self._socket.recv_multipart()

    async def send(self, identity: bytes, frame: bytes) -> bool:
        """Send a frame over a connection; return whether the connection is there."""
        try:
            await self._socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=500)
