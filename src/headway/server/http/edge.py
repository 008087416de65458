"""The outermost layer of the app: request ids, and the answer to unexpected exceptions."""

from __future__ import annotations

import logging
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.server.http.errors import INTERNAL_ERROR

logger = logging.getLogger(__name__)

HEADER = "x-request-id"
MAX_ID_CHARS = 128


class Edge:
    """ASGI middleware that echoes a client's request id, or makes one.

    A request can be looked up by this id; the ids inside the engine are made by the server.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get(HEADER, ""))
        scope.setdefault("state", {})["request_id"] = request_id
        is_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal is_started
            if message["type"] == "http.response.start":
                is_started = True
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            if is_started:
                raise  # uvicorn then closes the connection: a partial answer must not look whole
            await INTERNAL_ERROR.response(scope["path"])(scope, receive, send_with_id)


def _request_id(client_id: str) -> str:
    is_short = 0 < len(client_id) <= MAX_ID_CHARS
    is_usable = is_short and client_id.isascii() and client_id.isprintable()
    return client_id if is_usable else uuid.uuid4().hex
