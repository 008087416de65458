"""GET /v1/models and /v1/models/{id}: the served names of the model."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headway.server.context import ServerContext
from headway.server.http.encoding import JsonResponse
from headway.server.http.routing import Routes


def models_router(context: ServerContext) -> Routes:
    """Return the routes of these endpoints."""
    router = Routes()

    @router.get("/v1/models")
    async def list_models(_request: Request) -> Response:
        models = [_describe(name, context) for name in context.model_names]
        return JsonResponse({"object": "list", "data": models})

    # A name may contain slashes, as in owner/model.
    @router.get("/v1/models/{name:path}")
    async def get_model(request: Request) -> Response:
        name = context.model_name(request.path_params["name"])
        return JsonResponse(_describe(name, context))

    return router


def _describe(name: str, context: ServerContext) -> dict[str, Any]:
    description = {
        "id": name,
        "object": "model",
        "created": context.started_at,
        "owned_by": "headway",
        "root": context.model_names[0],
    }
    if context.engine.is_ready:
        description["max_model_len"] = context.engine.info.capacity.max_model_len
    return description
