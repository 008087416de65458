"""GET /metrics and /version."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from headway._version import __version__
from headway.observe.metrics import CONTENT_TYPE
from headway.server.encoding import JsonResponse
from headway.server.services import Services


def status_router(services: Services) -> APIRouter:
    """The routes and their handlers."""
    router = APIRouter()

    @router.get("/metrics")
    async def get_metrics() -> Response:
        # The size of the cache is known only once the model has been loaded.
        if services.engine.is_ready:
            capacity = services.engine.info.capacity
            services.metrics.describe_cache(capacity.num_blocks, capacity.block_size)
        return Response(services.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    @router.get("/version")
    async def get_version() -> Response:
        return JsonResponse({"version": __version__})

    return router
