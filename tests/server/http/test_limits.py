"""Bodies and headers are bounded while they are read."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.errors import ConfigError
from headway.server.http.limits import MAX_HEADER_BYTES, Timeouts, bounded_protocol, check_uvicorn

JSON = {"content-type": "application/json"}


def body_of(num_bytes: int) -> bytes:
    empty = json.dumps({"prompt": "x", "user": ""})
    return json.dumps({"prompt": "x", "user": "u" * (num_bytes - len(empty))}).encode()


async def test_a_body_at_the_limit_is_read_and_one_beyond_it_is_not(local) -> None:
    made = await local(max_body_bytes=1000)
    response = await made.client.post("/v1/completions", content=body_of(1000), headers=JSON)
    assert response.status_code == 200
    response = await made.client.post("/v1/completions", content=body_of(1001), headers=JSON)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"
    assert response.headers["connection"] == "close"


async def test_a_body_of_unknown_length_is_cut_off_at_the_limit(local) -> None:
    made = await local(max_body_bytes=1000)
    num_read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal num_read
        for _ in range(100):
            num_read += 100
            yield b" " * 100

    response = await made.client.post("/v1/completions", content=chunks(), headers=JSON)
    assert response.status_code == 413
    assert num_read <= 1200


def exchange(server, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        try:
            connection.sendall(request)
        except (BrokenPipeError, ConnectionResetError):
            return b""
        answer = b""
        try:
            while data := connection.recv(65536):
                answer += data
        except ConnectionResetError:
            pass
        return answer


@pytest.mark.parametrize(
    "headers",
    [
        b"X-Big: " + b"x" * (1024 * 1024),
        b"X-Big: " + b"x" * (1024 * 1024) + b"\r\n\r\n",
        b"\r\n".join(b"X-%d: %s" % (i, b"x" * 1000) for i in range(100)) + b"\r\n\r\n",
    ],
)
def test_large_headers_are_cut_off(fake_server, headers) -> None:
    answer = exchange(fake_server, b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n" + headers)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


def test_ordinary_headers_pass(fake_server) -> None:
    padding = b"X-Pad: " + b"x" * (MAX_HEADER_BYTES - 1000)
    request = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + padding
    assert exchange(fake_server, request + b"\r\n\r\n").startswith(b"HTTP/1.1 200")


def test_the_server_says_nothing_of_itself(fake_server) -> None:
    request = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert b"\r\nserver:" not in exchange(fake_server, request).lower()


def test_a_large_body_over_a_socket(fake_server) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 500000\r\n\r\n"
    )
    answer = exchange(fake_server, head + b"x" * 1000)
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_that_does_not_say_it_is_json_is_refused(local, kind: str) -> None:
    made = await local("ab")
    response = await made.client.post(
        "/v1/completions", content=body_of(100), headers={"content-type": kind}
    )
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


def test_a_request_before_the_answer_to_the_last_one_ends_the_connection(fake_server) -> None:
    body = b'{"prompt": "x", "max_tokens": 1900, "stream": true}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
    )
    answer = exchange(fake_server, head + body + b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"[DONE]" not in answer
    fake_server.wait_for("vllm:num_requests_running", 0)
    fake_server.wait_for("vllm:num_requests_waiting", 0)


BEGUN = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 9\r\n\r\n"
)


def test_half_a_request_is_not_waited_for(launch) -> None:
    timeouts = {"header_s": 0.6, "body_piece_s": 1.2}
    server = launch(server={"timeouts": timeouts}).wait_ready()
    for part, timeout_s in ((b"", 0.6), (b"GET /health", 0.6), (BEGUN, 1.2)):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
            connection.sendall(part)
            began_at = time.monotonic()
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(100) == b""
            assert timeout_s - 0.3 < time.monotonic() - began_at < timeout_s + 4


def test_a_body_that_never_ends_is_not_waited_for(launch) -> None:
    """Each piece of it comes in time."""
    timeouts = {"body_piece_s": 5.0, "body_s": 1.0}
    server = launch(server={"timeouts": timeouts}).wait_ready()
    head = BEGUN.replace(b"Content-Length: 9", b"Content-Length: 99000")
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head)
        began_at = time.monotonic()
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(90):
                connection.sendall(b" " * 1000)
                time.sleep(0.05)
        assert time.monotonic() - began_at < 4


def test_the_default_timeouts_are_those_documented() -> None:
    assert Timeouts() == Timeouts(header_s=10, body_piece_s=10, body_s=60, keep_alive_s=75)


def test_idle_connections_outlive_the_pools_of_common_clients() -> None:
    """A client that reuses a connection at the moment the server closes it gets an error."""
    pool = inspect.signature(httpx.Limits).parameters["keepalive_expiry"].default
    assert Timeouts().keep_alive_s > max(pool, 60)


def test_the_installed_uvicorn_has_what_the_bounds_rely_on() -> None:
    check_uvicorn()


@pytest.mark.parametrize("missing", ["on_header", "data_received", "timeout_keep_alive_handler"])
def test_a_uvicorn_without_a_method_is_refused(missing: str) -> None:
    kept = {name: value for name, value in vars(HttpToolsProtocol).items() if name != missing}
    kept = {name: value for name, value in kept.items() if name not in ("__dict__", "__weakref__")}
    with pytest.raises(ConfigError, match=rf"uvicorn [\d.]+ lacks {missing}, "):
        check_uvicorn(type("Changed", (asyncio.Protocol,), kept))


def test_a_uvicorn_without_an_attribute_is_refused() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.is_response_complete = False

    class Changed(HttpToolsProtocol):
        def __init__(self) -> None:
            self.keep_alive_timer = None

    with pytest.raises(ConfigError, match="lacks response_complete, "):
        check_uvicorn(cycle=Cycle)
    vars_of = dict(vars(HttpToolsProtocol)) | {"__init__": Changed.__init__}
    vars_of = {n: v for n, v in vars_of.items() if n not in ("__dict__", "__weakref__")}
    with pytest.raises(ConfigError, match="timeout_keep_alive_task"):
        check_uvicorn(type("Changed", (asyncio.Protocol,), vars_of))


def test_a_whole_answer_that_is_not_read_is_not_kept(launch) -> None:
    """It is larger than the buffers on its way, and the setting says how long it may lie there."""
    server = launch(server={"slow_reader_timeout_s": 0.4}, step_s=0.0).wait_ready()
    body = json.dumps({"prompt": "x", "max_tokens": 1500, "n": 2, "logprobs": 20}).encode()
    head = BEGUN.replace(b"Content-Length: 9", b"Content-Length: %d" % len(body))
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head + body)
        server.wait_for("vllm:request_success_total", 2, timeout_s=30)
        time.sleep(1.5)
        with pytest.raises(ConnectionResetError):
            while connection.recv(65536):
                pass


def test_a_client_that_is_gone_already_can_be_dropped() -> None:
    protocol = bounded_protocol(1.0).__new__(bounded_protocol(1.0))
    gone = SimpleNamespace(setsockopt=Mock(side_effect=ValueError("negative file descriptor")))
    protocol.transport = Mock(get_extra_info=lambda _name: gone)
    protocol._drop()
    protocol.transport.abort.assert_called_once()


def test_what_comes_behind_a_body_is_no_header(fake_server) -> None:
    head = BEGUN.replace(b"Content-Length: 9", b"Connection: close\r\nTransfer-Encoding: chunked")
    body = b'1e\r\n{"prompt": "x","max_tokens":1}\r\n0\r\n'
    assert exchange(fake_server, head + body + b"\r\n").startswith(b"HTTP/1.1 200 ")
    answer = exchange(fake_server, head + body + b"X-Later: 1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    # Nor is one without end read to its end.
    assert not exchange(fake_server, head + body + b"X-Later: " + b"x" * 2**20)


def test_a_connection_that_asks_for_nothing_more_is_closed(launch) -> None:
    """Also if its body, or an empty line, came after the answer."""
    settings = {"api_key": ["the-key"], "timeouts": {"keep_alive_s": 0.5}}
    server = launch(server=settings).wait_ready("the-key")
    lone = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as stack:
        connections = []
        for request, status, later in ((BEGUN, b"401", b"{       }"), (lone, b"200", b"\r\n")):
            address = ("127.0.0.1", server.port)
            connection = stack.enter_context(socket.create_connection(address, timeout=15))
            connection.sendall(request)
            assert connection.recv(65536).split()[1] == status
            connection.sendall(later)
            connections.append(connection)
        for connection in connections:
            while connection.recv(65536):  # the rest of the answer; a timeout fails the test
                pass
