"""Sends an answer in pieces, to a client that may be slow: a file, or what is made meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import BinaryIO

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headway.server.http.limits import drop_connection

logger = logging.getLogger(__name__)

PIECE_BYTES = 256 * 1024


class PieceStream(Response):
    """Sends pieces as they come, and closes their source however the answer ends.

    The connection of a client that reads nothing for `timeout_s`, with full buffers, is dropped.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        timeout_s: float,
        close: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        # The initializer of the base class would hold the body in memory.
        self.status_code = 200
        self.background = None
        self._pieces = pieces
        self._timeout_s = timeout_s
        self._close = close
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._write(send)
        except TimeoutError:
            logger.warning("a client read nothing for %.0f s", self._timeout_s)
            drop_connection(scope)
        finally:
            await self._pieces.aclose()
            self._close()

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await self._send(send, {**start, "headers": self.raw_headers})
        async for piece in self._pieces:
            body = {"type": "http.response.body", "body": piece, "more_body": True}
            await self._send(send, body)
        await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, message: Message) -> None:
        async with asyncio.timeout(self._timeout_s):
            await send(message)


class FileStream(PieceStream):
    """Sends the first `num_bytes` of an open file, and closes it."""

    media_type = "application/jsonl"

    def __init__(
        self, file: BinaryIO, num_bytes: int, timeout_s: float, close: Callable[[], None]
    ) -> None:
        def close_both() -> None:
            file.close()
            close()

        headers = {"content-length": str(num_bytes)}
        super().__init__(_read(file, num_bytes), timeout_s, close_both, headers)


async def _read(file: BinaryIO, num_bytes: int) -> AsyncGenerator[bytes, None]:
    num_left = num_bytes
    while num_left:
        piece = await asyncio.to_thread(file.read, min(PIECE_BYTES, num_left))
        if not piece:
            raise OSError("a file is shorter than its record says")
        num_left -= len(piece)
        yield piece


def open_file(path: Path) -> BinaryIO | None:
    """Return a file open for reading; None if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return path.open("rb")
    return None
