"""The connection of a frontend: when its loss is noticed."""

from __future__ import annotations

import time

import pytest
import zmq
import zmq.asyncio

from headway.clock import SystemClock
from headway.fleet.frontends.link import engine_dialect
from headway.fleet.network.connection import ConnectionLostError, PeerConnection
from headway.fleet.network.endpoints import Endpoint
from headway.fleet.network.wire import HEARTBEAT_S


async def test_a_connection_that_ends_is_lost_before_the_next_heartbeat() -> None:
    context = zmq.asyncio.Context()
    server = context.socket(zmq.ROUTER)
    server.linger = 0
    port = server.bind_to_random_port("tcp://127.0.0.1")
    endpoint = Endpoint("127.0.0.1", port)
    connection = PeerConnection(context, endpoint, None, engine_dialect("test"), SystemClock())
    try:
        await server.recv_multipart()  # it says hello
        ended_at = time.monotonic()
        server.close()
        with pytest.raises(ConnectionLostError):
            await connection.receive()
        assert time.monotonic() - ended_at < HEARTBEAT_S / 2
    finally:
        await connection.close()
        context.destroy(linger=0)
