"""GET /openapi.json"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headway.server.context import ServerContext
from headway.server.http.encoding import JsonResponse
from headway.server.http.routing import Routes
from headway.server.schema.request import RequestLimits


def openapi_router(context: ServerContext, limits: RequestLimits, has_keys: bool) -> Routes:
    """Return the route of this endpoint."""
    router = Routes()

    @router.get("/openapi.json")
    async def get_openapi(_request: Request) -> Response:
        # Its models take long to build, and few clients ask.
        from headway.server.api.openapi.document import document, facts_of

        return JsonResponse(document(facts_of(context, limits, has_keys)))

    return router
