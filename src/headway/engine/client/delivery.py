"""Delivers the events of engine reports to the live requests.

An exception over one request's event ends that request only. Every other event of the report is
still handled, so that no stream gets a token twice or misses a token.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from headway.core import events
from headway.core.request import FinishReason
from headway.engine.client.outputs import SampleDelta
from headway.engine.client.replica import EngineReplica
from headway.engine.client.streams import RequestStream
from headway.engine.client.waiting_streams import WaitingStreams
from headway.engine.process.messages import EventBatch
from headway.errors import HeadwayError, SlowReaderError

logger = logging.getLogger(__name__)

Abort = Callable[[RequestStream, FinishReason], Awaitable[None]]
"""Removes a request, and aborts it in its engine."""


class LiveStreams:
    """Every live request, by its id and by the ids of its samples."""

    def __init__(self) -> None:
        self.by_id: dict[str, RequestStream] = {}
        self.by_sample: dict[str, RequestStream] = {}
        self.waiting = WaitingStreams()
        """Requests that no engine has admitted yet."""

    def add(self, stream: RequestStream) -> None:
        self.by_id[stream.request_id] = stream
        if not stream.is_admitted:
            self.waiting.add(stream)
        self.by_sample.update(dict.fromkeys(stream.samples, stream))

    def remove(self, stream: RequestStream) -> None:
        del self.by_id[stream.request_id]
        self.waiting.pop(stream.request_id)
        for name in stream.samples:
            del self.by_sample[name]

    def __contains__(self, stream: RequestStream) -> bool:
        return stream.request_id in self.by_id


class Delivery:
    """Applies the events of reports to the live requests."""

    def __init__(self, live: LiveStreams, abort: Abort) -> None:
        self._live = live
        self._abort = abort
        self._broken: list[RequestStream] = []
        """Requests with an event that could not be handled; each ends with an error."""
        self.num_admitted = 0
        """Ordinary requests admitted to the running set since the server started."""

    def move(self, replica: EngineReplica, report: EventBatch, at: float) -> None:
        """Apply preemptions, admissions and forks."""
        for preempted in report.preempted:
            owner = self._live.by_sample.get(preempted.request_id)
            if owner is not None:
                owner.preempt(preempted.request_id, preempted.at)
        for admission in report.admitted:
            try:
                self._record_admission(admission)
            except Exception:
                self.note_broken(admission.request_id)
        for fork in report.forked:  # samples of a prompt under abort are aborted with it
            if end := replica.aborting.get(fork.parent_id):
                replica.aborting[fork.request_id] = events.Finished(
                    fork.request_id, at, end.reason, 0
                )

    def _record_admission(self, admission: events.Admitted) -> None:
        owner = self._live.by_sample.get(admission.request_id)
        if owner is not None:
            owner.admit(admission.request_id)
        stream = self._live.waiting.pop(admission.request_id)
        if stream is not None:
            self.num_admitted += not stream.command.terms.is_spot
            stream.num_cached_tokens = admission.num_cached_tokens

    def add_prompt_results(self, report: EventBatch) -> None:
        """Give log-probabilities and embeddings of prompts to their streams."""
        for scored in report.scored:
            stream = self._live.by_sample.get(scored.request_id)
            try:
                if stream is not None:
                    stream.add_scores(scored)
            except Exception:
                self.note_broken(scored.request_id)
        for embedded in report.embedded:
            stream = self._live.by_sample.get(embedded.request_id)
            if stream is not None:
                stream.embedding = embedded.values

    async def emit_all(
        self, tokens: Sequence[events.TokensEmitted]
    ) -> tuple[list[events.TokensEmitted], set[str]]:
        """Deliver tokens; return the delivered events and the samples that a stop string ended.

        The engine knows no text, so the caller must abort such samples there.
        """
        delivered: list[events.TokensEmitted] = []
        stopped: set[str] = set()
        for event in tokens:
            try:
                if self._has_consumer(event.request_id):
                    delivered.append(event)
                if await self._emit(event):
                    stopped.add(event.request_id)
            except Exception:
                self.note_broken(event.request_id)
        return delivered, stopped

    def _has_consumer(self, request_id: str) -> bool:
        """Return whether the sample is live and takes more tokens."""
        stream = self._live.by_sample.get(request_id)
        return stream is not None and not stream.samples[request_id].is_finished

    async def _emit(self, event: events.TokensEmitted) -> bool:
        """Deliver tokens; return whether a stop string ended the sample."""
        stream = self._live.by_sample.get(event.request_id)
        if stream is None:
            return False
        stream.count_tokens(event.request_id, len(event.token_ids))
        sample = stream.samples[event.request_id]
        if sample.is_finished:
            return False
        stream.record(sample.index, event)
        await self._put(stream, lambda: sample.push(event))
        return sample.is_finished

    async def finish_all(self, finished: Sequence[events.Finished]) -> None:
        """Deliver the ends of samples."""
        for event in finished:
            try:
                await self._finish(event)
            except Exception:
                self.note_broken(event.request_id)

    async def _finish(self, event: events.Finished) -> None:
        stream = self._live.by_sample.get(event.request_id)
        if stream is None:
            return
        stream.finish_sample(event.request_id)
        sample = stream.samples[event.request_id]
        # A prompt forks at its first token: if it ends before, all its samples end with it.
        is_unforked = sample.index == 0 and sample.num_tokens == 0
        for ended in list(stream.samples.values()) if is_unforked else (sample,):
            if not ended.is_finished:
                if stream.transcript is not None:
                    stream.transcript.finish(ended.index, event.reason)
                await self._put(stream, partial(ended.finish, event))

    async def _put(self, stream: RequestStream, make: Callable[[], SampleDelta]) -> None:
        """Add a delta to a stream; an exception ends this request only."""
        try:
            stream.put(make())
        except SlowReaderError as error:
            stream.fail(error)
            await self._abort(stream, FinishReason.ABORT)
        except Exception:
            logger.exception("request %s: its output cannot be written", stream.request_id)
            stream.fail(HeadwayError("the output of this request cannot be written"))
            await self._abort(stream, FinishReason.ERROR)

    def note_broken(self, request_id: str) -> None:
        """Have the request end with an error after this report, because its event raised."""
        logger.exception("request %s: an event cannot be handled", request_id)
        stream = self._live.by_sample.get(request_id)
        if stream is not None:
            self._broken.append(stream)

    async def end_broken(self) -> None:
        """End the requests whose events could not be handled."""
        broken, self._broken = self._broken, []
        for stream in broken:
            stream.fail(HeadwayError("this request failed in the server"))
            await self._abort(stream, FinishReason.ERROR)
