"""GET /health and below it. They touch nothing that could be busy, so a probe never queues.

`live` says that this process answers, and is the only route that never asks for a key; it fails
once the engine has been given up, when only a new process helps. `ready` says that requests are
welcome: the engine is loaded, makes progress, and the server is not draining.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from headway.server.http.encoding import JsonResponse
from headway.server.http.routing import Routes


@dataclass(frozen=True, slots=True)
class HealthStatus:
    """What probes are answered from; both are asked anew each time."""

    status: Callable[[], str]
    """One word on whether requests should be sent here."""
    has_given_up: Callable[[], bool]


def live_router(health: HealthStatus) -> Routes:
    """The route that is open to anyone."""
    router = Routes()

    @router.get("/health/live")
    async def get_live(_request: Request) -> Response:
        if health.has_given_up():
            return JsonResponse({"status": "failed"}, 503)
        return JsonResponse({"status": "live"})

    return router


def health_router(health: HealthStatus) -> Routes:
    """The routes for those who route traffic."""
    router = Routes()

    @router.get("/health/ready")
    async def get_ready(_request: Request) -> Response:
        status = health.status()
        return JsonResponse({"status": status}, 200 if status == "ready" else 503)

    @router.get("/health")
    async def get_health(_request: Request) -> Response:
        # As vLLM answers: the status code says it all.
        return Response(status_code=200 if health.status() == "ready" else 503)

    return router
