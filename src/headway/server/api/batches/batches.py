"""/v1/batches: many requests from one file, answered within a completion window.

A batch is found only by its tenant; of any other batch nobody learns that it exists.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

from starlette.requests import Request
from starlette.responses import Response

from headway.errors import InvalidRequestError
from headway.server.api.batches.files import default_keep_s, keep_seconds, page_of
from headway.server.batches.feeder import BatchFeeder
from headway.server.batches.records import INPUT_PURPOSE, BatchRecord
from headway.server.batches.store import BatchStore
from headway.server.context import ServerContext, read_body
from headway.server.http.encoding import JsonResponse
from headway.server.http.errors import UNAVAILABLE, ApiError, ErrorResponse
from headway.server.http.query import read_query
from headway.server.http.routing import Routes
from headway.server.schema.batches import BatchRequest
from headway.server.schema.request import parse
from headway.tenancy import TenantRecord

PATH = "/v1/batches"
DEFAULT_PAGE, MAX_PAGE = 20, 100
# The same answer for an unknown batch and for a batch of another tenant.
_UNKNOWN = ErrorResponse(404, "there is no such batch", "invalid_request_error", "not_found", "id")


def batches_router(
    context: ServerContext, store: BatchStore, feeder: BatchFeeder, endpoints: Collection[str]
) -> Routes:
    """Return the routes of these endpoints; a batch may use the generating `endpoints`."""
    router = Routes()

    @router.post(PATH)
    async def create_batch(request: Request) -> Response:
        read_query(request)
        body = parse(BatchRequest, await read_body(request))
        if body.endpoint not in endpoints:
            raise InvalidRequestError(f"endpoint must be {' or '.join(endpoints)}", "endpoint")
        if not context.engine.takes_requests:
            raise ApiError(UNAVAILABLE)
        if context.engine.info.scheduling_policy != "fair":
            raise InvalidRequestError(
                "this server runs no batches: they need --scheduling-policy fair", "endpoint"
            )
        record = _make(store, body, request.state.record)
        await store.add_batch(record)
        return JsonResponse(record.as_object())

    @router.get(PATH)
    async def list_batches(request: Request) -> Response:
        query = read_query(request, "after", "limit")
        found = [feeder.counts_of(one) for one in store.batches_of(request.state.tenant)]
        return JsonResponse(page_of(found[::-1], query, DEFAULT_PAGE, MAX_PAGE))

    @router.get(PATH + "/{batch_id}")
    async def get_batch(request: Request) -> Response:
        return JsonResponse(feeder.counts_of(_find(store, request)).as_object())

    @router.post(PATH + "/{batch_id}/cancel")
    async def cancel_batch(request: Request) -> Response:
        record = _find(store, request)
        if not record.is_open:
            message = f"the batch has ended: it is {record.status}"
            raise ApiError(
                ErrorResponse(409, message, "invalid_request_error", "batch_ended", "id")
            )
        cancelled = await store.cancel_batch(record.id)
        return JsonResponse(feeder.counts_of(cancelled).as_object())

    return router


def _find(store: BatchStore, request: Request) -> BatchRecord:
    read_query(request)
    record = store.find_batch(request.path_params["batch_id"], request.state.tenant)
    if record is None:
        raise ApiError(_UNKNOWN)
    return record


def _make(store: BatchStore, body: BatchRequest, tenant: TenantRecord) -> BatchRecord:
    file = store.find_file(body.input_file_id, tenant.tenant.name)
    if file is None or file.purpose != INPUT_PURPOSE:
        raise InvalidRequestError(
            "input_file_id must be the id of a file that was uploaded with purpose batch",
            "input_file_id",
        )
    store.check_room(tenant.tenant.name, 0)
    keep, now = body.output_expires_after, int(store.time_of_day())
    keep_s = keep_seconds(
        None if keep is None else keep.anchor,
        None if keep is None else keep.seconds,
        "output_expires_after",
        default_keep_s(store),
    )
    return BatchRecord(
        id=f"batch_{secrets.token_hex(16)}",
        tenant=tenant.tenant.name,
        gateway=tenant.gateway,
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + body.window_s,
        output_id=f"file-{secrets.token_hex(16)}",
        error_id=f"file-{secrets.token_hex(16)}",
        output_keep_s=keep_s,
        metadata=body.metadata,
    )
