"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headway.core.terms import Terms
from headway.errors import InvalidRequestError
from headway.server.api.answer import ChoicePart, GenerationJob, answer, start_generation
from headway.server.api.generation import Generation, GenerationSpec
from headway.server.api.logprobs import chat_logprobs
from headway.server.context import (
    ServerContext,
    check_permissions,
    read_body,
    run_off_loop,
    tenant_terms,
)
from headway.server.http.routing import Routes
from headway.server.schema.chat import ChatRequest
from headway.server.schema.request import RequestLimits, parse
from headway.text import Tokenizer


def chat_router(context: ServerContext, limits: RequestLimits) -> Routes:
    """Return the route of this endpoint."""
    router = Routes()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        job, generation = await _begin(request, context, limits)
        return await answer(request, context, job, generation)

    return router


async def _begin(
    request: Request, context: ServerContext, limits: RequestLimits
) -> tuple[GenerationJob, Generation]:
    """Read the request and send it to the engine; the body is freed on return."""
    with context.admit(request) as reservation:
        body = await read_body(request)
        payload = await run_off_loop(len(body), lambda: parse(ChatRequest, body, limits))
        try:
            check_permissions(request, payload)
            job = await _make_job(payload, len(body), context, tenant_terms(request))
            return job, await start_generation(context, job, reservation)
        except InvalidRequestError as error:
            error.param = payload.field_for(error.param)
            raise


async def _make_job(
    payload: ChatRequest, num_bytes: int, context: ServerContext, terms: Terms
) -> GenerationJob:
    model = context.model_name(payload.model)
    params = payload.params()
    token_ids = await run_off_loop(num_bytes, lambda: _encode(payload, context))
    spec_id = f"chatcmpl-{context.new_id()}"
    spec = GenerationSpec(spec_id, [token_ids], params, payload.priority or 0, payload.terms(terms))
    choice_format = ChatFormat(context.engine.tokenizer)
    return GenerationJob(spec, model, choice_format, bool(payload.stream), payload.includes_usage)


def _encode(payload: ChatRequest, context: ServerContext) -> list[int]:
    text = context.chat_template.render(payload.conversation())
    # The template has already written the special tokens.
    return context.encode(text, add_special_tokens=False)


class ChatFormat:
    """Writes a choice as a message; the first chunk of a stream names the role."""

    object_names = ("chat.completion", "chat.completion.chunk")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, piece: ChoicePart) -> dict[str, Any]:
        return {
            "index": piece.index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }

    def whole(self, piece: ChoicePart) -> dict[str, Any]:
        return {
            "index": piece.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }

    def _logprobs(self, piece: ChoicePart) -> dict[str, Any] | None:
        return None if piece.tokens is None else chat_logprobs(piece.tokens, self._tokenizer)
