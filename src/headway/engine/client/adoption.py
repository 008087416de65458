"""Requests of other frontends that this process wants to continue.

Every engine is asked, and the first that has the request hands it over. A later handover of the
same request is refused: the tokens are the same in every engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headway.core.events import Adopted, EngineLost, Finished
from headway.core.request import FinishReason, sample_id
from headway.engine.client.replica import EngineReplica
from headway.engine.client.streams import RequestStream
from headway.engine.process.messages import EventBatch, Handover
from headway.errors import OverloadedError

ANSWER_S = 5.0
"""How long the engines have to answer."""
POLL_S = 0.05
MAX_QUESTIONS = 256
"""Requests that may be asked for at a time."""
MAX_QUESTIONS_OF_TENANT = 64
RETRY_AFTER_S = 1


class _Question:
    """A request that the engines were asked for."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.num_open = 0
        """Engines that have yet to answer."""
        self.found: asyncio.Future[RequestStream | None] = asyncio.Future()


class Adoptions:
    """The requests that the engines were asked for, by id."""

    def __init__(self) -> None:
        self._questions: dict[str, _Question] = {}

    def is_wanted(self, handover: Handover) -> bool:
        """Return whether a client of the same tenant still asks for a request."""
        question, command = self._questions.get(handover.request_id), handover.command
        if question is None or command is None or question.found.done():
            return False
        return question.tenant == command.terms.tenant

    async def ask(
        self,
        request_id: str,
        tenant: str,
        replicas: Sequence[EngineReplica],
        answer_s: float = ANSWER_S,
    ) -> RequestStream | None:
        """Ask every engine for a request; return it, or None if none has it."""
        of_tenant = sum(one.tenant == tenant for one in self._questions.values())
        is_full = len(self._questions) >= MAX_QUESTIONS or of_tenant >= MAX_QUESTIONS_OF_TENANT
        if is_full or request_id in self._questions:
            raise OverloadedError("too many streams are being resumed", RETRY_AFTER_S)
        question = self._questions[request_id] = _Question(tenant)
        try:
            links = [one.link for one in replicas if one.link.is_connected]
            if not links:
                return None
            question.num_open = len(links)
            async with asyncio.timeout(answer_s):
                # Those that are up first: another may have to start again before it can answer.
                for link in sorted(links, key=lambda one: not one.is_up):
                    while link.is_connected and not link.is_up and not question.found.done():
                        await asyncio.sleep(POLL_S)
                    if not await link.adopt(request_id, tenant):
                        self.answer(request_id, None)
                return await question.found
        except TimeoutError:
            return None
        finally:
            del self._questions[request_id]

    def answer(self, request_id: str, stream: RequestStream | None) -> None:
        """Record the answer of one engine; the first stream counts, or None from all."""
        question = self._questions.get(request_id)
        if question is None or question.found.done():
            return
        question.num_open -= 1
        if stream is not None or not question.num_open:
            question.found.set_result(stream)


def adoption_events(stream: RequestStream, handover: Handover, now: float) -> EventBatch:
    """Return the events that bring the account of an adopted request up to now."""
    command = stream.command
    has_forked = stream.num_output_tokens > 0
    samples = [one for one in stream.samples.values() if has_forked or not one.index]
    adopted = [
        Adopted(
            sample_id(stream.request_id, sample.index),
            now,
            command.arrived_at,
            len(command.token_ids),
            sample.num_tokens,
            command.terms,
            stream.num_cached_tokens,
            command.attempt,
            is_fork=sample.index > 0,
            max_tokens=command.params.max_tokens or 0,
            n=command.params.n,
            priority=command.priority,
        )
        for sample in samples
    ]
    in_engine = _indices_in_engine(handover)
    ended = [one for one in samples if one.is_finished and one.index not in in_engine]
    reasons = {one.index: one.reason for one in handover.samples}
    finished = [
        Finished(
            sample_id(stream.request_id, one.index),
            now,
            reasons.get(one.index) or FinishReason.STOP,
            one.num_tokens,
        )
        for one in ended
    ]
    lost = [] if handover.is_running else [EngineLost(now, tuple(stream.unfinished_ids))]
    return EventBatch(adopted=adopted, lost=lost, finished=finished)


def stopped_samples(stream: RequestStream, handover: Handover, now: float) -> dict[str, Finished]:
    """Return the ends of samples that a stop string has ended, and that the engine still has."""
    in_engine = _indices_in_engine(handover)
    return {
        name: Finished(name, now, FinishReason.STOP, sample.num_tokens)
        for name, sample in stream.samples.items()
        if sample.is_finished and sample.index in in_engine
    }


def _indices_in_engine(handover: Handover) -> set[int]:
    """Return the samples with output that the engine goes on with."""
    if not handover.is_running:
        return set()
    return {one.index for one in handover.samples if one.reason is None}
