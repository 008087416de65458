"""Logs of background responses: their events, kept for clients that come back.

The logs are in the memory of this process. An event's place in its log is its sequence number, so
that every number is there once. A running response counts as many bytes as its log may become, so
no event of it is ever left out; a response without room is refused. A tenant may have as much as it
leaves free, so that there is room for others however much one asks for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from headway.core.params import SamplingParams
from headway.errors import OverloadedError, TenantLimitError
from headway.server.admission import GATEWAY_PARTS
from headway.server.api.generate.generation import Generation
from headway.server.http import sse
from headway.server.http.errors import REQUEST_CANCELLED, ApiError

KEEP_S = 3600.0
"""How long a log is kept after the end of its response."""
MAX_BYTES = 256 * 1024**2
"""Of all logs. A tenant alone may have half of it: 400 answers of 1,000 tokens that run."""
MIN_BYTES = 32 * 1024
"""What each log counts at least; so there are at most 8,192."""
OBJECT_BYTES = 48
"""What an event takes beside its text."""
TOKEN_BYTES = 320
"""The event of one token, and its text in the events that close the item."""
SCORE_BYTES = 640
"""A log-probability, in the event of its token and in those that close the item."""
NUM_ECHOES = 4
"""Events that repeat the fields of the request."""
PIECE_BYTES = 64 * 1024
"""Events that a reader gets at once; other streams have their turn between two pieces."""
RETRY_AFTER_S = 5


class _LastEvent(msgspec.Struct):
    """The event that ends a response."""

    response: msgspec.Raw


_last_event = msgspec.json.Decoder(_LastEvent)


@dataclass(frozen=True, slots=True)
class LogSpace:
    """What the log of one response takes, and of whom."""

    response_id: str
    tenant: str
    gateway: str
    """The gateway tenant that named the tenant, or the tenant itself."""
    num_bytes: int


def estimate_bytes(num_body_bytes: int, params: SamplingParams, num_tokens: int) -> int:
    """Return how long the log of a response with so many output tokens may become."""
    num_scores = 0 if params.logprobs is None else 1 + params.logprobs
    per_token = TOKEN_BYTES + SCORE_BYTES * num_scores
    return max(MIN_BYTES, NUM_ECHOES * num_body_bytes + num_tokens * per_token)


class ResponseLog:
    """The events of one response, in order; readers wait for more until it has ended."""

    def __init__(
        self,
        tenant: str,
        generation: Generation,
        snapshot: Callable[[], dict[str, Any]],
        headers: Mapping[str, str],
    ) -> None:
        """`snapshot` returns the response as it stands, until its end."""
        self.id = generation.id
        self.tenant = tenant
        self.headers = headers
        self.is_ended = False
        self.num_bytes = 0
        """Memory of the events."""
        self._events: list[bytes] = []
        self._generation: Generation | None = generation
        self._snapshot: Callable[[], dict[str, Any]] | None = snapshot
        self._changed = asyncio.Event()

    @property
    def num_events(self) -> int:
        return len(self._events)

    def add(self, events: bytes) -> None:
        """Add events as a stream has them; [DONE] ends the log."""
        for event in sse.split(events):
            if event == sse.DONE:
                self.is_ended = True
                # What made the events is no longer needed; the last one has the whole response.
                self._generation = self._snapshot = None
            else:
                self._events.append(event)
                self.num_bytes += OBJECT_BYTES + len(event)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def response(self) -> Any:
        """Return the response as it stands, in a form that can be written as JSON."""
        if self._snapshot is not None:
            return self._snapshot()
        return _last_event.decode(sse.data_of(self._events[-1])).response

    async def read(self, start: int) -> AsyncGenerator[bytes, None]:
        """Yield the events from a sequence number on, then [DONE]."""
        while True:
            piece: list[bytes] = []
            num_bytes = 0
            while start < len(self._events) and num_bytes < PIECE_BYTES:
                piece.append(self._events[start])
                num_bytes += len(self._events[start])
                start += 1
            if piece:
                yield b"".join(piece)
                await asyncio.sleep(0)
            elif self.is_ended:
                yield sse.DONE
                return
            else:
                await self._changed.wait()

    async def cancel(self) -> None:
        """End the response, unless it has ended; return when its log has."""
        if self._generation is not None:
            await self._generation.cancel(ApiError(REQUEST_CANCELLED))
        while not self.is_ended:
            await self._changed.wait()


class BackgroundResponses:
    """The background responses of this process, by id: running, or kept after their end."""

    def __init__(self) -> None:
        self._logs: dict[str, ResponseLog] = {}
        self._spaces: dict[str, LogSpace] = {}
        self._expiries: dict[str, asyncio.TimerHandle] = {}
        self._writers: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._logs)

    @contextmanager
    def claim(self, space: LogSpace) -> Generator[None, None, None]:
        """Claim room for the log of a response, or refuse it; give it up if the block fails."""
        self._check_room(space)
        self._spaces[space.response_id] = space
        try:
            yield
        except BaseException:
            del self._spaces[space.response_id]
            raise

    def open(self, log: ResponseLog, writer: asyncio.Task[None]) -> None:
        """Have a log found by its id, while a task writes it; its room was claimed."""
        self._logs[log.id] = log
        # The event loop itself does not keep a task alive.
        self._writers.add(writer)
        writer.add_done_callback(self._writers.discard)

    def close(self, log: ResponseLog) -> None:
        """Record that a response has ended: it takes what its log has, for a while."""
        if self._logs.get(log.id) is not log:
            return
        num_bytes = max(MIN_BYTES, log.num_bytes)
        self._spaces[log.id] = replace(self._spaces[log.id], num_bytes=num_bytes)
        loop = asyncio.get_running_loop()
        self._expiries[log.id] = loop.call_later(KEEP_S, self.forget, log.id)

    def find(self, response_id: str, tenant: str) -> ResponseLog | None:
        """Return the log of a response of a tenant; None if it has none with this id."""
        log = self._logs.get(response_id)
        return None if log is None or log.tenant != tenant else log

    def forget(self, response_id: str) -> None:
        """Drop a log and its room; its readers go on to its end."""
        self._logs.pop(response_id, None)
        self._spaces.pop(response_id, None)
        expiry = self._expiries.pop(response_id, None)
        if expiry is not None:
            expiry.cancel()

    def check(self) -> None:
        """Raise ValueError if a log has no room, or one that runs is about to expire."""
        if self._logs.keys() - self._spaces.keys():
            raise ValueError("a log has no room")
        if any(name not in self._logs or not self._logs[name].is_ended for name in self._expiries):
            raise ValueError("a log expires that is not there, or that runs")

    def _check_room(self, space: LogSpace) -> None:
        spaces = self._spaces.values()
        total = sum([one.num_bytes for one in spaces])
        own = sum([one.num_bytes for one in spaces if one.tenant == space.tenant])
        of_gateway = sum([one.num_bytes for one in spaces if one.gateway == space.gateway])
        if has_room(space.num_bytes, own, of_gateway, total):
            return
        if not own:
            raise OverloadedError(
                "the server keeps as many background responses as it can; try again later",
                RETRY_AFTER_S,
            )
        raise TenantLimitError(
            f"the background responses of this tenant take {own} bytes, and this one may take "
            f"{space.num_bytes} more, which is too much: delete those that you have read (DELETE "
            "/v1/responses/{id}), wait for the end of others, or lower max_output_tokens",
            RETRY_AFTER_S,
        )


def has_room(num_bytes: int, own: int, of_gateway: int, total: int) -> bool:
    """Return whether a log may be added to those of its tenant, of its gateway and of all.

    The first one of a tenant needs some room only, however long it may become.
    """
    if not own:
        return of_gateway < GATEWAY_PARTS * (MAX_BYTES - total)
    free = MAX_BYTES - total - num_bytes
    return own + num_bytes <= free and of_gateway + num_bytes <= GATEWAY_PARTS * free
