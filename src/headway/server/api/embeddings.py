"""POST /v1/embeddings: the normalized last hidden state of each input.

An input is a request without output: it waits, is charged and is preempted as others are.
"""

from __future__ import annotations

import base64
import contextlib
import math
from array import array
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headway.core.params import SamplingParams
from headway.errors import InvalidRequestError
from headway.server.api.generate.generation import Generation, GenerationSpec
from headway.server.context import Caller, ServerContext, read_body, run_off_loop
from headway.server.http.disconnect import unless_disconnected
from headway.server.http.encoding import JsonResponse
from headway.server.http.routing import Routes
from headway.server.schema.embeddings import EmbeddingRequest
from headway.server.schema.request import RequestLimits, parse

_PARAMS = SamplingParams(max_tokens=0, is_embedding=True)


@dataclass(frozen=True, slots=True)
class EmbeddingJob:
    """One HTTP request, parsed and checked."""

    generation: Generation
    num_inputs: int
    model: str
    dimensions: int
    is_base64: bool


def embeddings_router(context: ServerContext, limits: RequestLimits) -> Routes:
    """Return the route of this endpoint."""
    router = Routes()

    @router.post("/v1/embeddings")
    async def create_embeddings(request: Request) -> Response:
        job = await _begin(request, context, limits)
        try:
            return await unless_disconnected(_answer(job), request.receive)
        finally:
            await job.generation.close()

    return router


async def _begin(request: Request, context: ServerContext, limits: RequestLimits) -> EmbeddingJob:
    """Read the request and send its inputs to the engine; the caller closes the generation."""
    caller = Caller.of(request)
    with context.admit(request) as reservation:
        body = await read_body(request)
        payload = await run_off_loop(len(body), lambda: parse(EmbeddingRequest, body, limits))
        model, hidden_size = context.model_name(payload.model), context.engine.info.hidden_size
        dimensions = payload.dimensions or hidden_size
        if dimensions > hidden_size:
            raise InvalidRequestError(
                f"dimensions must be at most {hidden_size} for this model, got {dimensions}",
                "dimensions",
            )
        try:
            inputs = await run_off_loop(len(body), lambda: _encode(payload, context))
            context.admission.resize(reservation, len(inputs), sum(map(len, inputs)))
            await context.admission.reserve_shared(reservation)
            request_id = f"embd-{context.new_id()}"
            spec = GenerationSpec(request_id, inputs, _PARAMS, terms=caller.record.terms)
            generation = Generation(context.engine, spec, reservation.take_lease())
            with context.begun_span(request_id, caller, {"gen_ai.request.model": model}):
                await generation.start()
        except InvalidRequestError as error:
            error.param = "input" if error.param in ("prompt", "max_tokens") else error.param
            raise
    context.live.add(generation, spec, caller.client_id)
    context.set_client_id(request_id, caller.client_id)
    is_base64 = payload.encoding_format == "base64"
    return EmbeddingJob(generation, len(inputs), model, dimensions, is_base64)


def _encode(payload: EmbeddingRequest, context: ServerContext) -> list[list[int]]:
    limit = payload.truncate_prompt_tokens
    inputs = [
        context.encode(one, add_special_tokens=True) if isinstance(one, str) else one
        for one in payload.inputs()
    ]
    return inputs if limit is None else [token_ids[-limit:] for token_ids in inputs]


async def _answer(job: EmbeddingJob) -> Response:
    async with contextlib.aclosing(job.generation.deltas()) as batches:
        async for _ in batches:
            pass
    return await run_off_loop(job.num_inputs * job.dimensions, lambda: _write(job))


def _write(job: EmbeddingJob) -> Response:
    data: list[dict[str, Any]] = [
        {"object": "embedding", "index": index, "embedding": _vector(job, index)}
        for index in range(job.num_inputs)
    ]
    num_tokens = job.generation.usage()["prompt_tokens"]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return JsonResponse({"object": "list", "data": data, "model": job.model, "usage": usage})


def _vector(job: EmbeddingJob, index: int) -> list[float] | str:
    """Return an embedding of length 1, cut to its first dimensions before that."""
    values = array("f", job.generation.embedding(index))[: job.dimensions]
    length = math.sqrt(math.fsum([one * one for one in values])) or 1.0
    unit = array("f", [one / length for one in values])
    return base64.b64encode(unit.tobytes()).decode() if job.is_base64 else unit.tolist()
