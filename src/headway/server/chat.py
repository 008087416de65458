"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headway.core.terms import Terms
from headway.errors import InvalidRequestError
from headway.server.answer import Job, Piece, answer, begin
from headway.server.generation import Generation, Order
from headway.server.logprobs import chat_logprobs
from headway.server.protocol import RequestLimits, parse
from headway.server.protocol_chat import ChatRequest
from headway.server.routing import Routes
from headway.server.services import Services, check_permissions, off_loop, read_body, terms_of
from headway.text import Tokenizer


def chat_router(services: Services, limits: RequestLimits) -> Routes:
    """The route and its handler."""
    router = Routes()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        job, generation = await _begin(request, services, limits)
        return await answer(request, services, job, generation)

    return router


async def _begin(
    request: Request, services: Services, limits: RequestLimits
) -> tuple[Job, Generation]:
    """Read the request and send it to the engine; the body is let go of on return."""
    with services.let_in(request) as place:
        body = await read_body(request)
        wish = await off_loop(len(body), lambda: parse(ChatRequest, body, limits))
        try:
            check_permissions(request, wish)
            job = await _job(wish, len(body), services, terms_of(request))
            return job, await begin(services, job, place)
        except InvalidRequestError as error:
            error.param = wish.field_for(error.param)
            raise


async def _job(wish: ChatRequest, num_bytes: int, services: Services, terms: Terms) -> Job:
    model = services.model_name(wish.model)
    params = wish.params()
    token_ids = await off_loop(num_bytes, lambda: _encode(wish, services))
    order_id = f"chatcmpl-{services.new_id()}"
    order = Order(order_id, [token_ids], params, wish.priority or 0, wish.terms(terms))
    written = ChatFormat(services.engine.tokenizer)
    return Job(order, model, written, bool(wish.stream), wish.includes_usage)


def _encode(wish: ChatRequest, services: Services) -> list[int]:
    text = services.chat_template.render(wish.conversation())
    # The template has written the special tokens already.
    return services.encode(text, add_special_tokens=False)


class ChatFormat:
    """A choice is a message; in a stream, its first chunk names the role."""

    object_names = ("chat.completion", "chat.completion.chunk")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }

    def whole(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        return None if piece.tokens is None else chat_logprobs(piece.tokens, self._tokenizer)
