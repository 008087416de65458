"""Server-sent events: their encoding, and the cleanup after a stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headway.errors import ReaderReplacedError, SlowReaderError
from headway.server.http.disconnect import disconnected, unless_disconnected
from headway.server.http.encoding import to_json
from headway.server.http.errors import ErrorResponse, translate
from headway.server.http.limits import drop_connection

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
"""A comment, for proxies that close a connection on which nothing comes."""
KEEP_ALIVE_S = 15.0
RESUMED = b": resumed\n\n"
"""A comment: the client sees at once that the rest of its stream was found."""
_END = b"\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(payload: Any, event_id: str = "") -> bytes:
    """Return one event; encoded JSON has no line breaks, so it fits one data line."""
    begin = b"id: %b\ndata: " % event_id.encode() if event_id else b"data: "
    return begin + to_json(payload) + b"\n\n"


def typed_event(payload: Mapping[str, Any]) -> bytes:
    """Return one event that is named by its type."""
    return b"event: %b\n" % payload["type"].encode() + event(payload)


def split(events: bytes) -> list[bytes]:
    """Return the single events of a piece of a stream."""
    return [part + _END for part in events.split(_END)[:-1]]


def data_of(event: bytes) -> bytes:
    """Return the data of an event that `typed_event` has written."""
    return event.partition(b"\ndata: ")[2].removesuffix(_END)


@dataclass(frozen=True, slots=True)
class EventSource:
    """Events of a stream. The first exists already, so the request was not refused."""

    first: bytes
    rest: AsyncGenerator[bytes, None]
    close: Callable[[], Awaitable[None]]


async def begin(
    chunks: AsyncGenerator[bytes, None],
    write_error: Callable[[ErrorResponse], bytes],
    patience_s: float = KEEP_ALIVE_S,
) -> tuple[bytes, AsyncGenerator[bytes, None]]:
    """Return the first event and the rest; a comment in place of an event that takes too long.

    An exception before the first event is raised; after the comment `write_error` writes it.
    """
    first = asyncio.ensure_future(anext(chunks))
    try:
        await asyncio.wait((first,), timeout=patience_s)
    except asyncio.CancelledError:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        raise
    if first.done():
        return first.result(), chunks
    return KEEP_ALIVE, _after_comment(first, chunks, write_error)


async def _after_comment(
    first: asyncio.Future[bytes],
    chunks: AsyncGenerator[bytes, None],
    write_error: Callable[[ErrorResponse], bytes],
) -> AsyncGenerator[bytes, None]:
    try:
        yield await first
        async for chunk in chunks:
            yield chunk
    except (SlowReaderError, ReaderReplacedError):
        raise
    except Exception as error:
        yield write_error(translate(error))
    finally:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await chunks.aclose()


class EventStream(Response):
    """Sends the events of its source, and closes the source however the stream ends.

    While no event comes, it sends a comment every KEEP_ALIVE_S. The connection of a client that
    reads nothing for `timeout_s`, with full buffers, is dropped.
    """

    media_type = "text/event-stream"

    def __init__(
        self, source: EventSource, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> None:
        # The initializer of the base class would send a body of known length.
        self.status_code = 200
        self.background = None
        self._source = source
        self._timeout_s = timeout_s
        self._num_sent = 0
        self.init_headers({**_HEADERS, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(self._write(send), receive)
        except ClientDisconnect:
            pass
        except (SlowReaderError, ReaderReplacedError) as error:
            logger.warning("a client was cut off: %s", error)
            drop_connection(scope)
            await disconnected(receive)
        finally:
            await self._source.rest.aclose()
            await self._source.close()

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await self._send(send, {**start, "headers": self.raw_headers})
        await self._send(send, _body(self._source.first))
        comments = asyncio.create_task(self._send_comments(send))
        try:
            async for chunk in self._source.rest:
                self._num_sent += 1
                await self._send(send, _body(chunk))
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_comments(self, send: Send) -> None:
        while True:
            num_before = self._num_sent
            await asyncio.sleep(KEEP_ALIVE_S)
            if self._num_sent == num_before:
                await self._send(send, _body(KEEP_ALIVE))

    async def _send(self, send: Send, message: Message) -> None:
        try:
            # Returns at once unless earlier output has yet to be sent to the client.
            async with asyncio.timeout(self._timeout_s):
                await send(message)
        except TimeoutError as error:
            raise SlowReaderError(
                f"the client read nothing for {self._timeout_s:.0f} s (slow_reader_timeout_s)"
            ) from error


def _body(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}
