"""POST /tokenize, /detokenize and GET /tokenizer_info, as in vLLM."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from headway.errors import InvalidRequestError, NeverFitsError
from headway.server.context import ServerContext, read_body, run_off_loop
from headway.server.http.encoding import JsonResponse
from headway.server.http.routing import Routes
from headway.server.schema.chat import Messages, check_messages
from headway.server.schema.request import Fields, RequestLimits, decode, parse, validate
from headway.server.schema.sampling import TOKEN_ID


class TokenizeRequest(Fields):
    """Text, tokenized as /v1/completions would."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def to_text(self, context: ServerContext) -> str:
        del context
        return self.prompt

    @property
    def adds_special_tokens(self) -> bool:
        return self.add_special_tokens is not False


class TokenizeChatRequest(Fields):
    """A conversation, tokenized as /v1/chat/completions would.

    By default no special tokens are added, because the chat template writes them.
    """

    model: str | None = None
    messages: Messages
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        check_messages(self.messages)

    def to_text(self, context: ServerContext) -> str:
        return context.dialect.render(
            [message.for_template() for message in self.messages],
            add_generation_prompt=self.add_generation_prompt is not False,
        )

    @property
    def adds_special_tokens(self) -> bool:
        return self.add_special_tokens is True


class DetokenizeRequest(Fields):
    """Token ids, at most as many as max_model_len."""

    model: str | None = None
    tokens: Annotated[list[Any], WithJsonSchema({"type": "array", "items": TOKEN_ID})]


def tokenize_router(context: ServerContext) -> Routes:
    """Return the routes of these endpoints."""
    router = Routes()

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        with context.admit(request):
            body = await read_body(request)
            return await run_off_loop(len(body), lambda: JsonResponse(_tokenize(body, context)))

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        with context.admit(request):
            body = await read_body(request)
            return await run_off_loop(len(body), lambda: JsonResponse(_detokenize(body, context)))

    @router.get("/tokenizer_info")
    async def get_tokenizer_info(_request: Request) -> Response:
        return JsonResponse(_describe(context))

    return router


def _describe(context: ServerContext) -> dict[str, Any]:
    tokenizer = context.engine.tokenizer
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "vocab_size": tokenizer.vocab_size,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_ids": list(tokenizer.eos_token_ids),
        "chat_template": tokenizer.chat_template,
        **tokenizer.special_tokens,
    }


def _tokenize(body: bytes, context: ServerContext) -> dict[str, Any]:
    content = decode(body)
    kind = TokenizeChatRequest if "messages" in content else TokenizeRequest
    payload = validate(kind, content)
    context.model_name(payload.model)
    try:
        tokens = context.encode(payload.to_text(context), payload.adds_special_tokens)
    except InvalidRequestError as error:
        if kind is TokenizeChatRequest and error.param == "prompt":
            error.param = "messages"
        raise
    tokenizer = context.engine.tokenizer
    return {
        "count": len(tokens),
        "max_model_len": context.engine.info.capacity.max_model_len,
        "tokens": tokens,
        "token_strs": [tokenizer.token_text(i) for i in tokens]
        if payload.return_token_strs
        else None,
    }


def _detokenize(body: bytes, context: ServerContext) -> dict[str, Any]:
    payload = parse(DetokenizeRequest, body)
    context.model_name(payload.model)
    info, tokens = context.engine.info, payload.tokens
    if len(tokens) > info.capacity.max_model_len:
        raise NeverFitsError(
            f"tokens has {len(tokens)} ids; max_model_len is {info.capacity.max_model_len}",
            "tokens",
        )
    if not all(type(item) is int and 0 <= item < info.vocab_size for item in tokens):
        raise InvalidRequestError(f"tokens must be token ids in 0..{info.vocab_size - 1}", "tokens")
    return {"prompt": context.engine.tokenizer.decode(tokens, skip_special_tokens=False)}
