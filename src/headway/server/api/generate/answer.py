"""The answer to a started generation, whole or streamed; the same for all endpoints."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from headway.core.plan import TokenLogprobs
from headway.core.request import FinishReason
from headway.engine.client.outputs import SampleDelta
from headway.engine.client.transcript import START, Cursor, Position
from headway.errors import ReaderReplacedError, SlowReaderError
from headway.server.api.generate.generation import Generation, GenerationSpec
from headway.server.api.generate.logprobs import ScoredToken
from headway.server.context import ServerContext, run_off_loop
from headway.server.http import sse
from headway.server.http.disconnect import unless_disconnected
from headway.server.http.encoding import JsonResponse
from headway.server.http.errors import ApiError, ErrorResponse, translate
from headway.server.schema.adapted import NO_ECHO, Echo
from headway.server.schema.request import AnswerOptions
from headway.server.streams import ResumableStream
from headway.text.reply import TEXT_ONLY, ReplyForm, ReplyParser
from headway.text.tools.deltas import ReplyDelta, join
from headway.text.tools.forms import FORMS

CALL_ID_CHARS = 24
TOOL_CALLS = "tool_calls"
"""Finish reason of a choice that ends with complete tool calls."""
_REPLACED = ErrorResponse(
    409,
    "another request with this Idempotency-Key gets the answer now",
    "invalid_request_error",
    "idempotency_key_in_use",
)


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of a tool call; the first part has the name, all have the id."""

    number: int
    id: str
    arguments: str
    name: str | None


@dataclass(slots=True)
class ChoicePart:
    """What a choice consists of, all or since the last chunk; endpoints write it in their form.

    `tokens` is None unless the request asked for log-probabilities, and `token_ids` unless it asked
    for them. Reasoning comes before text, and text before calls.
    """

    index: int
    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    tokens: list[ScoredToken] | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    is_first: bool = False
    """Whether nothing of the choice was written before."""
    prompt_scores: Sequence[TokenLogprobs] = ()
    """Of the prompt tokens after the first, with the first part of a choice if wanted."""
    stop: str | None = None
    """The stop string that ended the choice."""
    skipped_ids: tuple[int, ...] = ()
    """Tokens before this part that the client of a resumed stream has."""

    def ids(self) -> dict[str, Any]:
        """Return the token ids as a field of the choice, if they are asked for."""
        return {} if self.token_ids is None else {"token_ids": self.token_ids}


@dataclass(frozen=True, slots=True)
class EventStamp:
    """Where in a stream an event is written, and by which engine its output was computed."""

    numerics: str = ""
    event_id: str = ""
    """From which a client can resume; empty if it cannot."""


NO_STAMP = EventStamp()


class AnswerForm(Protocol):
    """How one endpoint writes one answer, whole or as the events of a stream."""

    @property
    def headers(self) -> Mapping[str, str]: ...

    def begin(self, index: int, stamp: EventStamp) -> bytes:
        """Return the events before the first output of a choice."""
        ...

    def write(self, piece: ChoicePart, stamp: EventStamp) -> bytes:
        """Return the events of a part of a choice."""
        ...

    def end(self, stamp: EventStamp, error: ErrorResponse | None = None) -> bytes:
        """Return the last events; an error is one that came after the status was sent."""
        ...

    def whole(self, pieces: Sequence[ChoicePart], numerics: Sequence[str]) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """One HTTP request, parsed and checked."""

    spec: GenerationSpec
    model: str
    make_form: Callable[[GenerationJob, Generation], AnswerForm]
    is_stream: bool
    options: AnswerOptions
    created: int
    client_id: str = ""
    """The id in the X-Request-Id header of the answer."""
    body_digest: bytes = b""
    """Digest of the body of a request with an Idempotency-Key."""
    reply: ReplyForm = TEXT_ONLY
    echo: Echo = NO_ECHO

    @property
    def is_resumable(self) -> bool:
        return bool(self.spec.note.content)

    @property
    def is_background(self) -> bool:
        """Whether the answer is kept, and made whether or not a client waits for it."""
        return bool(self.echo.fields.get("background"))


async def answer(
    request: Request, context: ServerContext, job: GenerationJob, generation: Generation
) -> Response:
    """Return the answer to a started generation, which ends if the client leaves."""
    context.set_client_id(job.spec.id, job.client_id)
    writer = ResponseWriter(job, generation)
    is_handed_over = False
    try:
        if not job.is_stream:
            return await unless_disconnected(writer.whole(), request.receive)
        # A request that fails soon, and before its first token, still gets an error status.
        beginning = sse.begin(writer.stream(), writer.write_error)
        first, rest = await unless_disconnected(beginning, request.receive)
        is_handed_over = True
        close = generation.close
        if job.is_resumable:
            stream = resumable_stream(context, job, generation)
            context.streams.add(stream)
            close = partial(context.streams.leave, stream, stream.num_readers)
        source = sse.EventSource(first, rest, close)
        return sse.EventStream(source, context.slow_reader_timeout_s, writer.headers)
    finally:
        if not is_handed_over:
            await generation.close()


async def answer_whole(
    context: ServerContext, job: GenerationJob, generation: Generation, revision: int
) -> bytes:
    """Return the body of the answer to a generation that no connection waits for.

    The row in the ledger has at least this revision, so it replaces those of earlier attempts.
    """
    try:
        context.set_client_id(job.spec.id, job.client_id, revision)
        return bytes((await ResponseWriter(job, generation).whole()).body)
    finally:
        await generation.close()


def resumable_stream(
    context: ServerContext, job: GenerationJob, generation: Generation
) -> ResumableStream:
    """Return a stream that later readers can continue after a cursor."""

    def write(cursor: Cursor | None) -> AsyncGenerator[bytes, None]:
        return ResponseWriter(job, generation, cursor).stream()

    def write_error(error: ErrorResponse) -> bytes:
        return ResponseWriter(job, generation).write_error(error)

    def write_whole() -> Coroutine[Any, Any, Response]:
        return ResponseWriter(job, generation).whole()

    return ResumableStream(
        job.spec.terms.tenant,
        generation,
        write,
        write_error,
        None if job.is_stream else write_whole,
        job.spec.note.alias,
        job.body_digest,
        job.make_form(job, generation).headers,
        job.echo.num_bytes,
    )


async def answer_kept(
    request: Request, context: ServerContext, stream: ResumableStream, reader: int
) -> Response:
    """Return the answer of a kept stream from its start; it goes on if the client leaves."""
    leave = partial(context.streams.leave, stream, reader)
    is_handed_over = False
    try:
        whole = await unless_disconnected(stream.whole(reader), request.receive)
        if whole is not None:
            return whole
        beginning = sse.begin(stream.events(reader, None), stream.write_error)
        first, rest = await unless_disconnected(beginning, request.receive)
        is_handed_over = True
        source = sse.EventSource(first, rest, leave)
        return sse.EventStream(source, context.slow_reader_timeout_s, stream.headers)
    except ReaderReplacedError as error:
        raise ApiError(_REPLACED) from error
    finally:
        if not is_handed_over:
            await leave()


@dataclass(slots=True)
class _OpenChoice:
    """A growing choice, with what is not written yet of its reply and tokens."""

    index: int
    parser: ReplyParser
    make_call_id: Callable[[int, int], str]
    """Returns the id of a tool call, from the indices of its choice and of itself."""
    has_logprobs: bool
    has_token_ids: bool
    num_tokens: int = 0
    """Tokens so far, written or not."""
    num_written: int = 0
    """Tokens that the client has, or had before it came back."""
    is_open: bool = False
    is_ended: bool = False
    reply: list[ReplyDelta] = field(default_factory=list[ReplyDelta])
    tokens: list[ScoredToken] = field(default_factory=list[ScoredToken])
    token_ids: list[int] = field(default_factory=list[int])
    skipped_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop: str | None = None

    def add(self, delta: SampleDelta) -> None:
        self.num_tokens += len(delta.skipped_ids) + len(delta.token_ids)
        self.skipped_ids += delta.skipped_ids
        if delta.skipped_text:
            # The client has what this gives; the state of the parser must follow from all text.
            self.parser.feed(delta.skipped_text)
        if delta.text:
            self._extend(self.parser.feed(delta.text))
        if self.has_token_ids:
            self.token_ids.extend(delta.token_ids)
        if self.has_logprobs:
            self.tokens.extend(zip(delta.token_ids, delta.logprobs or (), strict=False))
        if delta.finish_reason is not None:
            self._extend(self.parser.finish())
            is_whole = delta.finish_reason == FinishReason.STOP and self.parser.ends_with_calls
            self.finish_reason = TOOL_CALLS if is_whole else str(delta.finish_reason)
            self.stop = delta.stop

    def _extend(self, reply: ReplyDelta) -> None:
        if reply:
            self.reply.append(reply)

    @property
    def is_worth_sending(self) -> bool:
        return self.finish_reason is not None or bool(self.reply)

    @property
    def num_scores(self) -> int:
        """Number of log-probabilities that are not written yet."""
        return sum(1 + len(scores.top_ids) for _, scores in self.tokens)

    def take(self) -> ChoicePart:
        tokens = self.tokens if self.has_logprobs else None
        token_ids = self.token_ids if self.has_token_ids else None
        reply = join(self.reply)
        calls = tuple(
            CallPart(one.number, self.make_call_id(self.index, one.number), one.arguments, one.name)
            for one in reply.calls
        )
        piece = ChoicePart(
            self.index,
            reply.text,
            reply.reasoning,
            calls,
            tokens,
            self.finish_reason,
            token_ids,
            is_first=self.num_written == 0,
            stop=self.stop,
            skipped_ids=self.skipped_ids,
        )
        self.reply, self.tokens, self.token_ids, self.skipped_ids = [], [], [], ()
        self.num_written = max(self.num_written, self.num_tokens)
        self.is_ended = self.finish_reason is not None
        return piece

    @property
    def position(self) -> Position:
        return Position(self.num_written, self.is_ended, self.is_open)


def call_id(request_id: str, reply: ReplyForm, index: int, number: int) -> str:
    """Return the id of a tool call: the same whenever and wherever its stream is written."""
    digest = blake2b(f"{request_id}/{index}/{number}".encode()).hexdigest()
    size = FORMS[reply.calls].id_chars
    return f"call_{digest[:CALL_ID_CHARS]}" if size is None else digest[:size]


class ResponseWriter:
    """Writes one answer; used once, for a whole answer or for a stream.

    With a cursor, the rest of a stream: its client has what comes before.
    """

    def __init__(
        self, job: GenerationJob, generation: Generation, cursor: Cursor | None = None
    ) -> None:
        self._job = job
        self._form = job.make_form(job, generation)
        self._generation = generation
        self._cursor = cursor
        self._is_resumable = job.is_resumable
        self._choices: dict[int, _OpenChoice] = {}
        self._numerics: dict[str, None] = {}
        """Numerics classes of the engines so far, in order of their first token."""

    @property
    def headers(self) -> Mapping[str, str]:
        return self._form.headers

    def write_error(self, error: ErrorResponse) -> bytes:
        """Return the events that end a stream with an error."""
        return self._form.end(NO_STAMP, error)

    async def whole(self) -> Response:
        async with contextlib.aclosing(self._generation.deltas()) as batches:
            async for batch in batches:
                for delta in batch:
                    self._numerics.setdefault(delta.numerics)
                    self._choice(delta.index).add(delta)
        num_scores = sum(choice.num_scores for choice in self._choices.values())
        num_scores += sum(map(self._num_prompt_scores, self._choices))
        return await run_off_loop(num_scores, self._write_whole)

    def _write_whole(self) -> Response:
        pieces = [self._take(self._choices[index]) for index in sorted(self._choices)]
        content = self._form.whole(pieces, list(self._numerics))
        return JsonResponse(content, headers=self.headers)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream; the events of one step are one piece."""
        is_begun = self._cursor is not None
        try:
            async with contextlib.aclosing(self._generation.deltas()) as batches:
                async for batch in batches:
                    num_scores = sum([self._num_prompt_scores(one.index) for one in batch])
                    events = await run_off_loop(num_scores, partial(self._write, batch))
                    if events:
                        is_begun = True
                        yield events
            end = self._form.end(self._stamp())
        except (SlowReaderError, ReaderReplacedError):
            raise
        except Exception as error:
            if not is_begun:
                raise
            # The status is already sent, so the error goes into the stream.
            end = self.write_error(translate(error))
        yield end

    def _write(self, batch: Sequence[SampleDelta]) -> bytes:
        return b"".join([self._events(delta) for delta in batch])

    def _take(self, choice: _OpenChoice) -> ChoicePart:
        piece = choice.take()
        if piece.is_first:
            piece.prompt_scores = self._generation.prompt_scores(choice.index)
        return piece

    def _num_prompt_scores(self, index: int) -> int:
        """Return the log-probabilities of the prompt that a choice has yet to write."""
        num_top = self._job.spec.params.prompt_logprobs
        if num_top is None or self._choice(index).num_written:
            return 0
        return len(self._generation.prompt_scores(index)) * (1 + num_top)

    def _events(self, delta: SampleDelta) -> bytes:
        events = b""
        choice = self._choice(delta.index)
        is_new, choice.is_open = not choice.is_open, True
        if is_new:
            events = self._form.begin(delta.index, self._stamp(delta.numerics))
        choice.add(delta)
        # Tokens without text yet (part of a character, of a stop string, of a marker) stay in the
        # choice until the next text.
        if choice.is_worth_sending:
            events += self._form.write(self._take(choice), self._stamp(delta.numerics))
        return events

    def _stamp(self, numerics: str = "") -> EventStamp:
        return EventStamp(numerics, self._event_id() if self._is_resumable else "")

    def _event_id(self) -> str:
        """Return the id of the next event, from which its client can resume."""
        choices = map(self._choice, range(self._job.spec.params.n))
        return f"{self._generation.id}.{','.join([str(one.position) for one in choices])}"

    def _choice(self, index: int) -> _OpenChoice:
        choice = self._choices.get(index)
        if choice is None:
            has_logprobs = self._job.spec.params.logprobs is not None
            at = START if self._cursor is None else self._cursor.of(index)
            has_token_ids = self._job.options.returns_token_ids
            parser = ReplyParser(self._job.reply, self._job.spec.params.grammar)
            make_call_id = partial(call_id, self._generation.id, self._job.reply)
            choice = _OpenChoice(index, parser, make_call_id, has_logprobs, has_token_ids)
            self._choices[index] = choice
            choice.num_written, choice.is_ended, choice.is_open = at
        return choice
