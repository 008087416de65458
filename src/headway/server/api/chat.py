"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headway.errors import InvalidRequestError
from headway.server.api.generate.answer import CallPart, ChoicePart, GenerationJob
from headway.server.api.generate.chunks import ChunkForm
from headway.server.api.generate.endpoint import Draft, GenerationEndpoint, GrammarPart
from headway.server.api.generate.generation import Generation, GenerationSpec
from headway.server.api.generate.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from headway.server.context import ServerContext
from headway.server.http.routing import Routes
from headway.server.schema.adapted import read_as
from headway.server.schema.chat import ChatRequest
from headway.server.schema.request import AnswerOptions, RequestLimits
from headway.server.schema.tools import ToolChoice
from headway.text.grammar import with_notes
from headway.text.reasoning import ReasoningStart
from headway.text.reply import TEXT_ONLY, ReplyForm
from headway.text.thinking import NOTE as THINKING_NOTE
from headway.text.thinking import ThinkingBudget
from headway.text.tools.dialect import ChatDialect
from headway.text.tools.forms import CallForm
from headway.text.tools.grammar import CallRules, Tool, reply_grammar


def chat_router(context: ServerContext, limits: RequestLimits) -> Routes:
    """Return the route of this endpoint."""
    router = Routes()

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        return await CHAT.respond(request, context, limits)

    return router


def draft_chat(payload: ChatRequest, context: ServerContext) -> Draft:
    """Return a conversation as a prompt, with the grammar and the form of its reply."""
    dialect, params = context.dialect, payload.params()
    prompt = payload.render(dialect)
    is_continued = bool(payload.continue_final_message) or payload.add_generation_prompt is False
    reasoning = dialect.reasoning_after(prompt, is_continued=is_continued)
    choice = payload.choice()
    form = dialect.tools.form if choice.tools else None
    parts = [] if form is None else _tool_parts(choice, form, dialect)
    grammar, has_budget = params.grammar, payload.thinking_token_budget is not None
    if form is not None:
        grammar = _tool_grammar(payload, dialect, reasoning)
    elif has_budget or (grammar is not None and reasoning is not ReasoningStart.NEVER):
        grammar = reply_grammar(None, dialect.markers, reasoning, grammar)
    if grammar is not None and payload.thinking_token_budget is not None:
        grammar = _with_budget(grammar, payload.thinking_token_budget, dialect, reasoning)
    reply = ReplyForm("" if form is None else form.name, reasoning)
    if reply != TEXT_ONLY:
        params = replace(params, grammar=grammar, shown_token_ids=dialect.shown_token_ids)
    # The template has already written the special tokens.
    return Draft(params, [prompt], add_special_tokens=False, reply=reply, grammar_parts=parts)


def _with_budget(
    grammar: str, max_tokens: int, dialect: ChatDialect, reasoning: ReasoningStart
) -> str:
    """Return a grammar whose reasoning is bounded; raise InvalidRequestError without reasoning."""
    if reasoning is ReasoningStart.NEVER:
        raise InvalidRequestError(
            "thinking_token_budget cannot be honoured: the reply has no reasoning; leave it out",
            "thinking_token_budget",
        )
    budget = ThinkingBudget(max_tokens, dialect.close_ids, reasoning)
    return with_notes(grammar, {THINKING_NOTE: budget.as_note()})


def _tool_parts(choice: ToolChoice, form: CallForm, dialect: ChatDialect) -> list[GrammarPart]:
    """Return each tool with its own grammar; raise InvalidRequestError for one that is unfit."""
    parts: list[GrammarPart] = []
    for place, tool in choice.tools:
        field, name = f"tools[{place}].function.parameters", tool.function.name
        rules = CallRules(form, [Tool(name, tool.parameters)], is_required=True)
        try:
            parts.append(GrammarPart(field, name, reply_grammar(rules, dialect.markers)))
        except InvalidRequestError as error:
            message = f"{field} of {name} cannot be honoured: {error}"
            raise InvalidRequestError(message, field) from error
    return parts


def _tool_grammar(payload: ChatRequest, dialect: ChatDialect, reasoning: ReasoningStart) -> str:
    """Return the grammar of a reply that may call tools."""
    choice, form, answer = payload.choice(), dialect.tools.form, payload.grammar()
    if choice.is_required:
        answer = None  # a call is the whole reply
    elif answer is not None and not form.follows_text:
        raise InvalidRequestError(
            "response_format cannot be combined with tools here: calls of this model look like "
            "JSON answers; set tool_choice to required or none",
            "response_format",
        )
    rules = CallRules(
        form,
        [Tool(tool.function.name, tool.parameters) for _, tool in choice.tools],
        choice.is_required,
        has_several=payload.parallel_tool_calls is not False and not choice.is_single,
    )
    try:
        return reply_grammar(rules, dialect.markers, reasoning, answer)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"tools cannot be honoured: {error}", "tools") from error


class ChatFormat:
    """Writes a choice as a message; the first chunk of a stream names the role."""

    object_names = ("chat.completion", "chat.completion.chunk")

    def __init__(
        self, context: ServerContext, spec: GenerationSpec, options: AnswerOptions
    ) -> None:
        self._names = TokenNames(context.engine.tokenizer, options.names_tokens_by_id)
        self._prompt = spec.prompts[0]
        self._num_prompt_logprobs = options.num_prompt_logprobs
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
            "message": self._message(piece),
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            **piece.ids(),
        }

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
        return None if piece.tokens is None else chat_logprobs(piece.tokens, self._names)


def _whole_call(call: CallPart) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(call: CallPart) -> dict[str, Any]:
    """Return a part of a call; clients join parts by index, and take id and name once."""
    if call.name is None:
        return {"index": call.number, "function": {"arguments": call.arguments}}
    return {"index": call.number, **_whole_call(call)}


def _make_form(context: ServerContext, job: GenerationJob, generation: Generation) -> ChunkForm:
    return ChunkForm(job, generation, ChatFormat(context, job.spec, job.options))


CHAT = GenerationEndpoint(read_as(ChatRequest), "chatcmpl-", draft_chat, _make_form)
