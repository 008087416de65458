"""The API process's side of the engine: submit a prompt, iterate over its deltas.

AsyncEngine owns the live requests and the engine process. A process that dies, hangs or sends
unreadable reports is replaced, and every live request continues after its last delivered token. A
consumer that stops iterating aborts its request, so that the request's blocks are free within a
step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from math import ceil

from msgspec.structs import replace

from headway.clock import Clock
from headway.core import events
from headway.core.params import SamplingParams
from headway.core.request import FinishReason
from headway.core.terms import NO_TERMS, Terms
from headway.engine.client.forecast_reader import ForecastReader
from headway.engine.client.inputs import draw_seed, resolve_params
from headway.engine.client.listeners import EventListeners, Listener
from headway.engine.client.outputs import SampleDelta
from headway.engine.client.streams import RequestStream
from headway.engine.client.suspects import Suspects
from headway.engine.client.waiting_streams import WaitingStreams
from headway.engine.process.messages import AbortRequests, AddRequest, EngineInfo, EventBatch
from headway.engine.supervise.quarantine import Quarantine
from headway.engine.supervise.restart_policy import RestartLimits
from headway.engine.supervise.supervisor import Launch, Progress, RestartListener, Supervisor
from headway.errors import (
    DeadlineError,
    EngineDeadError,
    EngineError,
    HeadwayError,
    QuarantinedError,
    SlowReaderError,
)
from headway.text import Tokenizer

logger = logging.getLogger(__name__)


class AsyncEngine:
    """Live requests of the API process, and the engine process that computes them."""

    def __init__(
        self,
        launch: Launch,
        tokenizer: Tokenizer,
        clock: Clock,
        limits: RestartLimits | None = None,
        launch_standby: Launch | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._clock = clock
        limits = limits or RestartLimits()
        self._supervisor = Supervisor(launch, clock, limits, launch_standby)
        self._supervision: asyncio.Task[None] | None = None
        self._streams: dict[str, RequestStream] = {}
        self._stream_of: dict[str, RequestStream] = {}
        self._waiting = WaitingStreams()
        self._unsent: list[RequestStream] = []
        self._suspects = Suspects()
        self._broken: list[RequestStream] = []
        """Requests with an event that could not be handled; each ends with an error."""
        self.num_admitted = 0
        """Requests admitted to the running set since the server started."""
        self._aborting: dict[str, events.Finished] = {}
        """Finish events of samples whose abort the engine has not confirmed, by sample id."""
        self._quarantine = Quarantine()
        self._forecast_reader = ForecastReader(limits.hang_s)
        self._listeners = EventListeners()
        self._error: EngineError | None = None
        self.has_given_up = False

    @property
    def info(self) -> EngineInfo:
        info = self._supervisor.info
        if info is None:
            raise EngineDeadError("the engine is not ready yet")
        return info

    @property
    def is_ready(self) -> bool:
        """Whether an engine process is up and makes progress."""
        return self._supervisor.is_up and not self._supervisor.is_hung

    @property
    def is_up(self) -> bool:
        return self._supervisor.is_up

    @property
    def takes_requests(self) -> bool:
        """Whether requests are accepted; true also while the engine process is replaced."""
        return self._supervisor.info is not None and self._error is None

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    @property
    def waiting(self) -> WaitingStreams:
        """Requests that the engine has not admitted yet."""
        return self._waiting

    def subscribe(self, listener: Listener) -> None:
        """Pass every batch of events to `listener`, which must not block."""
        self._listeners.add(listener)

    def subscribe_restarts(self, listener: RestartListener) -> None:
        self._supervisor.subscribe(listener)

    async def start(self, progress: Progress | None = None) -> None:
        """Wait until the engine has loaded its model; raise EngineError if loading fails."""
        await self._supervisor.load(progress)
        self._supervision = asyncio.create_task(self._supervisor.run(self))

    def kill(self) -> None:
        """Kill the engine process; `close` must still follow."""
        self._supervisor.kill()

    async def close(self) -> None:
        """End every stream, then stop the engine process."""
        self._fail_all(EngineDeadError("the server is shutting down"))
        if self._supervision is not None:
            self._supervision.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervision
        await self._supervisor.stop()

    # ---------------------------------------------------------------- requests

    async def submit(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        terms: Terms = NO_TERMS,
    ) -> RequestStream:
        """Check a prompt and send it to the engine; the caller then iterates `deltas`."""
        if self._error is not None:
            raise self._error
        eos_token_ids, share = self.tokenizer.eos_token_ids, terms.max_kv_share
        resolved = resolve_params(params, token_ids, self.info, eos_token_ids, share)
        command = AddRequest(
            id=request_id,
            token_ids=list(token_ids),
            params=resolved,
            seed=draw_seed(params),
            arrived_at=self._clock.now(),
            priority=priority,
            terms=terms,
        )
        self._quarantine.check(command)
        stream = RequestStream(command, self.tokenizer)
        # Last, because the demand that it adds goes with the stream.
        self._forecast_reader.check(command, self.info, command.arrived_at)
        self._streams[request_id] = stream
        self._waiting.add(stream)
        self._stream_of.update(dict.fromkeys(stream.samples, stream))
        self._unsent.append(stream)
        arrived = events.Arrived(request_id, command.arrived_at, len(command.token_ids), terms)
        self._listeners.notify(EventBatch(arrived=[arrived]))
        try:
            await self._send_next()
        except BaseException:
            await self.abort(stream)
            raise
        stream.is_awaiting_engine = not stream.is_sent
        return stream

    async def deltas(self, stream: RequestStream) -> AsyncGenerator[list[SampleDelta], None]:
        """Yield the deltas of a request; leaving early aborts the request."""
        try:
            while stream.has_more:
                yield await stream.take()
        finally:
            await self.abort(stream)

    async def abort(
        self, stream: RequestStream, reason: FinishReason = FinishReason.ABORT, message: str = ""
    ) -> None:
        """Remove a request, and abort its unfinished samples in the engine."""
        if stream.request_id not in self._streams:
            return
        ids = stream.unfinished_ids
        ended = stream.finish_events(self._clock.now(), reason, message)
        self._remove_stream(stream)
        if not stream.is_sent:
            self._listeners.notify(EventBatch(finished=ended))
        elif ids:
            self._aborting.update({event.request_id: event for event in ended})
            # Every sample id: the prompt may have forked since the last report.
            await self._supervisor.send(AbortRequests(ids, reason))
        await self._resume_sending()

    async def refuse(self, stream: RequestStream, error: HeadwayError) -> None:
        """End a waiting request; its consumer gets `error`."""
        stream.fail(error)
        await self.abort(stream, FinishReason.TIMEOUT, str(error))

    async def _send_next(self) -> None:
        """Send unsent requests: the next group of suspects, then requests without suspicion."""
        while self._supervisor.is_up:
            group = self._suspects.begin_trial(self._clock.now())
            for stream in group:
                await self._send(stream)
            unsent, self._unsent = self._unsent, []
            for stream in unsent:
                if self._suspects.may_send(stream):
                    await self._send(stream)
                else:
                    self._unsent.append(stream)
            if not group:
                return

    async def _send(self, stream: RequestStream) -> None:
        """Send a request with its output so far; an exception ends this request only."""
        if stream.request_id not in self._streams:
            return
        now, num_sent = self._clock.now(), 0
        try:
            commands = stream.commands(now)
            if stream.is_awaiting_engine:
                stream.is_awaiting_engine = False
                resent = [events.Resent(command.id, now) for command in commands]
                self._listeners.notify(EventBatch(resent=resent))
            for command in commands:
                await self._supervisor.send(command)
                num_sent += 1
        except Exception:
            logger.exception("request %s cannot be sent", stream.request_id)
            stream.is_sent = num_sent > 0
            stream.fail(HeadwayError("this request cannot be sent to the engine"))
            await self.abort(stream, FinishReason.ERROR)

    async def _resume_sending(self) -> None:
        """Send requests that waited for a trial, if the trial is over."""
        if self._suspects.is_under_way or self._unsent:
            await self._send_next()

    # ------------------------------------------------- calls from the supervisor

    def has_work_in_engine(self) -> bool:
        return any(one.is_sent and one.unfinished_ids for one in self._streams.values())

    async def on_engine_up(self) -> None:
        await self._send_next()

    def on_engine_down(self, suspect_ids: frozenset[str], has_failed: bool) -> int:
        """Prepare every live request for the next engine; return their number."""
        now = self._clock.now()
        self._forecast_reader.reset()
        lost, self._aborting = list(self._aborting.values()), {}
        sent = [one for one in self._streams.values() if one.is_sent and one.unfinished_ids]
        culprit = self._suspects.lose_engine(sent, suspect_ids, has_failed)
        if culprit is not None:
            lost += self._quarantine_stream(culprit)
        live = [one for one in self._streams.values() if one.unfinished_ids]
        for stream in live:
            stream.lose_engine(now)
        self._unsent = [one for one in live if one not in self._suspects]
        self._listeners.notify(EventBatch(finished=lost, lost=[events.EngineLost(now)]))
        return len(live)

    def _quarantine_stream(self, stream: RequestStream) -> list[events.Finished]:
        logger.error("request %s is quarantined", stream.request_id)
        self._quarantine.add(stream.command)
        message = "the engine failed twice while computing this request"
        return self._fail_stream(stream, QuarantinedError(message))

    def _fail_stream(self, stream: RequestStream, error: HeadwayError) -> list[events.Finished]:
        """Fail a request that no engine has; return its finish events."""
        stream.fail(error)
        self._remove_stream(stream)
        return stream.finish_events(self._clock.now(), FinishReason.ERROR, str(error))

    def _remove_stream(self, stream: RequestStream) -> None:
        del self._streams[stream.request_id]
        self._waiting.pop(stream.request_id)
        self._forecast_reader.remove(stream.request_id)
        self._suspects.remove(stream)
        for name in stream.samples:
            del self._stream_of[name]

    def on_give_up(self, error: EngineError) -> None:
        self._fail_all(error)
        self.has_given_up = True

    def _fail_all(self, error: EngineError) -> None:
        self._error = error
        lost, self._aborting = list(self._aborting.values()), {}
        lost += [e for one in list(self._streams.values()) for e in self._fail_stream(one, error)]
        self._listeners.notify(EventBatch(finished=lost))

    async def on_report(self, report: EventBatch) -> None:
        """Apply the events of a report to the streams, then pass them to the listeners.

        An exception over one request's event ends that request only. Every other event of the
        report is still handled, so that no stream gets a token twice or misses a token.
        """
        at = report.stepped[-1].at if report.stepped else self._clock.now()
        self._estimate(partial(self._forecast_reader.observe, report, self._clock.now()))
        refused = [self._refuse(one, at) for one in report.refused]
        # A request arrives once and ends once for listeners, in however many engines it runs.
        # A refusal is an end; the error answer counts it.
        report = replace(report, arrived=[], refused=[], finished=[*refused, *report.finished])
        self._move(report, at)
        self._suspects.record_steps(len(report.stepped))
        delivered, stopped = await self._emit_all(report.tokens)
        # Listeners count delivered tokens only.
        report = replace(report, tokens=delivered)
        for event in report.finished:
            self._aborting.pop(event.request_id, None)
            stopped.discard(event.request_id)
            try:
                await self._finish(event)
            except Exception:
                self._note_broken(event.request_id)
        self._listeners.notify(report)
        if stopped:
            ends = {name: events.Finished(name, at, FinishReason.STOP, 0) for name in stopped}
            self._aborting.update(ends)
            await self._supervisor.send(AbortRequests(list(stopped), FinishReason.STOP))
        await self._end_broken()
        await self._resume_sending()

    def _estimate(self, update: Callable[[], None]) -> None:
        """Run an update of the forecast; an exception in it must not end a request."""
        try:
            update()
        except Exception:
            logger.exception("the forecast cannot be updated")

    def _note_broken(self, request_id: str) -> None:
        """Have the request end with an error after this report, because its event raised."""
        logger.exception("request %s: an event cannot be handled", request_id)
        stream = self._stream_of.get(request_id)
        if stream is not None:
            self._broken.append(stream)

    async def _end_broken(self) -> None:
        broken, self._broken = self._broken, []
        for stream in broken:
            stream.fail(HeadwayError("this request failed in the server"))
            await self.abort(stream, FinishReason.ERROR)

    def _refuse(self, refusal: events.Refused, at: float) -> events.Finished:
        """Return the finish event of a request that the engine refused.

        A refusal for lack of time also gives the consumer a Retry-After.
        """
        stream = self._stream_of.get(refusal.request_id) if refusal.retry_after_s else None
        if stream is not None:
            try:
                self._fail_stream(
                    stream, DeadlineError(refusal.message, ceil(refusal.retry_after_s))
                )
            except Exception:
                self._note_broken(refusal.request_id)
        return events.Finished(refusal.request_id, at, FinishReason.ERROR, 0, refusal.message)

    def _move(self, report: EventBatch, at: float) -> None:
        """Apply preemptions, admissions and forks to the streams."""
        for preempted in report.preempted:
            owner = self._stream_of.get(preempted.request_id)
            if owner is not None:
                owner.preempt(preempted.request_id, preempted.at)
        for admission in report.admitted:
            try:
                self._record_admission(admission)
            except Exception:
                self._note_broken(admission.request_id)
        for fork in report.forked:  # samples of a prompt under abort are aborted with it
            if end := self._aborting.get(fork.parent_id):
                self._aborting[fork.request_id] = events.Finished(
                    fork.request_id, at, end.reason, 0
                )

    async def _emit_all(
        self, tokens: Sequence[events.TokensEmitted]
    ) -> tuple[list[events.TokensEmitted], set[str]]:
        """Deliver tokens; return the delivered events and the samples that a stop string ended."""
        delivered: list[events.TokensEmitted] = []
        stopped: set[str] = set()
        for event in tokens:
            try:
                if self._has_consumer(event.request_id):
                    delivered.append(event)
                if await self._emit(event):
                    stopped.add(event.request_id)
            except Exception:
                self._note_broken(event.request_id)
        return delivered, stopped

    def _record_admission(self, admission: events.Admitted) -> None:
        owner = self._stream_of.get(admission.request_id)
        if owner is not None:
            owner.admit(admission.request_id)
        stream = self._waiting.pop(admission.request_id)
        if stream is not None:
            self.num_admitted += 1
            stream.num_cached_tokens = admission.num_cached_tokens

    def _has_consumer(self, request_id: str) -> bool:
        """Return whether the sample is live and takes more tokens."""
        stream = self._stream_of.get(request_id)
        return stream is not None and not stream.samples[request_id].is_finished

    async def _emit(self, event: events.TokensEmitted) -> bool:
        """Deliver tokens; return whether a stop string ended the sample.

        The engine knows no text, so the caller must abort such a sample there.
        """
        stream = self._stream_of.get(event.request_id)
        if stream is None:
            return False
        stream.count_tokens(event.request_id, len(event.token_ids))
        sample = stream.samples[event.request_id]
        if sample.is_finished:
            return False
        await self._put(stream, lambda: sample.push(event))
        return sample.is_finished

    async def _finish(self, event: events.Finished) -> None:
        stream = self._stream_of.get(event.request_id)
        if stream is None:
            return
        stream.finish_sample(event.request_id)
        sample = stream.samples[event.request_id]
        # A prompt forks at its first token: if it ends before, all its samples end with it.
        is_unforked = sample.index == 0 and sample.num_tokens == 0
        for ended in list(stream.samples.values()) if is_unforked else (sample,):
            if not ended.is_finished:
                await self._put(stream, partial(ended.finish, event))

    async def _put(self, stream: RequestStream, make: Callable[[], SampleDelta]) -> None:
        """Add a delta to a stream; an exception ends this request only."""
        try:
            stream.put(make())
        except SlowReaderError as error:
            stream.fail(error)
            await self.abort(stream)
        except Exception:
            logger.exception("request %s: its output cannot be written", stream.request_id)
            stream.fail(HeadwayError("the output of this request cannot be written"))
            await self.abort(stream, FinishReason.ERROR)
