"""An endpoint that generates text: from an HTTP request to a generation, and to its answer.

A request with an Idempotency-Key is answered once: the same request again, of the same tenant and
with the same key, gets the answer that is under way or kept, here or at another frontend.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Generic

from starlette.requests import Request
from starlette.responses import Response

from headway.core.params import SamplingParams
from headway.engine.client.inputs import with_bad_words
from headway.engine.client.transcript import Cursor
from headway.engine.process.messages import NO_NOTE, Note
from headway.errors import InvalidRequestError
from headway.observe.spans.spans import Attribute
from headway.server.admission import Reservation
from headway.server.api.generate.adopted import adopt_stream
from headway.server.api.generate.answer import (
    AnswerForm,
    GenerationJob,
    answer,
    answer_kept,
    resumable_stream,
)
from headway.server.api.generate.generation import Generation, GenerationSpec
from headway.server.background import LogSpace, estimate_bytes
from headway.server.context import Caller, ServerContext, read_body, run_off_loop
from headway.server.http.errors import ApiError, ErrorResponse
from headway.server.http.idempotency import alias_of
from headway.server.prompt_log import PromptLog
from headway.server.schema.adapted import ReadRequest, RequestT
from headway.server.schema.request import GenerationRequest, RequestLimits
from headway.server.streams import NOTE_VERSION, ResumableStream, StreamNote, encode_note
from headway.text.reply import TEXT_ONLY, ReplyForm

logger = logging.getLogger(__name__)

ADOPT_S = 1.0
"""How long engines have to say whether they have a request with this Idempotency-Key."""
AnswerWith = Callable[[Request, ServerContext, GenerationJob, Generation], Awaitable[Response]]
_OTHER_BODY = ErrorResponse(
    422,
    "this Idempotency-Key was used with another request; use a new key for a new request",
    "invalid_request_error",
    "idempotency_key_reused",
)


@dataclass(frozen=True, slots=True)
class RepeatKey:
    """By what a request is known when it is sent again; both empty without an Idempotency-Key."""

    alias: str = ""
    body_digest: bytes = b""


NO_REPEAT = RepeatKey()


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """What one part of a request adds to the grammar, as a grammar of its own."""

    field: str
    name: str
    """What the caller calls it."""
    grammar: str


@dataclass(frozen=True, slots=True)
class Draft:
    """A request as it will be sent to the engine, before its prompts are tokenized."""

    params: SamplingParams
    prompts: Sequence[str | list[int]]
    add_special_tokens: bool = False
    """To prompts that are text."""
    reply: ReplyForm = TEXT_ONLY
    grammar_parts: Sequence[GrammarPart] = ()
    """To find the part of the request that is refused, if the whole grammar is."""

    def encode(self, payload: GenerationRequest, context: ServerContext) -> list[list[int]]:
        """Return the prompts as token ids."""
        return [
            payload.truncate(
                context.encode(prompt, add_special_tokens=self.add_special_tokens)
                if isinstance(prompt, str)
                else prompt
            )
            for prompt in self.prompts
        ]


@dataclass(frozen=True, slots=True)
class GenerationEndpoint(Generic[RequestT]):
    """What an endpoint that generates text has of its own."""

    read: Callable[[bytes, RequestLimits], ReadRequest[RequestT]]
    """Returns a body as a checked request."""
    id_prefix: str
    draft: Callable[[RequestT, ServerContext], Draft]
    make_form: Callable[[ServerContext, GenerationJob, Generation], AnswerForm]
    answer: AnswerWith = answer
    """Answers a started generation, and sees to its end."""

    def request_id(self, name: str) -> str:
        """Return the id of a request by the name it has without its endpoint."""
        return f"{self.id_prefix}{name}"

    async def respond(
        self, request: Request, context: ServerContext, limits: RequestLimits
    ) -> Response:
        if alias := alias_of(request):
            stream, reader = await self._find_or_begin(request, context, limits, alias)
            return await answer_kept(request, context, stream, reader)
        job, generation = await self._begin(request, context, limits)
        return await self.answer(request, context, job, generation)

    async def _begin(
        self, request: Request, context: ServerContext, limits: RequestLimits
    ) -> tuple[GenerationJob, Generation]:
        """Read the request and send it to the engine; the body is freed on return."""
        with context.admit(request) as reservation:
            read = await self._read(await read_body(request), limits)
            return await self._start(Caller.of(request), context, reservation, read)

    async def begin(
        self, caller: Caller, context: ServerContext, limits: RequestLimits, body: bytes
    ) -> tuple[GenerationJob, Generation]:
        """Send a request that came by no connection to the engine, as one that did."""
        with context.admit_body(caller.record, len(body)) as reservation:
            read = await self._read(body, limits)
            return await self._start(caller, context, reservation, read)

    async def _read(self, body: bytes, limits: RequestLimits) -> ReadRequest[RequestT]:
        return await run_off_loop(len(body), lambda: self.read(body, limits))

    async def _find_or_begin(
        self, request: Request, context: ServerContext, limits: RequestLimits, alias: str
    ) -> tuple[ResumableStream, int]:
        """Return the stream of a request with an Idempotency-Key, and the number of its reader."""
        streams, tenant = context.streams, request.state.tenant
        is_repeat = streams.find_alias(alias, tenant) is not None
        with context.admit(request, is_repeat) as reservation:
            body = await read_body(request)
            digest = blake2b(body, digest_size=16, person=self.id_prefix.encode()).digest()
            async with streams.one_at_a_time(alias):
                stream, read = streams.find_alias(alias, tenant), None
                if stream is None:
                    read = await self._read(body, limits)
                    found = await context.engine.adopt(alias, tenant, ADOPT_S)
                    forms = {self.id_prefix: self}
                    take_lease = reservation.take_lease
                    stream = await adopt_stream(context, found, forms, take_lease, read.echo)
                if stream is not None:
                    if stream.body_digest != digest:
                        raise ApiError(_OTHER_BODY)
                    reader = await streams.attach(stream, Cursor())
                    if reader is not None:
                        return stream, reader
                if reservation.lease is None:
                    context.open_lease(request, reservation)
                read = read or await self._read(body, limits)
                repeat = RepeatKey(alias, digest)
                job, generation = await self._start(
                    Caller.of(request), context, reservation, read, repeat
                )
                context.set_client_id(job.spec.id, job.client_id)
                stream = resumable_stream(context, job, generation)
                streams.add(stream)
                return stream, stream.num_readers

    async def _start(
        self,
        caller: Caller,
        context: ServerContext,
        reservation: Reservation,
        read: ReadRequest[RequestT],
        repeat: RepeatKey = NO_REPEAT,
    ) -> tuple[GenerationJob, Generation]:
        """Send the prompts to the engine; the caller must see to their end."""
        payload = read.payload
        try:
            caller.check_permissions(payload)
            job = await self._make_job(read, context, caller, repeat)
            prompts = job.spec.prompts
            if repeat.alias and len(prompts) > 1:
                raise InvalidRequestError(
                    "a request with an Idempotency-Key has one prompt; send one request per prompt",
                    "prompt",
                )
            if repeat.alias and payload.prompt_field is not None:
                raise InvalidRequestError(
                    f"a request with an Idempotency-Key cannot have {payload.prompt_field}",
                    payload.prompt_field,
                )
            if repeat.alias and job.is_background:
                raise InvalidRequestError(
                    "a background response cannot have an Idempotency-Key; leave one of them out",
                    "background",
                )
            payload.check_scores(sum(map(len, prompts)))
            context.admission.resize(reservation, len(prompts), sum(map(len, prompts)))
            if context.prompt_log is not None:
                await _log_prompts(context, context.prompt_log, job)
            span = context.begun_span(job.spec.id, caller, _asked(job))
            with _claim_log(context, job, caller), span:
                await context.admission.reserve_shared(reservation)
                generation = Generation(context.engine, job.spec, reservation.take_lease())
                await generation.start()
        except InvalidRequestError as error:
            raise read.named(error) from error
        context.live.add(generation, job.spec, job.client_id)
        context.metrics.observe_params(generation.resolved_params)
        return job, generation

    async def _make_job(
        self,
        read: ReadRequest[RequestT],
        context: ServerContext,
        caller: Caller,
        repeat: RepeatKey,
    ) -> GenerationJob:
        payload, num_bytes = read.payload, read.num_bytes
        model = context.model_name(payload.model)
        tokenizer, terms = context.engine.tokenizer, payload.terms(caller.record.terms)
        draft = await run_off_loop(num_bytes, lambda: self.draft(payload, context))
        params = await run_off_loop(num_bytes, lambda: with_bad_words(draft.params, tokenizer))
        if params.grammar is not None:
            await _check_grammar(context, payload, draft, terms.tenant)
        prompts = await run_off_loop(num_bytes, lambda: draft.encode(payload, context))
        request_id = self.request_id(caller.request_id or context.new_id())
        priority, created = payload.priority or 0, int(context.time_of_day())
        client_id, options = caller.client_id, payload.answer_options
        is_stream = bool(payload.stream)
        note = NO_NOTE
        if payload.is_resumable or repeat.alias:
            about = StreamNote(
                NOTE_VERSION,
                self.id_prefix,
                model,
                created,
                options,
                client_id,
                is_stream,
                repeat.body_digest,
                draft.reply,
            )
            note = Note(encode_note(about), repeat.alias)
        spec = GenerationSpec(request_id, prompts, params, priority, terms, note)
        make_form = partial(self.make_form, context)
        job = GenerationJob(
            spec, model, make_form, is_stream, options, created, client_id, repeat.body_digest
        )
        return replace(job, reply=draft.reply, echo=read.echo)


def _asked(job: GenerationJob) -> dict[str, Attribute]:
    """Return what the client asked for, as attributes of its span."""
    params = job.spec.params
    asked: dict[str, Attribute | None] = {
        "gen_ai.request.model": job.model,
        "gen_ai.response.model": job.model,
        "gen_ai.request.stream": job.is_stream,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
    }
    return {name: value for name, value in asked.items() if value is not None}


async def _log_prompts(context: ServerContext, log: PromptLog, job: GenerationJob) -> None:
    """Log the prompts of a request; an exception must not end it."""
    spec, tokenizer = job.spec, context.engine.tokenizer
    write = partial(log.write, spec.id, spec.terms.tenant, spec.prompts, tokenizer)
    try:
        await asyncio.to_thread(write)
    except Exception:
        logger.exception("the prompts of request %s cannot be logged", spec.id)


def _claim_log(
    context: ServerContext, job: GenerationJob, caller: Caller
) -> AbstractContextManager[None]:
    """Claim room for the log of a background response, or refuse it."""
    if not job.is_background:
        return nullcontext()
    spec, record = job.spec, caller.record
    num_prompt, num_tokens = len(spec.prompts[0]), spec.params.max_tokens
    if num_tokens is None:
        num_tokens = context.engine.info.capacity.max_model_len - num_prompt
    num_bytes = estimate_bytes(job.echo.num_bytes, spec.params, num_tokens)
    tenant = record.tenant.name
    gateway = tenant if record.gateway is None else record.gateway
    return context.background.claim(LogSpace(spec.id, tenant, gateway, num_bytes))


async def _check_grammar(
    context: ServerContext, payload: GenerationRequest, draft: Draft, tenant: str
) -> None:
    try:
        await context.grammars.check(draft.params.grammar or "", tenant)
    except InvalidRequestError as error:
        for part in draft.grammar_parts:
            await _check_part(context, part, tenant)
        field = payload.grammar_field
        raise InvalidRequestError(f"{field} cannot be honoured: {error}", field) from error


async def _check_part(context: ServerContext, part: GrammarPart, tenant: str) -> None:
    try:
        await context.grammars.check(part.grammar, tenant, is_kept=False)
    except InvalidRequestError as error:
        message = f"{part.field} of {part.name} cannot be honoured: {error}"
        raise InvalidRequestError(message, part.field) from error
