"""GET /health and below it: the only routes that never ask for a key.

`live` says that this process answers; `ready`, that the engine takes requests. They say no more,
because anyone may ask.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from headway.server.encoding import JsonResponse
from headway.server.services import Services


def health_router(services: Services) -> APIRouter:
    """The routes and their handlers."""
    router = APIRouter()

    @router.get("/health/live")
    async def get_live() -> Response:
        return JsonResponse({"status": "live"})

    @router.get("/health")
    @router.get("/health/ready")
    async def get_ready() -> Response:
        if services.engine.is_ready:
            return JsonResponse({"status": "ready"})
        return JsonResponse({"status": "not ready"}, 503)

    return router
