"""GET /metrics, on the admin listener only, GET /version, on both, and GET /load."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headway._version import __version__
from headway.observe.metrics.engine_metrics import EngineState
from headway.observe.metrics.metrics import CONTENT_TYPE
from headway.server.context import ServerContext
from headway.server.http.auth import check_admin
from headway.server.http.encoding import JsonResponse
from headway.server.http.routing import Routes
from headway.tenancy import Directory


def metrics_router(context: ServerContext, directory: Directory) -> Routes:
    """Return the route of /metrics."""
    router = Routes()

    @router.get("/metrics")
    async def get_metrics(request: Request) -> Response:
        check_admin(request, directory)
        # The size of the cache is known only after the model is loaded.
        if context.engine.is_ready:
            capacity = context.engine.info.capacity
            context.metrics.describe_cache(capacity.num_blocks, capacity.block_size)
        context.metrics.describe_engines(
            [EngineState(*one) for one in context.engine.engine_states]
        )
        return Response(context.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    return router


def load_router(context: ServerContext) -> Routes:
    """Return the route of /load."""
    router = Routes()

    @router.get("/load")
    async def get_load(_request: Request) -> Response:
        # As in vLLM: the number of requests that are being answered.
        return JsonResponse({"server_load": context.engine.num_requests})

    return router


def version_router() -> Routes:
    """Return the route of /version."""
    router = Routes()

    @router.get("/version")
    async def get_version(_request: Request) -> Response:
        return JsonResponse({"version": __version__})

    return router
