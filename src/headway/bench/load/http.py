"""A small HTTP/1.1 client for streamed responses.

The client often shares a machine with the server that it measures, and a general HTTP client takes
several times the CPU time for streams of small pieces. This client reads all available bytes at
once, so a response costs one wake-up per piece, not one per line. Redirects, proxies, compression
and cookies are not supported.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from headway.errors import ConfigError

_READ_BYTES = 256 * 1024
_MAX_HEAD_BYTES = 64 * 1024


class HttpFailure(Exception):
    """No complete response came; the message is short, to count failures by."""


class _StaleConnection(HttpFailure):
    """The server had closed a reused connection."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port of a server, and the path before /v1."""

    host: str
    port: int
    is_tls: bool = False
    path: str = ""

    @property
    def url(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.host}:{self.port}{self.path}"


def parse_url(url: str) -> Origin:
    """Return the origin of a base URL, with or without /v1."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not a URL; accepted: http://HOST:PORT or https://HOST")
    is_tls = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Origin(parts.hostname, port or (443 if is_tls else 80), is_tls, path)


class ChunkedBody:
    """Decodes chunked transfer encoding from pieces of any size."""

    def __init__(self) -> None:
        self.is_done = False
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        data = self._rest + data if self._rest else data
        found: list[bytes] = []
        start = 0
        while (line_end := data.find(b"\r\n", start)) >= 0:
            size = _chunk_size(data[start:line_end])
            body_start = line_end + 2
            if size == 0:
                # Trailers, if any, end with an empty line.
                self.is_done = data.startswith(b"\r\n", body_start) or (
                    data.find(b"\r\n\r\n", body_start) >= 0
                )
                break
            if len(data) < body_start + size + 2:
                break
            found.append(data[body_start : body_start + size])
            start = body_start + size + 2
        self._rest = data[start:]
        return b"".join(found)


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.split(b";", 1)[0], 16)
    except ValueError as error:
        raise HttpFailure("malformed chunk") from error


class SizedBody:
    """A body of known length, or until the connection closes."""

    def __init__(self, num_bytes: int | None) -> None:
        self._num_left = num_bytes
        self.is_done = num_bytes == 0

    @property
    def ends_with_connection(self) -> bool:
        return self._num_left is None

    def feed(self, data: bytes) -> bytes:
        if self._num_left is not None:
            data = data[: self._num_left]
            self._num_left -= len(data)
            self.is_done = self._num_left == 0
        return data


@dataclass(slots=True)
class Connection:
    """One connection and the response being read from it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    is_reused: bool = False
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    _body: ChunkedBody | SizedBody = field(default_factory=lambda: SizedBody(0))
    _rest: bytes = b""

    async def send(self, request: bytes) -> None:
        """Send a request and read the head of the response."""
        try:
            self.writer.write(request)
            data = await self._read_head()
        except ConnectionError as error:
            raise self._lost() from error
        head, _, self._rest = data.partition(b"\r\n\r\n")
        self.status, self.headers = parse_head(head)
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            self._body = ChunkedBody()
        else:
            self._body = SizedBody(self._declared_length())

    async def read(self) -> bytes:
        """Return the next piece of the body; empty at its end."""
        while not self._body.is_done:
            data, self._rest = self._rest, b""
            if not data:
                data = await self._receive()
                if not data:
                    if isinstance(self._body, SizedBody) and self._body.ends_with_connection:
                        break
                    raise HttpFailure("connection closed in the middle of an answer")
            if piece := self._body.feed(data):
                return piece
        return b""

    async def read_all(self) -> bytes:
        pieces: list[bytes] = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    @property
    def can_be_kept(self) -> bool:
        return self._body.is_done and self.headers.get("connection", "").lower() != "close"

    def close(self) -> None:
        self.writer.transport.abort()

    async def _read_head(self) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            more = await self.reader.read(_READ_BYTES)
            if not more:
                raise self._lost() if not data else HttpFailure("connection closed in the head")
            data += more
            if len(data) > _MAX_HEAD_BYTES and b"\r\n\r\n" not in data:
                raise HttpFailure("the head of the answer is too large")
        return data

    async def _receive(self) -> bytes:
        try:
            return await self.reader.read(_READ_BYTES)
        except ConnectionError as error:
            raise HttpFailure("connection reset in the middle of an answer") from error

    def _lost(self) -> HttpFailure:
        if self.is_reused:
            return _StaleConnection("connection closed before the answer")
        return HttpFailure("connection closed before the answer")

    def _declared_length(self) -> int | None:
        length = self.headers.get("content-length", "")
        return int(length) if length.isdigit() else None


def parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    """Return the status and the headers by lower-case name."""
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
        raise HttpFailure("not an HTTP/1.1 answer")
    pairs = (line.partition(":") for line in lines)
    return int(words[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}


class HttpClient:
    """Pool of idle connections; opens a connection when none is idle."""

    def __init__(self, origin: Origin, connect_timeout_s: float = 10.0) -> None:
        self.origin = origin
        self._connect_timeout_s = connect_timeout_s
        self._tls = ssl.create_default_context() if origin.is_tls else None
        self._free: list[Connection] = []

    async def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
    ) -> Connection:
        """Send a request; the caller reads the response and returns the connection.

        If the server had closed the reused connection, the request got no response and is sent once
        more on a new connection.
        """
        request = self._encode(method, path, headers, body)
        if self._free:
            try:
                return await self._send_on(self._free.pop(), request)
            except _StaleConnection:
                pass
        return await self._send_on(await self.connect(), request)

    async def fetch(self, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """GET a whole response; return its status and body."""
        connection = await self.send("GET", path, headers)
        try:
            body = await connection.read_all()
        except BaseException:
            connection.close()
            raise
        self.put_back(connection)
        return connection.status, body

    def put_back(self, connection: Connection) -> None:
        if connection.can_be_kept:
            connection.is_reused = True
            self._free.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        while self._free:
            self._free.pop().close()

    async def _send_on(self, connection: Connection, request: bytes) -> Connection:
        try:
            await connection.send(request)
        except BaseException:
            connection.close()
            raise
        return connection

    async def connect(self) -> Connection:
        """Open a new connection."""
        origin = self.origin
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                pair = await asyncio.open_connection(
                    origin.host, origin.port, ssl=self._tls, limit=_READ_BYTES
                )
        except TimeoutError as error:
            raise HttpFailure("timeout while connecting") from error
        except ConnectionRefusedError as error:
            raise HttpFailure("connection refused") from error
        except OSError as error:
            raise HttpFailure(f"cannot connect: {error.strerror or error}") from error
        return Connection(*pair)

    def _encode(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        host = f"[{self.origin.host}]" if ":" in self.origin.host else self.origin.host
        lines = [
            f"{method} {self.origin.path}{path} HTTP/1.1",
            f"Host: {host}:{self.origin.port}",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body
