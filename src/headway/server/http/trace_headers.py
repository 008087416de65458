"""traceparent: continues the trace of a client, and names the span of its request."""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway.observe.spans.context import continue_trace

PARENT = "traceparent"
STATE = "tracestate"


class TraceHeaders:
    """ASGI middleware for a server that makes spans; handlers read `request.state.trace`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        trace = continue_trace(_only(headers, PARENT), _only(headers, STATE))
        scope.setdefault("state", {})["trace"] = trace

        async def send_with_span(message: Message) -> None:
            if message["type"] == "http.response.start" and trace.is_recorded:
                MutableHeaders(scope=message)[PARENT] = trace.header
            await send(message)

        await self._app(scope, receive, send_with_span)


def _only(headers: Headers, name: str) -> str:
    """Return a header that is there once; of several, none can be trusted."""
    values = headers.getlist(name)
    return values[0] if len(values) == 1 else ""
