"""Resumable streams of this process: being read, left by their client, or recently ended.

A stream that its client has left runs on for a while, as if somebody read it. Then it is aborted. A
stream that has ended is kept as long, because its end may not have reached the client. Memory is
bounded; a tenant that uses most of it loses its oldest first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from headway.engine.client.transcript import Cursor
from headway.errors import ReaderReplacedError
from headway.server.api.generate.generation import Generation
from headway.server.http.errors import ErrorResponse
from headway.server.schema.request import AnswerOptions
from headway.text.reply import TEXT_ONLY, ReplyForm

logger = logging.getLogger(__name__)

RESUME_S = 30.0
"""How long a stream waits for its client to come back."""
REPEAT_S = 600.0
"""How long an answer is kept for a request that is sent again, by its Idempotency-Key."""
MAX_LEFT_SIZE = 2 * 1024**2
"""Tokens and log-probabilities of streams without a reader, prompts included."""
MIN_LEFT_SIZE = 2048
"""What each counts at least: many small streams must not push out a few large ones."""
TOKEN_BYTES = 8
"""What a token counts in bytes."""
NOTE_VERSION = 3
_MAX_TIME = 2**40
_MAX_CLIENT_ID_CHARS = 128
_MAX_DIGEST_BYTES = 16


class StreamNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What another frontend needs to write the answer to a request, beside the request."""

    version: int
    endpoint: str
    """Prefix of the ids of the endpoint."""
    model: str
    """Name of the model in the answer."""
    created: int
    options: AnswerOptions
    client_id: str
    """The client's own id of the request."""
    is_stream: bool = True
    body_digest: bytes = b""
    """Digest of the body of a request with an Idempotency-Key."""
    reply: ReplyForm = TEXT_ONLY

    def check(self, endpoints: frozenset[str], model_names: tuple[str, ...]) -> bool:
        """Return whether this frontend can write the answer."""
        is_id = self.client_id.isascii() and self.client_id.isprintable()
        return (
            self.version == NOTE_VERSION
            and self.endpoint in endpoints
            and self.model in model_names
            and 0 <= self.created < _MAX_TIME
            and len(self.client_id) <= _MAX_CLIENT_ID_CHARS
            and len(self.body_digest) <= _MAX_DIGEST_BYTES
            and (is_id or not self.client_id)
            and self.reply.is_known
        )


encode_note = msgspec.msgpack.Encoder().encode
_note = msgspec.msgpack.Decoder(StreamNote)


def decode_note(note: bytes) -> StreamNote | None:
    """Return the note of a request; None if it is not one."""
    try:
        return _note.decode(note)
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError):
        return None


@dataclass(slots=True, eq=False)
class ResumableStream:
    """One stream: its generation, and how to write its events after a cursor."""

    tenant: str
    generation: Generation
    write: Callable[[Cursor | None], AsyncGenerator[bytes, None]]
    """Writes the events after a cursor; for None, all, and an error before the first is raised."""
    write_error: Callable[[ErrorResponse], bytes]
    """Writes the events of a stream that is nothing but an error."""
    write_whole: Callable[[], Coroutine[Any, Any, Response]] | None = None
    """Writes the answer as one body; None for a stream."""
    alias: str = ""
    """Name of the request by its Idempotency-Key; empty without one."""
    body_digest: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of the answer."""
    num_echo_bytes: int = 0
    """Size of what the answer repeats of the request."""
    num_readers: int = 1
    """Readers so far; only the newest counts."""
    drain: asyncio.Task[None] | None = None
    """Reads the stream while no client does, and then waits for one."""
    is_lost: bool = False
    """Whether it ended without its whole answer."""

    @property
    def size(self) -> int:
        """What it counts for the bound on memory."""
        return max(MIN_LEFT_SIZE, self.generation.size + self.num_echo_bytes // TOKEN_BYTES)

    async def events(self, reader: int, cursor: Cursor | None) -> AsyncGenerator[bytes, None]:
        """Yield the events after a cursor to a reader, unless there is a newer one."""
        self._check_newest(reader)
        async with contextlib.aclosing(self.write(cursor)) as events:
            async for event in events:
                yield event

    async def whole(self, reader: int) -> Response | None:
        """Return the answer as one body to a reader; None for a stream."""
        self._check_newest(reader)
        return None if self.write_whole is None else await self.write_whole()

    def _check_newest(self, reader: int) -> None:
        # A later check would be that of the generation, which takes whoever begins to read.
        if reader != self.num_readers:
            raise ReaderReplacedError("another client reads this stream now")


@dataclass(slots=True)
class _Turn:
    """Requests with one Idempotency-Key take turns: the first begins what the others find."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_users: int = 0


class ResumableStreams:
    """The resumable streams of this process, by request id."""

    def __init__(self, resume_s: float = RESUME_S) -> None:
        self._resume_s = resume_s
        self._streams: dict[str, ResumableStream] = {}
        self._by_alias: dict[str, ResumableStream] = {}
        self._turns: dict[str, _Turn] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, stream: ResumableStream) -> None:
        self._streams[stream.generation.id] = stream
        if stream.alias:
            self._by_alias[stream.alias] = stream

    def find(self, request_id: str, tenant: str) -> ResumableStream | None:
        """Return a stream of a tenant; None if it has none with this id, or it was lost."""
        return self._check(self._streams.get(request_id), tenant)

    def find_alias(self, alias: str, tenant: str) -> ResumableStream | None:
        """Return the stream of a request with this Idempotency-Key, as `find` does."""
        return self._check(self._by_alias.get(alias), tenant)

    @asynccontextmanager
    async def one_at_a_time(self, alias: str) -> AsyncGenerator[None, None]:
        """Wait until no other request with this Idempotency-Key looks for its stream."""
        turn = self._turns.setdefault(alias, _Turn())
        turn.num_users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.num_users -= 1
            if not turn.num_users:
                del self._turns[alias]

    def _check(self, stream: ResumableStream | None, tenant: str) -> ResumableStream | None:
        if stream is None or stream.tenant != tenant or stream.is_lost:
            return None
        return stream if stream.generation.is_resumable else None

    async def attach(self, stream: ResumableStream, cursor: Cursor) -> int | None:
        """Give a stream to a new reader, from a cursor on; return the number of the reader.

        Returns None if the stream has ended without its whole answer meanwhile.
        """
        stream.num_readers += 1
        reader = stream.num_readers
        await self._stop_drain(stream)
        if stream.is_lost:
            return None
        stream.generation.rewind(cursor)
        return reader

    async def leave(self, stream: ResumableStream, reader: int) -> None:
        """Record that a reader is gone; the stream waits for another."""
        if reader != stream.num_readers:
            return  # another has taken its place
        if self._streams.get(stream.generation.id) is not stream:
            await stream.generation.close()
            return
        if not stream.generation.is_resumable:
            self._forget(stream)
            await stream.generation.close()
            return
        stream.drain = asyncio.create_task(self._drain(stream))
        await self._make_room()

    async def _drain(self, stream: ResumableStream) -> None:
        try:
            async with asyncio.timeout(self._resume_s):
                async with contextlib.aclosing(stream.generation.deltas()) as batches:
                    async for _ in batches:
                        pass
        except Exception:
            # Nobody came back in time, or the request failed: both were logged where they happened.
            stream.is_lost = True
        await stream.generation.close()
        if not stream.is_lost:
            await asyncio.sleep(REPEAT_S if stream.alias else self._resume_s)
        self._forget(stream)

    async def _stop_drain(self, stream: ResumableStream) -> None:
        drain, stream.drain = stream.drain, None
        if drain is not None:
            if not stream.is_lost:  # else it is about to end the request
                drain.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await drain

    def _forget(self, stream: ResumableStream) -> None:
        if self._streams.get(stream.generation.id) is stream:
            del self._streams[stream.generation.id]
        if self._by_alias.get(stream.alias) is stream:
            del self._by_alias[stream.alias]

    async def _make_room(self) -> None:
        """End the waits of streams without a reader until the rest is within bounds."""
        while True:
            left = [one for one in self._streams.values() if one.drain is not None]
            sizes: Counter[str] = Counter()
            for one in left:
                sizes[one.tenant] += one.size
            if sizes.total() <= MAX_LEFT_SIZE:
                return
            tenant = max(sizes, key=lambda name: sizes[name])
            victim = next(one for one in left if one.tenant == tenant)
            self._forget(victim)
            await self._stop_drain(victim)
            victim.is_lost = True
            await victim.generation.close()
