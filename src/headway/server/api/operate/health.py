"""GET /health, /health/live, /health/ready and /ping; no probe ever waits for the engine.

`live` reports that this process answers. It fails once the engine is given up, because only a new
process helps then. `ready` reports that requests are accepted: the engine is loaded and makes
progress, and the server is not draining. Both need no key, which kubelets do not have, and answer
one word.
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
    """The sources of the probes' answers, called for each probe."""

    status: Callable[[], str]
    """Returns whether requests should be sent here, as one word."""
    has_given_up: Callable[[], bool]


def probe_router(health: HealthStatus) -> Routes:
    """Return the routes that need no key."""
    router = Routes()

    @router.get("/health/live")
    async def get_live(_request: Request) -> Response:
        if health.has_given_up():
            return JsonResponse({"status": "failed"}, 503)
        return JsonResponse({"status": "live"})

    @router.get("/health/ready")
    async def get_ready(_request: Request) -> Response:
        status = health.status()
        return JsonResponse({"status": status}, 200 if status == "ready" else 503)

    return router


def health_router(health: HealthStatus) -> Routes:
    """Return the routes for load balancers."""
    router = Routes()

    async def get_health(_request: Request) -> Response:
        # As in vLLM, the answer is the status code alone.
        return Response(status_code=200 if health.status() == "ready" else 503)

    for path in ("/health", "/ping"):
        router.add(path, get_health, "GET")

    return router
