"""From exceptions to error bodies, OpenAI's or Anthropic's; the only module that knows both.

The answer to a client's mistake has the full message. An internal error is logged, and its answer
has no details.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from headway.errors import (
    BatchStoreError,
    DeadlineError,
    EngineError,
    HeadwayError,
    InvalidRequestError,
    NeverFitsError,
    OverloadedError,
    QuarantinedError,
    QuotaError,
    TenantLimitError,
)
from headway.server.http.encoding import JsonResponse

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
RETRY_AFTER_S = 2
ANTHROPIC_PATH = "/v1/messages"
"""Errors of this path and of those below it have the form of Anthropic's API."""
INTERNAL_STATUS = 500
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(HeadwayError):
    """An error that exists only in HTTP; its answer contains everything."""

    def __init__(self, answer: ErrorResponse) -> None:
        super().__init__(answer.message)
        self.answer = answer


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """A status and the fields of OpenAI's error object."""

    status: int
    message: str
    type: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        fields = {"message": self.message, "type": self.type, "param": self.param}
        return {"error": {**fields, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Return the body in the form of Anthropic's API."""
        other = "api_error" if self.status >= INTERNAL_STATUS else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, other)
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, path: str) -> Response:
        """Return the answer to a request of a path."""
        is_anthropic = path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
        body = self.anthropic_body() if is_anthropic else self.body()
        return JsonResponse(body, self.status, dict(self.headers))


INTERNAL_ERROR = ErrorResponse(500, "an internal error occurred", "server_error", "internal_error")
UNAVAILABLE = ErrorResponse(
    503,
    "the engine is not available; try again shortly",
    "service_unavailable_error",
    "service_unavailable",
    headers={"Retry-After": str(RETRY_AFTER_S)},
)
REQUEST_CANCELLED = ErrorResponse(
    409, "the request was cancelled by its client", "invalid_request_error", "request_cancelled"
)
_HTTP_CODES = {404: "not_found", 405: "method_not_allowed"}


def translate(error: Exception) -> ErrorResponse:
    """Return the answer to an exception; log an unexpected exception."""
    match error:
        case ApiError():
            return error.answer
        case NeverFitsError():
            code = "context_length_exceeded" if error.param != "n" else None
            return ErrorResponse(400, str(error), "invalid_request_error", code, error.param)
        case InvalidRequestError():
            return ErrorResponse(400, str(error), "invalid_request_error", None, error.param)
        case TenantLimitError():
            headers = {"Retry-After": str(error.retry_after_s)}
            kind, code = "rate_limit_error", "rate_limit_exceeded"
            return ErrorResponse(429, str(error), kind, code, headers=headers)
        case OverloadedError():
            headers = {"Retry-After": str(error.retry_after_s)}
            is_late = isinstance(error, DeadlineError)
            kind = "service_unavailable_error"
            code = "deadline_not_feasible" if is_late else "server_is_overloaded"
            return ErrorResponse(503, str(error), kind, code, headers=headers)
        case QuarantinedError():
            # A retry would be refused again, and OpenAI's clients obey this header.
            headers = {"x-should-retry": "false"}
            return ErrorResponse(
                500, str(error), "server_error", "request_quarantined", None, headers
            )
        case EngineError():
            logger.warning("answered 503: %s", error)
            return UNAVAILABLE
        case BatchStoreError():
            logger.warning("answered 503: %s", error)
            message = "files and batches cannot be stored now; try again shortly"
            return replace(UNAVAILABLE, message=message)
        case HTTPException():
            kind = "invalid_request_error" if error.status_code < 500 else "server_error"
            code = _HTTP_CODES.get(error.status_code)
            headers = error.headers or {}
            return ErrorResponse(error.status_code, str(error.detail), kind, code, headers=headers)
        case _:
            logger.error("unexpected error", exc_info=error)
            return INTERNAL_ERROR


def refusal_reason(error: Exception) -> str:
    """Return the name under which a refusal is counted."""
    match error:
        case NeverFitsError():
            return "never_fits"
        case QuotaError():
            return error.quota
        case TenantLimitError():
            return "tenant_limit"
        case DeadlineError():
            return "deadline"
        case OverloadedError():
            return "overloaded"
        case QuarantinedError():
            return "quarantined"
        case EngineError():
            return "engine_unavailable"
        case BatchStoreError():
            return "batch_store_unavailable"
        case ApiError():
            return error.answer.code or "invalid_request"
        case _:
            return "invalid_request"


def install_error_handlers(app: Starlette, count_refusal: Callable[[str], None]) -> None:
    """Have the app answer every expected exception; the Edge answers the rest."""

    async def refuse(request: Request, error: Exception) -> Response:
        count_refusal(refusal_reason(error))
        return translate(error).response(request.scope["path"])

    async def answer(request: Request, error: Exception) -> Response:
        return translate(error).response(request.scope["path"])

    async def close_silently(_request: Request, _error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # no client reads it

    app.add_exception_handler(HeadwayError, refuse)
    app.add_exception_handler(HTTPException, answer)
    app.add_exception_handler(ClientDisconnect, close_silently)
