"""The access log: one line for each request that was answered."""

from __future__ import annotations

import json
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("headway.access")

QUIET = frozenset({"/health", "/health/live", "/health/ready", "/ping", "/metrics"})
"""Paths that are asked every few seconds; logged only if the answer is an error."""
MAX_PATH_CHARS = 200


class AccessLog:
    """ASGI middleware around all others; logs no query, no body and no key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at = time.monotonic()
        status = 0  # stays 0 if the client left before an answer began

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        finally:
            if status >= 400 or scope["path"] not in QUIET:
                _log(scope, status, time.monotonic() - started_at)


def _log(scope: Scope, status: int, seconds: float) -> None:
    state = scope.get("state", {})
    fields = {
        "method": scope["method"],
        "path": scope["path"][:MAX_PATH_CHARS],
        "status": status,
        "seconds": round(seconds, 4),
        "request_id": state.get("request_id", ""),
        "tenant": state.get("tenant", ""),
        "client": (scope.get("client") or ("", 0))[0],
    }
    # As JSON text: a path, an id or a name cannot begin a line of its own.
    told = " ".join(json.dumps(value) for value in fields.values())
    logger.info("%s", told, extra={"fields": fields})
