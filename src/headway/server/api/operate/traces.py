"""GET /trace, on the admin listener only: recent steps and requests for `headway trace`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from itertools import islice
from math import isfinite

from starlette.requests import Request
from starlette.responses import Response

from headway._version import __version__
from headway.errors import InvalidRequestError
from headway.observe.trace.export import (
    MAX_SINCE_S,
    MAX_TRACE_BYTES,
    PATH,
    VERSION,
    TraceEnd,
    TraceHead,
    TraceLine,
    TraceRequest,
    TraceStep,
    TraceSteps,
    encode_line,
)
from headway.server.context import ServerContext
from headway.server.http.auth import check_admin
from headway.server.http.errors import ApiError, ErrorResponse
from headway.server.http.file_stream import PieceStream
from headway.server.http.query import read_query
from headway.server.http.routing import Routes
from headway.tenancy import Directory

MAX_READERS = 2
STEPS_PER_LINE = 128
LINES_PER_PIECE = 8
"""Lines that are made at once; streams of other clients go on between two pieces."""
HEADERS = {
    "Content-Type": "application/jsonl",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
_BUSY = ErrorResponse(
    503,
    f"{MAX_READERS} traces are being read, which is the most; try again shortly",
    "service_unavailable_error",
    "too_many_traces",
    headers={"Retry-After": "5"},
)


def traces_router(context: ServerContext, directory: Directory) -> Routes:
    """Return the route of /trace."""
    router, source = Routes(), TraceSource(context)

    @router.get(PATH)
    async def get_trace(request: Request) -> Response:
        check_admin(request, directory)
        since_s = _read_since(read_query(request, "since_s").get("since_s", "300"))
        return source.open(since_s)

    return router


def _read_since(text: str) -> float:
    try:
        since_s = float(text)
    except ValueError:
        since_s = 0.0
    if not isfinite(since_s) or not 0.0 < since_s <= MAX_SINCE_S:
        message = f"since_s must be a number of seconds, more than 0 and at most {MAX_SINCE_S:.0f}"
        raise InvalidRequestError(message, "since_s")
    return since_s


class TraceSource:
    """Writes what the server remembers, to few readers at a time and up to a bound."""

    def __init__(self, context: ServerContext, max_bytes: int = MAX_TRACE_BYTES) -> None:
        self._context = context
        self._max_bytes = max_bytes
        self._num_readers = 0

    def open(self, since_s: float) -> PieceStream:
        """Return the answer to one more reader, or refuse it."""
        if self._num_readers >= MAX_READERS:
            raise ApiError(_BUSY)
        self._num_readers += 1
        pieces, timeout_s = self._pieces(since_s), self._context.slow_reader_timeout_s
        return PieceStream(pieces, timeout_s, self._leave, HEADERS)

    def _leave(self) -> None:
        self._num_readers -= 1

    async def _pieces(self, since_s: float) -> AsyncGenerator[bytes, None]:
        lines = self._lines(since_s)
        while piece := b"".join(islice(lines, LINES_PER_PIECE)):
            yield piece
            await asyncio.sleep(0)

    def _lines(self, since_s: float) -> Iterator[bytes]:
        context = self._context
        now, wall = context.admission.clock.now(), context.time_of_day()
        steps, has_steps = context.steps.since(now - since_s, wall - now)
        accounts, has_accounts = iter(()), True
        if context.ledger is not None:
            accounts, has_accounts = context.ledger.accounts_since(now - since_s)
        yield _line(TraceHead(VERSION, __version__, context.model_names[0], wall, since_s))
        num_bytes = num_steps = num_requests = 0
        is_cut = False
        for batch in _by_engine(steps):
            line = _line(batch)
            num_bytes += len(line)
            num_steps += len(batch.steps)
            yield line
        for account in accounts:
            line = _line(TraceRequest(account))
            num_bytes += len(line)
            if num_bytes > self._max_bytes:
                is_cut = True
                break
            num_requests += 1
            yield line
        is_complete = has_steps and has_accounts and not is_cut
        yield _line(TraceEnd(num_steps, num_requests, is_complete))


def _by_engine(steps: Iterable[tuple[str, TraceStep]]) -> Iterator[TraceSteps]:
    batches: dict[str, list[TraceStep]] = {}
    for engine, step in steps:
        batches.setdefault(engine, []).append(step)
        if len(batches[engine]) == STEPS_PER_LINE:
            yield TraceSteps(engine, batches.pop(engine))
    for engine, batch in batches.items():
        yield TraceSteps(engine, batch)


def _line(line: TraceLine) -> bytes:
    return encode_line(line) + b"\n"
