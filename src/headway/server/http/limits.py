"""Bounds on connections, headers, bodies and slow readers.

Headers and body are bounded while they arrive. The bounds override methods of uvicorn's protocol;
`check_uvicorn` checks that the installed version has those methods.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headway.errors import ConfigError
from headway.server.http.errors import RETRY_AFTER_S, ApiError, ErrorResponse

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 100
BODY_PIECE_BYTES = 16 * 1024
"""Bytes of a body that must arrive within the timeout, unless the body ends before."""
_DROP_EXTENSION = "headway.cut_off"
_TOO_MANY = (
    "HTTP/1.1 503 Service Unavailable\r\n"
    f"retry-after: {RETRY_AFTER_S}\r\n"
    "content-length: 0\r\n"
    "connection: close\r\n\r\n"
).encode()
_METHODS = (
    "connection_made",
    "connection_lost",
    "data_received",
    "on_message_begin",
    "on_header",
    "on_headers_complete",
    "on_body",
    "on_message_complete",
    "on_response_complete",
    "send_400_response",
    "timeout_keep_alive_handler",
)
_ATTRIBUTES = (
    "connections",
    "cycle",
    "headers",
    "loop",
    "parser",
    "scope",
    "timeout_keep_alive",
    "timeout_keep_alive_task",
    "transport",
)
_CYCLE_ATTRIBUTES = ("response_complete",)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a client may take, in seconds."""

    header_s: float = 10.0
    body_piece_s: float = 10.0
    body_s: float = 60.0
    """For a whole body; its request has a position in the queue."""
    keep_alive_s: float = 75.0
    """Between the end of an answer and the next request.

    Longer than common clients and load balancers keep idle connections (httpx 5 s, aiohttp 15 s,
    AWS and nginx 60 s): otherwise a request may meet a connection that closes at that moment.
    """


def check_uvicorn(protocol: type = HttpToolsProtocol, cycle: type = RequestResponseCycle) -> None:
    """Raise ConfigError if this uvicorn lacks what the bounds below rely on.

    Without a method or an attribute a bound would silently be off.
    """
    missing = [name for name in _METHODS if name not in vars(protocol)]
    for owner, names in ((protocol, _ATTRIBUTES), (cycle, _CYCLE_ATTRIBUTES)):
        known = owner.__init__.__code__.co_names
        missing += [name for name in names if name not in known]
    if missing:
        raise ConfigError(
            f"uvicorn {uvicorn.__version__} lacks {', '.join(missing)}, on which the limits of "
            "connections rely; install a supported version (pip install headway does)"
        )


class BodyLimit:
    """ASGI middleware that answers 413 to a body above the limit.

    The declared length is checked at the first read, the true length during the reads. `by_path`
    has the limits of paths whose bodies are not held in memory.
    """

    def __init__(
        self, app: ASGIApp, max_body_bytes: int, by_path: Mapping[str, int] | None = None
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._by_path = by_path or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes = 0
        limit = self._by_path.get(scope["path"], self._max_body_bytes)
        declared = _declared_length(scope)

        async def bounded_receive() -> Message:
            nonlocal num_bytes
            if declared > limit:
                raise self._too_large(limit)
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > limit:
                raise self._too_large(limit)
            return message

        await self._app(scope, bounded_receive, send)

    def _too_large(self, limit: int) -> ApiError:
        setting = "max_body_bytes" if limit == self._max_body_bytes else "batch_file_bytes"
        message = f"the request body is larger than {limit} bytes ({setting}); send a smaller body"
        # The rest of the body is not read, so the connection cannot be used again.
        headers = {"Connection": "close"}
        return ApiError(
            ErrorResponse(413, message, "invalid_request_error", "body_too_large", headers=headers)
        )


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() and len(value) < 16 else 0
    return 0


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with bounds.

    The base class waits for the rest of a request without limit, and collects a header of any size.
    """

    timeouts = Timeouts()
    slow_reader_timeout_s = 30.0
    max_connections: int | None = None
    idle: ClassVar[dict[BoundedHttpProtocol, None]] = {}
    """Connections between two requests, longest idle first."""
    _num_loose_bytes = 0
    """Bytes of a request since its last body piece: headers, chunk lengths and line ends."""
    _num_body_bytes = 0
    _num_taken = 0
    """Body bytes in the data that was received last."""
    _body_until = 0.0
    _is_in_request = False
    _is_in_headers = False
    _deadline: asyncio.TimerHandle | None = None
    _reader_watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore
        super().connection_made(transport)
        if self.max_connections is not None and len(self.connections) > self.max_connections:
            if not self.idle:
                # The request is not read: an engine may need the descriptor of this connection.
                transport.write(_TOO_MANY)
                transport.close()
                return
            longest_idle = next(iter(self.idle))
            del self.idle[longest_idle]
            longest_idle.transport.close()
        self._set_deadline(self.timeouts.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle.pop(self, None)
        self._set_deadline(None)
        if self._reader_watch is not None:
            self._reader_watch.cancel()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # Pipelining: hardly any client uses it, and a disconnect could then no longer be
            # detected.
            self._drop()
            raise ValueError("a request arrived before the answer to the last one")
        self.idle.pop(self, None)
        super().on_message_begin()
        self.scope["extensions"] = {
            _DROP_EXTENSION: {"drop": self._drop, "extend": self._extend_body}
        }
        self._is_in_request = self._is_in_headers = True
        self._num_loose_bytes = 0
        if self._reader_watch is not None and not self.transport.get_write_buffer_size():
            self._reader_watch.cancel()  # the client has read the last answer
        self._set_deadline(self.timeouts.header_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_headers:
            # A trailer would count as a header, after the headers were bounded and checked.
            raise ValueError("trailers after the body are not supported")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        num_bytes = len(self.url) + sum([len(name) + len(value) for name, value in self.headers])
        # The base class answers 400 to an exception here.
        if num_bytes > MAX_HEADER_BYTES or len(self.headers) > MAX_HEADERS:
            raise ValueError("the headers are too large")
        if self.parser is None or self.parser.get_http_version() not in ("1.0", "1.1"):
            raise ValueError("this is not HTTP/1")
        self._num_body_bytes = 0
        self._body_until = self.loop.time() + self.timeouts.body_s
        self._set_deadline(self.timeouts.body_piece_s)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_loose_bytes = 0
        self._num_taken += len(body)
        self._num_body_bytes += len(body)
        if self._num_body_bytes >= BODY_PIECE_BYTES:
            self._num_body_bytes = 0
            left_s = max(0.0, self._body_until - self.loop.time())
            self._set_deadline(min(self.timeouts.body_piece_s, left_s))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_request = False
        self._set_deadline(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self.idle[self] = None
        self._watch_reader(self.transport.get_write_buffer_size())

    def _extend_body(self, within_s: float) -> None:
        """Give the rest of the body more time; each piece has to come in time nevertheless."""
        self._body_until = self.loop.time() + within_s

    def _watch_reader(self, num_before: int) -> None:
        """Drop the connection later unless the client reads the rest of an answer."""
        if self._reader_watch is not None:
            self._reader_watch.cancel()
        if num_before:
            timeout_s, check = self.slow_reader_timeout_s, self._check_reader
            self._reader_watch = self.loop.call_later(timeout_s, check, num_before)

    def _check_reader(self, num_before: int) -> None:
        num_left = self.transport.get_write_buffer_size()
        if num_left >= num_before:
            self._drop()
        else:
            self._watch_reader(num_left)

    def data_received(self, data: bytes) -> None:
        self._num_taken = 0
        super().data_received(data)
        if self._is_in_request:
            self._num_loose_bytes += len(data) - self._num_taken
            if self._num_loose_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                if self._is_in_headers:
                    self.send_400_response("The request headers are too large.")
                else:
                    self._drop()
        if self._deadline is None and self.cycle is not None and self.cycle.response_complete:
            # No request has begun, but these bytes (an empty line, or the rest of a body that was
            # answered before it was read) have stopped the timer of the idle connection.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _drop(self) -> None:
        connection = self.transport.get_extra_info("socket")
        if connection is not None:
            # Otherwise the kernel would hold the buffered output and try to deliver it. The
            # client may have left at this moment: then the descriptor is already closed.
            linger = struct.pack("ii", 1, 0)
            with contextlib.suppress(OSError, ValueError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.transport.abort()

    def _set_deadline(self, within_s: float | None) -> None:
        """Drop the connection unless the next part of a request is complete in time."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None
        if within_s is not None:
            self._deadline = self.loop.call_later(within_s, self._drop)


def bounded_protocol(
    slow_reader_timeout_s: float,
    timeouts: Timeouts | None = None,
    max_connections: int | None = None,
) -> type[BoundedHttpProtocol]:
    """Return a protocol class with these bounds; uvicorn creates its objects from a class."""
    settings = {
        "slow_reader_timeout_s": slow_reader_timeout_s,
        "timeouts": timeouts or Timeouts(),
        "max_connections": max_connections,
        "idle": {},
    }
    return type("BoundedHttpProtocol", (BoundedHttpProtocol,), settings)


def drop_connection(scope: Scope) -> None:
    """Drop a connection and its buffered output, without waiting for the client."""
    extension = scope.get("extensions", {}).get(_DROP_EXTENSION)
    if extension is not None:
        extension["drop"]()


def extend_body_time(scope: Scope, within_s: float) -> None:
    """Give a body that is not held in memory more time to arrive."""
    extension = scope.get("extensions", {}).get(_DROP_EXTENSION)
    if extension is not None:
        extension["extend"](within_s)
