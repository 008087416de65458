"""The routes of /v1/responses."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headway.server.api.chat import draft_chat
from headway.server.api.generate.endpoint import GenerationEndpoint
from headway.server.api.responses.background import add_routes, answer_response
from headway.server.api.responses.form import ResponseForm
from headway.server.context import ServerContext
from headway.server.http.routing import Routes
from headway.server.schema.request import RequestLimits
from headway.server.schema.responses import read_responses

RESPONSES = GenerationEndpoint(read_responses, "resp_", draft_chat, ResponseForm, answer_response)


def responses_router(context: ServerContext, limits: RequestLimits) -> Routes:
    """Return the routes of this endpoint."""
    router = Routes()

    @router.post("/v1/responses")
    async def create_response(request: Request) -> Response:
        return await RESPONSES.respond(request, context, limits)

    add_routes(router, context)
    return router
