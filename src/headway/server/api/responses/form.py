"""The answer of /v1/responses: a response object, or the events that add up to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headway.core.request import FinishReason
from headway.engine.client.outputs import output_detokenizer
from headway.server.api.generate.answer import CallPart, ChoicePart, EventStamp, GenerationJob
from headway.server.api.generate.generation import Generation
from headway.server.api.generate.logprobs import TokenNames, chat_logprobs
from headway.server.api.responses.items import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    CallItem,
    CustomCallItem,
    Item,
    TextItem,
)
from headway.server.api.responses.text_tokens import TextTokens
from headway.server.context import ServerContext
from headway.server.http import sse
from headway.server.http.errors import REQUEST_CANCELLED, ErrorResponse
from headway.server.schema.responses import custom_names
from headway.text.reply import TEXT_ONLY, ReplyParser

IGNORED_HEADER = "x-headway-ignored-tools"
FAILED, CANCELLED, QUEUED = "failed", "cancelled", "queued"
_TOO_MANY_REQUESTS = 429

Json = dict[str, Any]


class ResponseForm:
    """Writes one answer; the whole answer and the events come from the same items."""

    def __init__(self, context: ServerContext, job: GenerationJob, generation: Generation) -> None:
        self._context = context
        self._job = job
        self._generation = generation
        self._custom_names = custom_names(job.echo.fields["tools"])
        ignored = job.echo.ignored_tools
        self.headers: Mapping[str, str] = {IGNORED_HEADER: ", ".join(ignored)} if ignored else {}
        self._items: list[Item] = []
        self._done: list[Json] = []
        """Items that are closed, as the answer has them."""
        self._finish_reason: str | None = None
        self._num_events = 0
        self._text_tokens = _find_text_tokens(context, job)
        self._scores: list[Json] = []
        """Log-probabilities of the message that no item has yet."""

    def begin(self, index: int, stamp: EventStamp) -> bytes:
        del index, stamp
        names = (IN_PROGRESS,) if self._num_events else ("created", IN_PROGRESS)
        return self._beginning(IN_PROGRESS, names)

    def queue(self) -> bytes:
        """Return the events before `begin` of a response that nobody may wait for."""
        return self._beginning(QUEUED, ("created", QUEUED))

    def write(self, piece: ChoicePart, stamp: EventStamp) -> bytes:
        del stamp
        return self._events(self._add(piece))

    def end(self, stamp: EventStamp, error: ErrorResponse | None = None) -> bytes:
        del stamp
        if error is None:
            events = self._events(self._finish())
            status = self._status
            last = {"type": f"response.{status}", "response": self._response(status)}
            return events + self._events([last]) + sse.DONE
        events = b"" if self._num_events else self.begin(0, EventStamp())
        events += self._events(self._close(INCOMPLETE))
        if error == REQUEST_CANCELLED and self._job.is_background:
            # Clients know no event for this end; the status of the response tells.
            last = {"type": "response.failed", "response": self._response(CANCELLED)}
            return events + self._events([last]) + sse.DONE
        about = {"code": error.code, "message": error.message, "param": error.param}
        response = self._response(FAILED, error)
        failure = {"type": "error", **about}, {"type": "response.failed", "response": response}
        return events + self._events(failure) + sse.DONE

    def whole(self, pieces: Sequence[ChoicePart], numerics: Sequence[str]) -> Json:
        del numerics
        for piece in pieces:
            self._add(piece)
        self._finish()
        return self._response(self._status)

    def snapshot(self) -> Json:
        """Return the response as it stands, before its end."""
        response = self._response(QUEUED if self._generation.is_waiting else IN_PROGRESS)
        item = self._open_item
        if item is not None:
            response["output"].append(item.whole(IN_PROGRESS))
        return response

    def _beginning(self, status: str, names: Sequence[str]) -> bytes:
        response = self._response(status)
        return self._events({"type": f"response.{name}", "response": response} for name in names)

    @property
    def _status(self) -> str:
        return INCOMPLETE if self._finish_reason == FinishReason.LENGTH else COMPLETED

    def _add(self, piece: ChoicePart) -> list[Json]:
        """Return the events of a part of the reply."""
        events: list[Json] = []
        self._scores += self._scores_of(piece)
        if piece.reasoning:
            events += self._open_text(is_reasoning=True)
            events += self._grow(piece.reasoning, [])
        if piece.text or self._is_in_message:
            events += self._open_text(is_reasoning=False)
            events += self._grow(piece.text, self._take_scores())
        for call in piece.calls:
            if call.name is not None:
                events += self._open_call(call, call.name)
            item = self._items[-1]
            if isinstance(item, CallItem):
                events += self._placed(item.add(call.arguments))
        self._finish_reason = piece.finish_reason or self._finish_reason
        return events

    def _scores_of(self, piece: ChoicePart) -> list[Json]:
        """Return the log-probabilities of the tokens in the message, as far as they are known."""
        tokens = piece.tokens or []
        if self._text_tokens is not None:
            tokens = self._text_tokens.push(tokens)
            if piece.finish_reason is not None:
                tokens += self._text_tokens.finish()
        names = TokenNames(self._context.engine.tokenizer)
        return chat_logprobs(tokens, names)["content"]

    def _take_scores(self) -> list[Json]:
        scores, self._scores = self._scores, []
        return scores

    @property
    def _is_in_message(self) -> bool:
        item = self._open_item
        return isinstance(item, TextItem) and not item.is_reasoning

    @property
    def _open_item(self) -> Item | None:
        return self._items[-1] if len(self._items) > len(self._done) else None

    def _grow(self, text: str, logprobs: list[Json]) -> list[Json]:
        item = self._items[-1]
        return self._placed(item.add(text, logprobs)) if isinstance(item, TextItem) else []

    def _open_text(self, is_reasoning: bool) -> list[Json]:
        item = self._open_item
        if isinstance(item, TextItem) and item.is_reasoning == is_reasoning:
            return []
        return self._open(TextItem(self._new_id("rs" if is_reasoning else "msg"), is_reasoning))

    def _open_call(self, call: CallPart, name: str) -> list[Json]:
        is_custom = name in self._custom_names
        kind, prefix = (CustomCallItem, "ctc") if is_custom else (CallItem, "fc")
        return self._open(kind(self._new_id(prefix), call.id, name))

    def _open(self, item: Item) -> list[Json]:
        events = self._close(COMPLETED)
        self._items.append(item)
        return events + self._placed(item.opening())

    def _finish(self) -> list[Json]:
        """Return the events that close the last item; an answer has at least a message."""
        opening: list[Json] = []
        if not self._items:
            opening = self._open_text(is_reasoning=False)
            self._grow("", self._take_scores())
        return opening + self._close(self._status)

    def _close(self, status: str) -> list[Json]:
        item = self._open_item
        if item is None:
            return []
        events = self._placed(item.closing(status))
        self._done.append(item.whole(status))
        return events

    def _placed(self, events: list[Json]) -> list[Json]:
        return [{**event, "output_index": len(self._items) - 1} for event in events]

    def _events(self, events: Iterable[Json]) -> bytes:
        written: list[bytes] = []
        for event in events:
            written.append(sse.typed_event({**event, "sequence_number": self._num_events}))
            self._num_events += 1
        return b"".join(written)

    def _new_id(self, prefix: str) -> str:
        """Return an id of the next item: the same whenever the answer is written."""
        name = self._generation.id.rpartition("_")[2]
        return f"{prefix}_{name}{len(self._items):02x}"

    def _response(self, status: str, error: ErrorResponse | None = None) -> Json:
        params, is_over = self._job.spec.params, status not in (QUEUED, IN_PROGRESS)
        reason = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        return {
            "id": self._generation.id,
            "object": "response",
            "created_at": self._job.created,
            "completed_at": int(self._context.time_of_day()) if status == COMPLETED else None,
            "status": status,
            "model": self._job.model,
            "error": None if error is None else _failure(error),
            "incomplete_details": reason,
            "output": list(self._done),
            "usage": self._usage() if is_over else None,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "max_tool_calls": None,
            "previous_response_id": None,
            "service_tier": "default",
            "truncation": "disabled",
            **self._job.echo.fields,
        }

    def _usage(self) -> Json:
        usage, tokenizer = self._generation.usage(), self._context.engine.tokenizer
        num_reasoning = sum(
            len(tokenizer.encode(item.text, add_special_tokens=False))
            for item in self._items
            if isinstance(item, TextItem) and item.is_reasoning
        )
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": usage["total_tokens"],
        }


def _find_text_tokens(context: ServerContext, job: GenerationJob) -> TextTokens | None:
    """Return what finds the tokens of the message; None if all are, or nobody asks for them."""
    params = job.spec.params
    if job.reply == TEXT_ONLY or params.logprobs is None:
        return None
    parser = ReplyParser(job.reply, params.grammar)
    tokenizer = context.engine.tokenizer
    return TextTokens(parser, output_detokenizer(params, tokenizer, job.spec.prompts[0]))


def _failure(error: ErrorResponse) -> Json:
    """Return the error of a response, with one of the codes that clients know."""
    is_limit = error.status == _TOO_MANY_REQUESTS
    code = "rate_limit_exceeded" if is_limit else "server_error"
    return {"code": code, "message": error.message}
