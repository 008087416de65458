"""GET /v1/models and /v1/models/{id}: the names the one model goes by."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headway.server.encoding import JsonResponse
from headway.server.routing import Routes
from headway.server.services import Services


def models_router(services: Services) -> Routes:
    """The routes and their handlers."""
    router = Routes()

    @router.get("/v1/models")
    async def list_models(_request: Request) -> Response:
        models = [_describe(name, services) for name in services.model_names]
        return JsonResponse({"object": "list", "data": models})

    # A name may be a path such as owner/model, so it may hold slashes.
    @router.get("/v1/models/{name:path}")
    async def get_model(request: Request) -> Response:
        name = services.model_name(request.path_params["name"])
        return JsonResponse(_describe(name, services))

    return router


def _describe(name: str, services: Services) -> dict[str, Any]:
    description = {
        "id": name,
        "object": "model",
        "created": services.started_at,
        "owned_by": "headway",
        "root": services.model_names[0],
    }
    if services.engine.is_ready:
        description["max_model_len"] = services.engine.info.capacity.max_model_len
    return description
