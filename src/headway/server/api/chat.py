"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headway.server.api.answer import ChoicePart
from headway.server.api.endpoint import GenerationEndpoint
from headway.server.api.generation import GenerationSpec
from headway.server.api.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from headway.server.context import ServerContext
from headway.server.http.routing import Routes
from headway.server.schema.chat import ChatRequest
from headway.server.schema.request import AnswerOptions, RequestLimits
from headway.text import Tokenizer


def chat_router(context: ServerContext, limits: RequestLimits) -> Routes:
    """Return the route of this endpoint."""
    router = Routes()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        return await CHAT.respond(request, context, limits)

    return router


def _encode(payload: ChatRequest, context: ServerContext) -> list[list[int]]:
    text = payload.render(context.chat_template)
    # The template has already written the special tokens.
    return [payload.truncate(context.encode(text, add_special_tokens=False))]


class ChatFormat:
    """Writes a choice as a message; the first chunk of a stream names the role."""

    object_names = ("chat.completion", "chat.completion.chunk")

    def __init__(self, tokenizer: Tokenizer, spec: GenerationSpec, options: AnswerOptions) -> None:
        self._names = TokenNames(tokenizer, options.names_tokens_by_id)
        self._prompt = spec.prompts[0]
        self._num_prompt_logprobs = options.num_prompt_logprobs

    def opening(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, piece: ChoicePart) -> dict[str, Any]:
        return {
            "index": piece.index,
            "delta": {"content": piece.text} if piece.text else {},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            **piece.ids(),
        }

    def whole(self, pieces: Sequence[ChoicePart]) -> dict[str, Any]:
        fields: dict[str, Any] = {"choices": [self._choice(piece) for piece in pieces]}
        num_top = self._num_prompt_logprobs
        if num_top is not None:  # every choice has the same prompt
            scores = pieces[0].prompt_scores
            fields["prompt_logprobs"] = prompt_logprobs(self._prompt, scores, num_top, self._names)
        return fields

    def _choice(self, piece: ChoicePart) -> dict[str, Any]:
        return {
            "index": piece.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            **piece.ids(),
        }

    def skip(self, index: int, token_ids: tuple[int, ...]) -> None:
        """Do nothing: no entry depends on the tokens before it."""

    def _logprobs(self, piece: ChoicePart) -> dict[str, Any] | None:
        return None if piece.tokens is None else chat_logprobs(piece.tokens, self._names)


CHAT = GenerationEndpoint(ChatRequest, "chatcmpl", _encode, ChatFormat)
