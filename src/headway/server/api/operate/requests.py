"""DELETE /v1/requests/{id}: cancels a request of this client."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headway.server.context import ServerContext
from headway.server.http.encoding import JsonResponse
from headway.server.http.errors import REQUEST_CANCELLED, ApiError, ErrorResponse
from headway.server.http.routing import Routes

# The same answer for an unknown request and for a request of another tenant.
_UNKNOWN = ErrorResponse(
    404, "there is no such request, or it has ended", "invalid_request_error", "not_found"
)


def requests_router(context: ServerContext) -> Routes:
    """Return the route of this endpoint."""
    router = Routes()

    @router.delete("/v1/requests/{request_id}")
    async def cancel_request(request: Request) -> Response:
        request_id: str = request.path_params["request_id"]
        generation = context.live.find(request.state.tenant, request_id)
        if generation is None or not generation.is_running:
            raise ApiError(_UNKNOWN)
        await generation.cancel(ApiError(REQUEST_CANCELLED))
        return JsonResponse({"id": generation.id, "object": "request", "cancelled": True})

    return router
