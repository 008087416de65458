"""/v1/files: uploads the input of batches, and returns their results.

A file is found only by its tenant; of any other file nobody learns that it exists.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import ExitStack
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headway.errors import InvalidRequestError
from headway.server.batches.records import INPUT_PURPOSE, OUTPUT_PURPOSE, FileRecord
from headway.server.batches.store import DAY_S, BatchStore, Upload
from headway.server.context import ServerContext
from headway.server.http.encoding import JsonResponse
from headway.server.http.errors import ApiError, ErrorResponse
from headway.server.http.file_stream import FileStream, open_file
from headway.server.http.limits import extend_body_time
from headway.server.http.multipart import MultipartParser, PartBegin, PartData, boundary_of
from headway.server.http.query import read_query
from headway.server.http.routing import Routes

PATH = "/v1/files"
FORM_BYTES = 64 * 1024
"""Most bytes of a form beside its file."""
UPLOAD_S = 3600.0
"""How long an upload may take; unlike other bodies, it has no position in the queue."""
MAX_FIELD_BYTES = 256
MAX_PAGE = 10_000
MIN_KEEP_S, MAX_KEEP_S = 3600, 30 * DAY_S
FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
# The same answer for an unknown file and for a file of another tenant.
_UNKNOWN = ErrorResponse(404, "there is no such file", "invalid_request_error", "not_found", "id")


def files_router(context: ServerContext, store: BatchStore) -> Routes:
    """Return the routes of these endpoints."""
    router = Routes()

    @router.post(PATH)
    async def upload_file(request: Request) -> Response:
        return JsonResponse((await _receive(store, request)).as_object())

    @router.get(PATH)
    async def list_files(request: Request) -> Response:
        query = read_query(request, "purpose", "limit", "order", "after")
        purpose, order = query.get("purpose"), query.get("order", "desc")
        if purpose not in (None, INPUT_PURPOSE, OUTPUT_PURPOSE):
            raise InvalidRequestError(
                f"purpose must be {INPUT_PURPOSE} or {OUTPUT_PURPOSE}", "purpose"
            )
        if order not in ("asc", "desc"):
            raise InvalidRequestError("order must be asc or desc", "order")
        found = [
            one
            for one in store.files_of(request.state.tenant)
            if purpose is None or one.purpose == purpose
        ]
        if order == "desc":
            found.reverse()
        return JsonResponse(page_of(found, query, MAX_PAGE, MAX_PAGE))

    @router.get(PATH + "/{file_id}")
    async def get_file(request: Request) -> Response:
        return JsonResponse(_find(store, request).as_object())

    @router.get(PATH + "/{file_id}/content")
    async def get_content(request: Request) -> Response:
        record = _find(store, request)
        with ExitStack() as stack:
            stack.enter_context(store.transfer(record.tenant))
            file = await asyncio.to_thread(open_file, store.folder.path_of(record.id))
            if file is None:
                raise ApiError(_UNKNOWN)
            timeout_s = context.slow_reader_timeout_s
            return FileStream(file, record.num_bytes, timeout_s, stack.pop_all().close)

    @router.delete(PATH + "/{file_id}")
    async def delete_file(request: Request) -> Response:
        record = _find(store, request)
        batch = store.batch_using(record.id)
        if batch is not None:
            message = f"{batch.id} reads this file; cancel the batch, or wait for its end"
            raise ApiError(
                ErrorResponse(409, message, "invalid_request_error", "file_in_use", "id")
            )
        await store.remove_file(record)
        return JsonResponse({"id": record.id, "object": "file", "deleted": True})

    return router


async def _receive(store: BatchStore, request: Request) -> FileRecord:
    """Store the file of an upload as it arrives."""
    read_query(request)
    parser = MultipartParser(boundary_of(request.headers.get("content-type", "")))
    tenant: str = request.state.tenant
    extend_body_time(request.scope, UPLOAD_S)
    with store.transfer(tenant):
        async with store.upload(tenant) as upload:
            form = _Form(upload, parser)
            async for piece in request.stream():
                await form.read(piece)
            return await form.finish(store)


def _find(store: BatchStore, request: Request) -> FileRecord:
    read_query(request)
    record = store.find_file(request.path_params["file_id"], request.state.tenant)
    if record is None:
        raise ApiError(_UNKNOWN)
    return record


def page_of(records: list[Any], query: dict[str, str], default: int, most: int) -> dict[str, Any]:
    """Return the part of a list that `after` and `limit` ask for, as OpenAI's list object."""
    text, after = query.get("limit", str(default)), query.get("after")
    is_number = text.isascii() and text.isdecimal() and len(text) < 7
    if not is_number or not 1 <= int(text) <= most:
        raise InvalidRequestError(f"limit must be a whole number from 1 to {most}", "limit")
    if after is not None:
        place = next((at for at, one in enumerate(records) if one.id == after), None)
        if place is None:
            raise InvalidRequestError("after must be the id of an item of this list", "after")
        records = records[place + 1 :]
    page = [one.as_object() for one in records[: int(text)]]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(records) > len(page),
    }


def keep_seconds(anchor: object, seconds: object, field: str, default_s: int) -> int:
    """Return how long a file is kept, by its `expires_after`; at most as long as all files."""
    if anchor is None and seconds is None:
        return default_s
    if anchor != "created_at":
        raise InvalidRequestError(f"{field}.anchor must be created_at", field)
    longest = min(default_s, MAX_KEEP_S)
    if not isinstance(seconds, int) or not MIN_KEEP_S <= seconds <= longest:
        raise InvalidRequestError(
            f"{field}.seconds must be from {MIN_KEEP_S} to {longest} (batch_keep_days)", field
        )
    return seconds


def default_keep_s(store: BatchStore) -> int:
    """Return how long files are kept unless their client wants less."""
    return int(store.config.batch_keep_days * DAY_S)


class _Form:
    """The form of an upload: writes its file, keeps its few other fields."""

    def __init__(self, upload: Upload, parser: MultipartParser) -> None:
        self._upload = upload
        self._parser = parser
        self._part: PartBegin | None = None
        self._filename: str | None = None
        self._fields: dict[str, bytes] = {}

    async def read(self, piece: bytes) -> None:
        for event in self._parser.feed(piece):
            if isinstance(event, PartBegin):
                self._begin(event)
            elif isinstance(event, PartData):
                await self._add(event.data)

    def _begin(self, part: PartBegin) -> None:
        self._part = part
        if part.name == "file":
            if self._filename is not None:
                raise InvalidRequestError("the form has two files; send one", "file")
            if part.filename is None:
                raise InvalidRequestError("file must be a file with a name", "file")
            self._filename = part.filename
        elif part.name not in FIELDS or part.filename is not None:
            raise InvalidRequestError(f"unknown field: {part.name}", part.name)
        elif part.name in self._fields:
            raise InvalidRequestError(f"{part.name} is there twice", part.name)
        else:
            self._fields[part.name] = b""

    async def _add(self, data: bytes) -> None:
        part = self._part
        if part is None or part.name == "file":
            await self._upload.write(data)
            return
        self._fields[part.name] += data
        if len(self._fields[part.name]) > MAX_FIELD_BYTES:
            raise InvalidRequestError(f"{part.name} is too long", part.name)

    async def finish(self, store: BatchStore) -> FileRecord:
        self._parser.finish()
        if self._filename is None:
            raise InvalidRequestError("the form needs a file, under the name file", "file")
        fields = {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}
        if fields.get("purpose") != INPUT_PURPOSE:
            raise InvalidRequestError(f"purpose must be {INPUT_PURPOSE!r}", "purpose")
        text = fields.get("expires_after[seconds]")
        seconds = int(text) if text is not None and re.fullmatch("[0-9]{1,9}", text) else text
        anchor, default_s = fields.get("expires_after[anchor]"), default_keep_s(store)
        keep_s = keep_seconds(anchor, seconds, "expires_after", default_s)
        return await self._upload.finish(self._filename, keep_s)
