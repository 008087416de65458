"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headway.core.terms import Terms
from headway.engine.outputs import PROMPT_TAIL
from headway.server.answer import Job, Piece, answer, begin
from headway.server.generation import Generation, Order
from headway.server.logprobs import CompletionLogprobs
from headway.server.protocol import RequestLimits, parse
from headway.server.protocol_completions import CompletionRequest
from headway.server.routing import Routes
from headway.server.services import Services, check_permissions, off_loop, read_body, terms_of
from headway.text import Tokenizer


def completions_router(services: Services, limits: RequestLimits) -> Routes:
    """The route and its handler."""
    router = Routes()

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        job, generation = await _begin(request, services, limits)
        return await answer(request, services, job, generation)

    return router


async def _begin(
    request: Request, services: Services, limits: RequestLimits
) -> tuple[Job, Generation]:
    """Read the request and send it to the engine; the body is let go of on return."""
    with services.let_in(request) as place:
        body = await read_body(request)
        wish = await off_loop(len(body), lambda: parse(CompletionRequest, body, limits))
        check_permissions(request, wish)
        job = await _job(wish, len(body), services, terms_of(request))
        return job, await begin(services, job, place)


async def _job(wish: CompletionRequest, num_bytes: int, services: Services, terms: Terms) -> Job:
    model = services.model_name(wish.model)
    params = wish.params()
    prompts = await off_loop(num_bytes, lambda: _encode(wish, services))
    order_id = f"cmpl-{services.new_id()}"
    order = Order(order_id, prompts, params, wish.priority or 0, wish.terms(terms))
    written = CompletionFormat(services.engine.tokenizer, order)
    return Job(order, model, written, bool(wish.stream), wish.includes_usage)


def _encode(wish: CompletionRequest, services: Services) -> list[list[int]]:
    return [
        services.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        for prompt in wish.prompts()
    ]


class CompletionFormat:
    """A choice is a text; chunks look like whole choices."""

    object_names = ("text_completion", "text_completion")

    def __init__(self, tokenizer: Tokenizer, order: Order) -> None:
        self._tokenizer = tokenizer
        self._order = order
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def opening(self, index: int) -> None:
        return None

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._write_logprobs(piece),
            "finish_reason": piece.finish_reason,
        }

    def whole(self, piece: Piece) -> dict[str, Any]:
        return self.chunk(piece)

    def _write_logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if piece.tokens is None:
            return None
        writer = self._logprobs.get(piece.index)
        if writer is None:
            prompt = self._order.prompts[piece.index // self._order.params.n]
            detokenizer = self._tokenizer.detokenizer(
                self._order.params.skip_special_tokens, after=prompt[-PROMPT_TAIL:]
            )
            writer = CompletionLogprobs(self._tokenizer, detokenizer)
            self._logprobs[piece.index] = writer
        return writer.write(piece.tokens)
