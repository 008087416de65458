"""Streams of other frontends that this one continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from headway.engine.client.streams import RequestStream
from headway.engine.process.messages import Note
from headway.server.api.generate.answer import AnswerForm, GenerationJob, resumable_stream
from headway.server.api.generate.generation import Generation, GenerationSpec
from headway.server.context import ServerContext
from headway.server.schema.adapted import NO_ECHO, Echo
from headway.server.streams import ResumableStream, decode_note
from headway.tenancy import QuotaLease

MakeForm = Callable[[ServerContext, GenerationJob, Generation], AnswerForm]


class AnswerForms(Protocol):
    """How an endpoint writes its answers."""

    @property
    def make_form(self) -> MakeForm: ...


async def adopt_stream(
    context: ServerContext,
    found: RequestStream | None,
    forms: Mapping[str, AnswerForms],
    take_lease: Callable[[], QuotaLease | None],
    echo: Echo = NO_ECHO,
) -> ResumableStream | None:
    """Keep a request that an engine has handed over; None if there is none to answer here.

    `forms` are the endpoints by the prefix of their ids.
    """
    if found is None:
        return None
    stream = _build(context, found, forms, take_lease, echo)
    if stream is None:
        await context.engine.abort(found)
        return None
    context.streams.add(stream)
    return stream


def _build(
    context: ServerContext,
    found: RequestStream,
    forms: Mapping[str, AnswerForms],
    take_lease: Callable[[], QuotaLease | None],
    echo: Echo,
) -> ResumableStream | None:
    command = found.command
    note = decode_note(command.note)
    if note is None or not note.check(frozenset(forms), context.model_names):
        return None
    if not found.request_id.startswith(note.endpoint):
        return None
    spec = GenerationSpec(
        command.id,
        [command.token_ids],
        command.params,
        command.priority,
        command.terms,
        Note(command.note, command.alias),
    )
    job = GenerationJob(
        spec,
        note.model,
        partial(forms[note.endpoint].make_form, context),
        note.is_stream,
        note.options,
        note.created,
        note.client_id,
        note.body_digest,
        note.reply,
        echo,
    )
    generation = Generation(context.engine, spec, take_lease())
    generation.adopt(found)
    context.set_client_id(spec.id, note.client_id)
    return resumable_stream(context, job, generation)
