"""The routes of /v1/messages."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headway.errors import InvalidRequestError
from headway.server.api.chat import draft_chat
from headway.server.api.generate.endpoint import GenerationEndpoint
from headway.server.api.messages.form import MessageForm
from headway.server.context import ServerContext, read_body, run_off_loop
from headway.server.http.encoding import JsonResponse
from headway.server.http.routing import Routes
from headway.server.schema.messages import read_messages, read_prompt
from headway.server.schema.request import RequestLimits

MESSAGES = GenerationEndpoint(
    read_messages, "msg_", draft_chat, lambda _, job, generation: MessageForm(job, generation)
)


def messages_router(context: ServerContext, limits: RequestLimits) -> Routes:
    """Return the routes of this endpoint."""
    router = Routes()

    @router.post("/v1/messages")
    async def create_message(request: Request) -> Response:
        return await MESSAGES.respond(request, context, limits)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        with context.admit(request):
            body = await read_body(request)
            count = await run_off_loop(len(body), lambda: _count(body, context, limits))
        return JsonResponse({"input_tokens": count})

    return router


def _count(body: bytes, context: ServerContext, limits: RequestLimits) -> int:
    read = read_prompt(body, limits)
    context.model_name(read.payload.model)
    try:
        (prompt,) = draft_chat(read.payload, context).encode(read.payload, context)
    except InvalidRequestError as error:
        raise read.named(error) from error
    return len(prompt)
