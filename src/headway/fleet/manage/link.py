"""The link of a host or a frontend to the manager of its fleet."""

from __future__ import annotations

import zmq
import zmq.asyncio

from headway.fleet.manage.messages import (
    MAX_FRAME_BYTES,
    Answer,
    Report,
    decode_answer,
    encode,
)
from headway.fleet.network.cluster_key import ClusterKey, secure_frontend
from headway.fleet.network.endpoints import Endpoint
from headway.fleet.network.wire import HEARTBEAT_S, SOCKET_SILENCE_MS

ANSWER_TIMEOUT_S = 2.0


class ManagerAwayError(OSError):
    """The manager does not answer."""


class ManagerLink:
    """Sends reports to the manager, and returns its answers.

    A report that is not answered in time is not repeated: the next one says all that it said.
    """

    def __init__(self, endpoint: Endpoint, key: ClusterKey | None) -> None:
        endpoint.check_key(key is not None, "the manager's address")
        self._endpoint = endpoint
        self._key = key
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None

    async def ask(self, report: Report, timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
        """Return the answer to a report.

        Raises ManagerAwayError if there is none, and WireError if it cannot be read.
        """
        socket = self._connect()
        try:
            await socket.send(encode(report), zmq.NOBLOCK)
            if await socket.poll(int(timeout_s * 1000)):
                return decode_answer(await socket.recv(zmq.NOBLOCK))
        except zmq.ZMQError as error:
            self._disconnect()
            raise ManagerAwayError(f"the manager is out of reach: {error.strerror}") from error
        except BaseException:
            self._disconnect()  # a later answer would be taken for that of a later report
            raise
        self._disconnect()
        raise ManagerAwayError(f"the manager at {self._endpoint.address} does not answer")

    def _connect(self) -> zmq.asyncio.Socket:
        if self._socket is None:
            self._socket = socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            socket.ipv6 = self._endpoint.is_ipv6
            socket.maxmsgsize = MAX_FRAME_BYTES
            socket.heartbeat_ivl = int(HEARTBEAT_S * 1000)
            socket.heartbeat_timeout = SOCKET_SILENCE_MS
            if self._key is not None:
                secure_frontend(socket, self._key)
            socket.connect(self._endpoint.address)
        return self._socket

    def _disconnect(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close(linger=0)

    def close(self) -> None:
        self._disconnect()
        self._context.destroy(linger=0)
