"""Background responses: made whether or not a client waits, and read from their log.

Other processes do not have the log: a client must come back to the same one. A response is found
only by its tenant; of any other response nobody learns that it exists.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from headway.errors import InvalidRequestError
from headway.server.api.generate.answer import GenerationJob, ResponseWriter, answer
from headway.server.api.generate.generation import Generation
from headway.server.api.responses.form import ResponseForm
from headway.server.background import ResponseLog
from headway.server.context import ServerContext
from headway.server.http import sse
from headway.server.http.encoding import JsonResponse
from headway.server.http.errors import ApiError, ErrorResponse, translate
from headway.server.http.query import read_flag, read_query
from headway.server.http.routing import Routes

PATH = "/v1/responses/{response_id}"
MAX_NUMBER_CHARS = 9
# The same answer for an unknown response and for a response of another tenant.
_UNKNOWN = ErrorResponse(
    404,
    "there is no such response: only background responses are kept, until an hour after their end "
    "and by the server process that made them",
    "invalid_request_error",
    "not_found",
    "response_id",
)
_NOT_BACKGROUND = ErrorResponse(
    400,
    "this is no background response: only its own request gets the answer. To cancel it, close its "
    "connection, or use DELETE /v1/requests/{id}",
    "invalid_request_error",
    "not_a_background_response",
    "response_id",
)


async def answer_response(
    request: Request, context: ServerContext, job: GenerationJob, generation: Generation
) -> Response:
    """Return the answer to a started generation; a background response goes on without it."""
    if not job.is_background:
        return await answer(request, context, job, generation)
    try:
        log = _open(context, job, generation)
    except BaseException:
        context.background.forget(generation.id)
        await generation.close()
        raise
    if not job.is_stream:
        return JsonResponse(log.response(), headers=log.headers)
    events = log.read(0)
    return _stream(context, log, await anext(events), events)


def add_routes(router: Routes, context: ServerContext) -> None:
    """Add the routes of responses that are kept."""

    @router.get(PATH)
    async def get_response(request: Request) -> Response:
        query = read_query(request, "stream", "starting_after", "include_obfuscation")
        log = _find(context, request)
        if read_flag(query, "include_obfuscation"):
            raise InvalidRequestError("include_obfuscation must be false", "include_obfuscation")
        after = query.get("starting_after")
        if read_flag(query, "stream"):
            start = 0 if after is None else 1 + _read_number(after, log.num_events)
            return _stream(context, log, sse.RESUMED, log.read(start))
        if after is not None:
            raise InvalidRequestError(
                "starting_after is only allowed when stream is true", "starting_after"
            )
        return JsonResponse(log.response(), headers=log.headers)

    @router.post(PATH + "/cancel")
    async def cancel_response(request: Request) -> Response:
        read_query(request)
        log = _find(context, request)
        await log.cancel()
        return JsonResponse(log.response(), headers=log.headers)

    @router.delete(PATH)
    async def delete_response(request: Request) -> Response:
        read_query(request)
        log = _find(context, request)
        await log.cancel()
        context.background.forget(log.id)
        return JsonResponse({"id": log.id, "object": "response", "deleted": True})


def _open(context: ServerContext, job: GenerationJob, generation: Generation) -> ResponseLog:
    """Begin the log of a response, and the task that writes it."""
    context.set_client_id(job.spec.id, job.client_id)
    form = ResponseForm(context, job, generation)
    writer = ResponseWriter(replace(job, make_form=lambda *_: form), generation)
    log = ResponseLog(job.spec.terms.tenant, generation, form.snapshot, form.headers)
    log.add(form.queue())
    context.background.open(log, asyncio.create_task(_write(context, log, writer, generation)))
    return log


async def _write(
    context: ServerContext, log: ResponseLog, writer: ResponseWriter, generation: Generation
) -> None:
    """Write the log of a response to its end, as a client would get it."""
    try:
        async with contextlib.aclosing(writer.stream()) as pieces:
            async for piece in pieces:
                log.add(piece)
    except Exception as error:
        log.add(writer.write_error(translate(error)))
    finally:
        context.background.close(log)
        await generation.close()


def _stream(
    context: ServerContext, log: ResponseLog, first: bytes, rest: AsyncGenerator[bytes, None]
) -> Response:
    source = sse.EventSource(first, rest, _leave)
    return sse.EventStream(source, context.slow_reader_timeout_s, log.headers)


async def _leave() -> None:
    """Do nothing when a reader leaves: the response goes on."""


def _find(context: ServerContext, request: Request) -> ResponseLog:
    tenant: str = request.state.tenant
    name: str = request.path_params["response_id"]
    log = context.background.find(name, tenant)
    if log is not None:
        return log
    generation = context.live.find(tenant, name)
    is_running = generation is not None and generation.id == name and generation.is_running
    raise ApiError(_NOT_BACKGROUND if is_running else _UNKNOWN)


def _read_number(text: str, num_events: int) -> int:
    """Return the sequence number of an event that a client has."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= MAX_NUMBER_CHARS
    if not is_number or int(text) >= num_events:
        raise InvalidRequestError(
            "starting_after must be the sequence_number of an event of this response",
            "starting_after",
        )
    return int(text)
