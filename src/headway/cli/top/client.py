"""Asks a server for the stream of its dashboard, and for its slowest requests."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from headway.cli.remote import (
    ADMIN,
    OTHER_SERVER,
    cannot_ask,
    check_url,
    error_message,
    key_headers,
)
from headway.cli.top.messages import SlowRequests, StreamFrame
from headway.cli.top.text import clean
from headway.errors import ConfigError, HeadwayError

API = "/dashboard/api"
TIMEOUT_S = 10.0
"""Longest silence of the server; a frame comes twice a second."""
MAX_FRAME_BYTES = 16 << 20
FINAL = (401, 403, 404)
"""Answers that are the same however often one asks."""

T = TypeVar("T")
_frame = msgspec.json.Decoder(StreamFrame)
_requests = msgspec.json.Decoder(SlowRequests)


class TopError(HeadwayError):
    """The server cannot be asked, or refuses."""

    def __init__(self, message: str, is_final: bool = False, is_answer: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final
        """Whether asking again is of no use."""
        self.is_answer = is_answer
        """Whether the server has answered: it loads, or has too many viewers."""


class DashboardClient:
    """The admin listener of a server, and the key for it."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = check_url(url)
        self._headers = key_headers(api_key)
        parts = urlsplit(self.url)
        try:
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError as error:
            raise ConfigError(f"--url has no valid port: {url!r}") from error
        if not self._host:
            raise ConfigError(f"--url names no host: {url!r}")
        self._is_secure, self._path = parts.scheme == "https", parts.path

    @property
    def address(self) -> str:
        return self.url.partition("://")[2]

    def frames(self) -> Iterator[StreamFrame]:
        """Yield the frames of one connection, until the server ends it."""
        with self._get("/stream") as answer:
            while data := answer.readline(MAX_FRAME_BYTES):
                if data.startswith(b"data: "):
                    yield self._decode(_frame, data[6:])

    def requests(self) -> SlowRequests:
        """Return the oldest live requests."""
        with self._get("/requests") as answer:
            return self._decode(_requests, answer.read(MAX_FRAME_BYTES))

    def _decode(self, decoder: msgspec.json.Decoder[T], data: bytes) -> T:
        try:
            return decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise TopError(f"{self.url} {OTHER_SERVER}", is_final=True) from error

    @contextmanager
    def _get(self, path: str) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", self._path + API + path, headers=self._headers)
            # The answer has the socket if the server closes the connection after it.
            with connection.getresponse() as answer:
                if answer.status != http.HTTPStatus.OK:
                    raise self._refusal(answer)
                yield answer
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = clean(str(error) or repr(error))
            raise TopError(cannot_ask(self.url, reason, ADMIN)) from error
        finally:
            connection.close()

    def _refusal(self, answer: http.client.HTTPResponse) -> TopError:
        text = f"{self.url}: {clean(str(error_message(answer)))}"
        if answer.status == http.HTTPStatus.NOT_FOUND:
            text += "; is it the admin listener of a server with a dashboard?"
        return TopError(text, answer.status in FINAL, is_answer=True)
