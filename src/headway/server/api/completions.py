"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headway.server.api.generate.answer import ChoicePart, GenerationJob
from headway.server.api.generate.chunks import ChunkForm
from headway.server.api.generate.endpoint import Draft, GenerationEndpoint
from headway.server.api.generate.generation import Generation, GenerationSpec
from headway.server.api.generate.logprobs import (
    CompletionLogprobsWriter,
    TokenNames,
    prompt_logprobs,
)
from headway.server.context import ServerContext
from headway.server.http.routing import Routes
from headway.server.schema.adapted import read_as
from headway.server.schema.completions import CompletionRequest
from headway.server.schema.request import AnswerOptions, RequestLimits


def completions_router(context: ServerContext, limits: RequestLimits) -> Routes:
    """Return the route of this endpoint."""
    router = Routes()

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        return await COMPLETIONS.respond(request, context, limits)

    return router


def _draft(payload: CompletionRequest, context: ServerContext) -> Draft:
    del context
    return Draft(payload.params(), payload.prompts(), add_special_tokens=True)


class CompletionFormat:
    """Writes a choice as text; a chunk has the form of a whole choice.

    With `echo`, the first part of a choice begins with the prompt.
    """

    object_names = ("text_completion", "text_completion")

    def __init__(
        self, context: ServerContext, spec: GenerationSpec, options: AnswerOptions
    ) -> None:
        self._tokenizer = context.engine.tokenizer
        self._names = TokenNames(self._tokenizer, options.names_tokens_by_id)
        self._spec = spec
        self._options = options
        self._logprobs: dict[int, CompletionLogprobsWriter] = {}

    def opening(self, index: int) -> None:
        return None

    def chunk(self, piece: ChoicePart) -> dict[str, Any]:
        is_echo = self._options.echoes_prompt and piece.is_first
        if piece.skipped_ids and self._spec.params.logprobs is not None:
            self._writer(piece.index).skip(piece.skipped_ids)
        return {
            "index": piece.index,
            "text": self._echo(piece) + piece.text if is_echo else piece.text,
            "logprobs": self._write_logprobs(piece, is_echo),
            "finish_reason": piece.finish_reason,
            **self._prompt_logprobs(piece),
            **self._ids(piece),
        }

    def whole(self, pieces: Sequence[ChoicePart]) -> dict[str, Any]:
        return {"choices": [self.chunk(piece) for piece in pieces]}

    def _prompt(self, piece: ChoicePart) -> Sequence[int]:
        return self._spec.prompts[piece.index // self._spec.params.n]

    def _echo(self, piece: ChoicePart) -> str:
        return self._tokenizer.decode(self._prompt(piece), self._spec.params.skip_special_tokens)

    def _ids(self, piece: ChoicePart) -> dict[str, Any]:
        ids = piece.ids()
        if ids and piece.is_first:
            ids["prompt_token_ids"] = list(self._prompt(piece))
        return ids

    def _prompt_logprobs(self, piece: ChoicePart) -> dict[str, Any]:
        num_top = self._options.num_prompt_logprobs
        if num_top is None:
            return {}
        scores = prompt_logprobs(self._prompt(piece), piece.prompt_scores, num_top, self._names)
        return {"prompt_logprobs": scores}

    def _write_logprobs(self, piece: ChoicePart, is_echo: bool) -> dict[str, Any] | None:
        if piece.tokens is None:
            return None
        writer = self._writer(piece.index)
        before = writer.write_prompt(piece.prompt_scores) if is_echo else {}
        written = writer.write(piece.tokens)
        return {name: [*before.get(name, ()), *written[name]] for name in written}

    def _writer(self, index: int) -> CompletionLogprobsWriter:
        writer = self._logprobs.get(index)
        if writer is None:
            params = self._spec.params
            prompt = self._spec.prompts[index // params.n]
            writer = CompletionLogprobsWriter(self._tokenizer, self._names, prompt, params)
            self._logprobs[index] = writer
        return writer


def _make_form(context: ServerContext, job: GenerationJob, generation: Generation) -> ChunkForm:
    return ChunkForm(job, generation, CompletionFormat(context, job.spec, job.options))


COMPLETIONS = GenerationEndpoint(read_as(CompletionRequest), "cmpl-", _draft, _make_form)
