"""POST /tokenize and /detokenize, as vLLM has them: text to token ids and back, no generation."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from headway.errors import InvalidRequestError, NeverFitsError
from headway.server.encoding import JsonResponse
from headway.server.protocol import TOKEN_ID, Fields, RequestLimits, decode, parse, validate
from headway.server.protocol_chat import Messages, check_messages
from headway.server.routing import Routes
from headway.server.services import Services, off_loop, read_body


class TokenizeRequest(Fields):
    """Text, tokenized as /v1/completions would."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def to_text(self, services: Services) -> str:
        del services
        return self.prompt

    @property
    def adds_special_tokens(self) -> bool:
        return self.add_special_tokens is not False


class TokenizeChatRequest(Fields):
    """A conversation, tokenized as /v1/chat/completions would: the template has written the
    special tokens already."""

    model: str | None = None
    messages: Messages
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        check_messages(self.messages)

    def to_text(self, services: Services) -> str:
        return services.chat_template.render(
            [message.for_template() for message in self.messages],
            add_generation_prompt=self.add_generation_prompt is not False,
        )

    @property
    def adds_special_tokens(self) -> bool:
        return self.add_special_tokens is True


class DetokenizeRequest(Fields):
    """Token ids, at most as many as the model holds."""

    model: str | None = None
    tokens: Annotated[list[Any], WithJsonSchema({"type": "array", "items": TOKEN_ID})]


def tokenize_router(services: Services) -> Routes:
    """The routes and their handlers."""
    router = Routes()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        with services.let_in(request):
            body = await read_body(request)
            return await off_loop(len(body), lambda: JsonResponse(_tokenize(body, services)))

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        with services.let_in(request):
            body = await read_body(request)
            return await off_loop(len(body), lambda: JsonResponse(_detokenize(body, services)))

    return router


def _tokenize(body: bytes, services: Services) -> dict[str, Any]:
    content = decode(body)
    kind = TokenizeChatRequest if "messages" in content else TokenizeRequest
    wish = validate(kind, content)
    services.model_name(wish.model)
    try:
        tokens = services.encode(wish.to_text(services), wish.adds_special_tokens)
    except InvalidRequestError as error:
        if kind is TokenizeChatRequest and error.param == "prompt":
            error.param = "messages"
        raise
    tokenizer = services.engine.tokenizer
    return {
        "count": len(tokens),
        "max_model_len": services.engine.info.capacity.max_model_len,
        "tokens": tokens,
        "token_strs": [tokenizer.token_text(i) for i in tokens] if wish.return_token_strs else None,
    }


def _detokenize(body: bytes, services: Services) -> dict[str, Any]:
    wish = parse(DetokenizeRequest, body)
    services.model_name(wish.model)
    info, tokens = services.engine.info, wish.tokens
    if len(tokens) > info.capacity.max_model_len:
        raise NeverFitsError(
            f"{len(tokens)} tokens; this server holds {info.capacity.max_model_len}", "tokens"
        )
    if not all(type(item) is int and 0 <= item < info.vocab_size for item in tokens):
        raise InvalidRequestError(f"tokens must be token ids in 0..{info.vocab_size - 1}", "tokens")
    return {"prompt": services.engine.tokenizer.decode(tokens, skip_special_tokens=False)}
