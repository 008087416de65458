"""Connections never take the descriptors that an engine needs to be replaced."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import time
from typing import Any

import httpx
import pytest

from benchmarks.support.servers import RunningServer
from headway.errors import ConfigError
from headway.server.descriptors import RESERVE, plan_connections

LOW_LIMIT = ("bash", "-c", 'ulimit -Sn 128; ulimit -Hn 256; exec "$@"', "bash")
NUM_IDLE = 400


@pytest.mark.parametrize("limit", [200, 256, 1024, 20_000, 2**20])
def test_what_may_be_open_at_once_stays_below_the_limit(limit: int) -> None:
    plan = plan_connections(limit, num_open=30)
    shares = (plan.public, plan.admin)
    most = sum(share.max_connections + 2 * share.backlog for share in shares)
    assert most + 30 + RESERVE <= limit
    assert all(share.max_connections > 0 and share.backlog > 0 for share in shares)
    assert plan.public.max_connections > (limit - 30 - RESERVE) // 2


def test_a_limit_that_leaves_nothing_is_an_error() -> None:
    with pytest.raises(ConfigError, match="may have 100 files open and needs 126; raise the hard"):
        plan_connections(100, num_open=30)


def engine_pids(server: RunningServer) -> list[int]:
    return [int(pid) for pid in re.findall(r"^engine (\d+)$", server.log, re.MULTILINE)]


def is_refused(connection: socket.socket) -> bool:
    """Whether there is an answer, or an end, without anything having been asked."""
    readable, _, _ = select.select([connection], [], [], 0)
    if not readable:
        return False
    try:
        answer = connection.recv(1000)
    except ConnectionResetError:
        return True
    assert answer == b"" or answer.startswith(b"HTTP/1.1 503 ")
    return True


def wait_until(server: RunningServer, condition: Any) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline and server.process.poll() is None, server.log[-3000:]
        time.sleep(0.05)


def test_an_engine_is_replaced_while_idle_connections_take_all_there_are(launch: Any) -> None:
    timeouts = {"header_s": 300.0}
    server = launch(server={"timeouts": timeouts}, under=LOW_LIMIT, step_s=0.03).wait_ready()
    assert "raised the limit of open files from 128 to 256" in server.log
    body = {"prompt": "x", "max_tokens": 1900, "stream": True, "ignore_eos": True}
    with contextlib.ExitStack() as stack:
        url = f"{server.url}/v1/completions"
        stream = stack.enter_context(httpx.stream("POST", url, json=body, timeout=100))
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            for _ in range(NUM_IDLE)
        ]
        refused: set[socket.socket] = set()

        def poll() -> int:
            refused.update(one for one in idle if one not in refused and is_refused(one))
            return len(refused)

        wait_until(server, lambda: poll() >= NUM_IDLE - 130)
        assert poll() < NUM_IDLE - 60, "hardly any connection was let in"
        # One more is answered at once, and probes come through on the other listener.
        with pytest.raises((httpx.TransportError, httpx.HTTPStatusError)):
            httpx.get(f"{server.url}/health/live", timeout=10).raise_for_status()
        assert httpx.get(f"{server.admin_url}/health/live", timeout=10).status_code == 200
        os.kill(engine_pids(server)[-1], signal.SIGKILL)
        wait_until(server, lambda: "the engine is back" in server.log)
        for _ in range(50):
            assert '"error"' not in next(lines)
    wait_until(server, lambda: _is_live(server.url))
    assert "trying again" not in server.log
    assert "open files" not in server.log.replace("raised the limit of open files", "")
    assert "Traceback" not in server.log
    assert len(engine_pids(server)) == 2
    assert server.stop() == 0, server.log


def test_a_new_connection_takes_the_place_of_the_longest_idle_one(launch: Any) -> None:
    server = launch(under=LOW_LIMIT).wait_ready()

    def ask(connection: socket.socket) -> None:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b'{"status":"live"}'):
            piece = connection.recv(65536)
            assert piece, answer
            answer += piece
        assert answer.startswith(b"HTTP/1.1 200 ")

    with contextlib.ExitStack() as stack:
        kept: list[socket.socket] = []
        for _ in range(NUM_IDLE):
            address = ("127.0.0.1", server.port)
            connection = stack.enter_context(socket.create_connection(address, timeout=20))
            ask(connection)
            kept.append(connection)
        wait_until(server, lambda: is_refused(kept[0]))
        ask(kept[-1])


def _is_live(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health/live", timeout=10).status_code == 200
    return False
