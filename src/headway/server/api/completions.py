"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headway.engine.client.outputs import PROMPT_TAIL
from headway.server.api.answer import ChoicePart, GenerationJob
from headway.server.api.chunks import ChunkForm
from headway.server.api.endpoint import Draft, GenerationEndpoint
from headway.server.api.generation import Generation, GenerationSpec
from headway.server.api.logprobs import CompletionLogprobsWriter
from headway.server.context import ServerContext
from headway.server.http.routing import Routes
from headway.server.schema.adapted import read_as
from headway.server.schema.completions import CompletionRequest
from headway.server.schema.request import RequestLimits


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
    """Writes a choice as text; a chunk has the form of a whole choice."""

    object_names = ("text_completion", "text_completion")

    def __init__(self, context: ServerContext, spec: GenerationSpec) -> None:
        self._tokenizer = context.engine.tokenizer
        self._spec = spec
        self._logprobs: dict[int, CompletionLogprobsWriter] = {}

    def opening(self, index: int) -> None:
        return None

    def chunk(self, piece: ChoicePart) -> dict[str, Any]:
        if piece.skipped_ids and self._spec.params.logprobs is not None:
            self._writer(piece.index).skip(piece.skipped_ids)
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._write_logprobs(piece),
            "finish_reason": piece.finish_reason,
            **self._ids(piece),
        }

    def whole(self, piece: ChoicePart) -> dict[str, Any]:
        return self.chunk(piece)

    def _ids(self, piece: ChoicePart) -> dict[str, Any]:
        ids = piece.ids()
        if ids and piece.is_first:
            ids["prompt_token_ids"] = list(self._spec.prompts[piece.index // self._spec.params.n])
        return ids

    def _write_logprobs(self, piece: ChoicePart) -> dict[str, Any] | None:
        return None if piece.tokens is None else self._writer(piece.index).write(piece.tokens)

    def _writer(self, index: int) -> CompletionLogprobsWriter:
        writer = self._logprobs.get(index)
        if writer is None:
            prompt = self._spec.prompts[index // self._spec.params.n]
            detokenizer = self._tokenizer.detokenizer(
                self._spec.params.skip_special_tokens, after=prompt[-PROMPT_TAIL:]
            )
            writer = CompletionLogprobsWriter(self._tokenizer, detokenizer)
            self._logprobs[index] = writer
        return writer


def _make_form(context: ServerContext, job: GenerationJob, generation: Generation) -> ChunkForm:
    return ChunkForm(job, generation, CompletionFormat(context, job.spec))


COMPLETIONS = GenerationEndpoint(read_as(CompletionRequest), "cmpl-", _draft, _make_form)
