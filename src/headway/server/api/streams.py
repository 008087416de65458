"""GET /v1/streams/{id}: the rest of a stream whose connection, or whose frontend, was lost.

A stream is found only by its tenant; of any other stream nobody learns that it exists.
"""

from __future__ import annotations

import re
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from headway.engine.client.transcript import Cursor
from headway.server.api.chat import CHAT
from headway.server.api.completions import COMPLETIONS
from headway.server.api.generate.adopted import adopt_stream
from headway.server.context import ServerContext
from headway.server.http import sse
from headway.server.http.errors import UNAVAILABLE, ApiError, ErrorResponse
from headway.server.http.routing import Routes
from headway.server.streams import ResumableStream
from headway.tenancy import TenantRecord

ENDPOINTS = {one.id_prefix: one for one in (CHAT, COMPLETIONS)}
_ID = re.compile(rf"({'|'.join(ENDPOINTS)})[0-9a-f]{{1,64}}")
_MAX_CURSOR_CHARS = 2048
# The same answer for an unknown stream and for a stream of another tenant.
_UNKNOWN = ErrorResponse(
    404,
    "there is no such stream; it can be asked for while it runs and shortly after. If its engine "
    "was lost too, send the request again: with the same seed the tokens are the same",
    "invalid_request_error",
    "not_found",
)
_BAD_CURSOR = ErrorResponse(
    400,
    "Last-Event-ID, or ?after=, must be the id of an event of this stream",
    "invalid_request_error",
    None,
    "after",
)


def streams_router(context: ServerContext) -> Routes:
    """Return the route of this endpoint."""
    router = Routes()

    @router.get("/v1/streams/{request_id}")
    async def resume_stream(request: Request) -> Response:
        request_id: str = request.path_params["request_id"]
        if _ID.fullmatch(request_id) is None:
            raise ApiError(_UNKNOWN)
        cursor = _cursor(request, request_id)
        stream = context.streams.find(request_id, request.state.tenant)
        if stream is None:
            stream = await _adopt(request, context, request_id)
        reader = await context.streams.attach(stream, cursor)
        if reader is None:
            raise ApiError(_UNKNOWN)
        leave = partial(context.streams.leave, stream, reader)
        source = sse.EventSource(sse.RESUMED, stream.events(reader, cursor), leave)
        return sse.EventStream(source, context.slow_reader_timeout_s, stream.headers)

    return router


def _cursor(request: Request, request_id: str) -> Cursor:
    """Return where the client has come to; the start if it does not say."""
    after = request.query_params.get("after", request.headers.get("last-event-id", ""))
    if not after:
        return Cursor()
    name, _, text = after.rpartition(".")
    cursor = Cursor.parse(text) if len(after) <= _MAX_CURSOR_CHARS else None
    if name != request_id or cursor is None:
        raise ApiError(_BAD_CURSOR)
    return cursor


async def _adopt(request: Request, context: ServerContext, request_id: str) -> ResumableStream:
    """Continue a stream of another frontend; the limits of the tenant hold for it too."""
    if context.admission.is_closed or not context.engine.takes_requests:
        raise ApiError(UNAVAILABLE)
    record: TenantRecord = request.state.record
    lease = None if record.meter is None else record.meter.open_lease()
    stream: ResumableStream | None = None
    try:
        found = await context.engine.adopt(request_id, request.state.tenant)
        stream = await adopt_stream(context, found, ENDPOINTS, lambda: lease)
    finally:
        if stream is None and lease is not None:
            lease.release()
    if stream is None:
        raise ApiError(_UNKNOWN)
    return stream
