"""Server-sent events: how a stream looks on the wire, and who cleans up behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.server.disconnect import unless_disconnected
from headway.server.encoding import to_json

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(payload: Any) -> bytes:
    """One event; JSON has no line breaks of its own, so one data line holds it."""
    return b"data: " + to_json(payload) + b"\n\n"


class EventStream(Response):
    """Sends what `chunks` yields. However it ends, `close` is called, even if the client left
    before the first chunk was asked for and the generator never ran."""

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]
    ) -> None:
        # The base class would send a body of known length.
        self.status_code = 200
        self.background = None
        self._chunks = chunks
        self._close = close
        self.init_headers(_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(self._write(send), receive)
        except ClientDisconnect:
            pass
        finally:
            await self._chunks.aclose()
            await self._close()

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        async for chunk in self._chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
