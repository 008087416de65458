"""How much of a request is read: headers and body are bounded while they arrive."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.server.errors import ApiError, ErrorAnswer

MAX_HEADER_BYTES = 64 * 1024


class BodyLimit:
    """ASGI middleware: reading past the limit raises, and the answer is 413.

    The declared length is checked when the body is first asked for, the true length as it comes.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes = 0
        declared = _declared_length(scope)

        async def bounded_receive() -> Message:
            nonlocal num_bytes
            if declared > self._max_body_bytes:
                raise self._too_large()
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            return message

        await self._app(scope, bounded_receive, send)

    def _too_large(self) -> ApiError:
        message = f"the request body is larger than {self._max_body_bytes} bytes"
        # The rest of the body is not read, so the connection cannot be used again.
        headers = {"Connection": "close"}
        return ApiError(
            ErrorAnswer(413, message, "invalid_request_error", "body_too_large", headers=headers)
        )


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


class BoundedHttpProtocol(HttpToolsProtocol):
    """The parser collects a header until it ends; here, one that does not end is cut off."""

    _num_header_bytes = 0
    _is_in_headers = False

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers = True
        self._num_header_bytes = 0

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        num_bytes = len(self.url) + sum([len(name) + len(value) for name, value in self.headers])
        if num_bytes > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")  # the parser's caller answers 400
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_headers:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response("The request headers are too large.")
