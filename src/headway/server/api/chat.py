"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headway.server.api.answer import CallPart, ChoicePart
from headway.server.api.endpoint import Draft, GenerationEndpoint
from headway.server.api.logprobs import chat_logprobs
from headway.server.context import ServerContext
from headway.server.http.routing import Routes
from headway.server.schema.chat import ChatRequest
from headway.server.schema.request import RequestLimits


def chat_router(context: ServerContext, limits: RequestLimits) -> Routes:
    """Return the route of this endpoint."""
    router = Routes()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        return await CHAT.respond(request, context, limits)

    return router


def _draft(payload: ChatRequest, context: ServerContext) -> Draft:
    text = payload.render(context.chat_template)
    # The template has already written the special tokens.
    return Draft(payload.params(), [text], add_special_tokens=False)


class ChatFormat:
    """Writes a choice as a message; the first chunk of a stream names the role."""

    object_names = ("chat.completion", "chat.completion.chunk")

    def __init__(self, context: ServerContext) -> None:
        self._tokenizer = context.engine.tokenizer
        self._reasoning_field = context.reasoning_field

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, piece: ChoicePart) -> dict[str, Any]:
        return {
            "index": piece.index,
            "delta": self._delta(piece),
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            **piece.ids(),
        }

    def whole(self, piece: ChoicePart) -> dict[str, Any]:
        return {
            "index": piece.index,
            "message": self._message(piece),
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            **piece.ids(),
        }

    def skip(self, index: int, token_ids: tuple[int, ...]) -> None:
        """Do nothing: no entry depends on the tokens before it."""

    def _delta(self, piece: ChoicePart) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta[self._reasoning_field] = piece.reasoning
        if piece.text:
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = [_call_delta(call) for call in piece.calls]
        return delta

    def _message(self, piece: ChoicePart) -> dict[str, Any]:
        has_more = bool(piece.reasoning or piece.calls)
        content = None if has_more and not piece.text else piece.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if piece.reasoning:
            message[self._reasoning_field] = piece.reasoning
        if piece.calls:
            message["tool_calls"] = [_whole_call(call) for call in piece.calls]
        return message

    def _logprobs(self, piece: ChoicePart) -> dict[str, Any] | None:
        return None if piece.tokens is None else chat_logprobs(piece.tokens, self._tokenizer)


def _whole_call(call: CallPart) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(call: CallPart) -> dict[str, Any]:
    """Return a part of a call; clients join parts by index, and take id and name once."""
    if call.name is None:
        return {"index": call.number, "function": {"arguments": call.arguments}}
    return {"index": call.number, **_whole_call(call)}


CHAT = GenerationEndpoint(ChatRequest, "chatcmpl", _draft, lambda context, _: ChatFormat(context))
