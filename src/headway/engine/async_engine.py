"""The API process's view of the engine: submit a prompt, iterate over what comes back.

Owns the live requests, and the engine process they run in. A process that dies, hangs or stops
making sense is replaced, and every live request continues from the last token its consumer was
given. A consumer that stops iterating, for whatever reason, aborts its request on the way out, so
blocks come back within a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from math import ceil

from msgspec.structs import replace

from headway.clock import Clock
from headway.core import events
from headway.core.params import SamplingParams
from headway.core.request import FinishReason
from headway.core.terms import NO_TERMS, Terms
from headway.engine.forecast_reader import ForecastReader
from headway.engine.inputs import draw_seed, resolve_params
from headway.engine.listeners import Listener, Listeners
from headway.engine.messages import AbortRequests, AddRequest, EngineInfo, EventBatch
from headway.engine.outputs import SampleDelta
from headway.engine.quarantine import Quarantine
from headway.engine.streams import RequestStream
from headway.engine.supervision import RestartLimits
from headway.engine.supervisor import Launch, Progress, RestartListener, Supervisor
from headway.engine.waiting import WaitingLine
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

MAX_TRIAL_WAIT_S = 5.0


class AsyncEngine:
    """Many requests, one engine process at a time."""

    def __init__(
        self,
        launch: Launch,
        tokenizer: Tokenizer,
        clock: Clock,
        limits: RestartLimits | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._clock = clock
        self._supervisor = Supervisor(launch, clock, limits or RestartLimits())
        self._supervision: asyncio.Task[None] | None = None
        self._streams: dict[str, RequestStream] = {}
        self._owner_of: dict[str, RequestStream] = {}
        self._waiting = WaitingLine()
        self._unsent: deque[RequestStream] = deque()
        self._on_trial: RequestStream | None = None
        self._tried_at = 0.0
        self.num_seated = 0
        """Requests that have left the waiting line for a seat, ever."""
        self._leaving: dict[str, events.Finished] = {}
        """Samples the engine was told to end and has not yet said it did."""
        self._quarantine = Quarantine()
        self._forecast_reader = ForecastReader()
        self._listeners = Listeners()
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
        """An engine is there and makes progress."""
        return self._supervisor.is_up and not self._supervisor.is_hung

    @property
    def is_up(self) -> bool:
        return self._supervisor.is_up

    @property
    def takes_requests(self) -> bool:
        """True also while a process is being replaced: requests then wait for the next one."""
        return self._supervisor.info is not None and self._error is None

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    @property
    def waiting(self) -> WaitingLine:
        """Requests that have yet to be seated for the first time."""
        return self._waiting

    def subscribe(self, listener: Listener) -> None:
        """Have every batch of events passed to `listener`, which must not block."""
        self._listeners.add(listener)

    def subscribe_restarts(self, listener: RestartListener) -> None:
        self._supervisor.subscribe(listener)

    async def start(self, progress: Progress | None = None) -> None:
        """Wait until the engine has loaded its model. The first time, failing to is final."""
        await self._supervisor.load(progress)
        self._supervision = asyncio.create_task(self._supervisor.run(self))

    def kill(self) -> None:
        """End the engine process without asking; `close` must still follow."""
        self._supervisor.kill()

    async def close(self) -> None:
        """End every stream and the engine process."""
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
        self._forecast_reader.check(command, self.info, command.arrived_at)
        stream = RequestStream(command, self.tokenizer)
        self._streams[request_id] = stream
        self._waiting.add(stream)
        self._owner_of.update(dict.fromkeys(stream.samples, stream))
        self._unsent.append(stream)
        arrived = events.Arrived(request_id, command.arrived_at, len(command.token_ids), terms)
        self._listeners.tell(EventBatch(arrived=[arrived]))
        try:
            await self._send_next()
        except BaseException:
            await self.abort(stream)
            raise
        stream.lacks_engine = not stream.is_sent
        return stream

    async def deltas(self, stream: RequestStream) -> AsyncGenerator[list[SampleDelta], None]:
        """What the request gains, as it gains it. Leaving early aborts the request."""
        try:
            while stream.has_more:
                yield await stream.take()
        finally:
            await self.abort(stream)

    async def abort(
        self, stream: RequestStream, reason: FinishReason = FinishReason.ABORT, message: str = ""
    ) -> None:
        """Forget a request; whatever of it is still alive in the engine ends there too."""
        if stream.request_id not in self._streams:
            return
        ids = stream.unfinished_ids
        ended = stream.ends(self._clock.now(), reason, message)
        self._drop(stream)
        if not stream.is_sent:
            self._listeners.tell(EventBatch(finished=ended))
        elif ids:
            self._leaving.update({event.request_id: event for event in ended})
            # All of them: the prompt may have forked a moment ago.
            await self._supervisor.send(AbortRequests(ids, reason))
        await self._end_trial(stream)

    async def refuse(self, stream: RequestStream, error: HeadwayError) -> None:
        """End a request that waits; its consumer gets the error."""
        stream.fail(error)
        await self.abort(stream, FinishReason.TIMEOUT, str(error))

    async def _send_next(self) -> None:
        """Tell the engine of the requests it does not know. One under suspicion goes alone: the
        next follows when it has gained some tokens and the engine is still there."""
        while self._supervisor.is_up and self._unsent and self._on_trial is None:
            stream = self._unsent.popleft()
            if stream.request_id not in self._streams:
                continue
            if stream.num_crashes:
                self._on_trial = stream
                self._tried_at = self._clock.now()
            commands, now = stream.commands(), self._clock.now()
            if stream.lacks_engine:
                stream.lacks_engine = False
                resent = [events.Resent(command.id, now) for command in commands]
                self._listeners.tell(EventBatch(resent=resent))
            for command in commands:
                await self._supervisor.send(command)

    async def _end_trial(self, stream: RequestStream) -> None:
        if stream is self._on_trial:
            self._on_trial = None
            await self._send_next()

    # ------------------------------------------------- what the supervisor says

    def has_work_in_engine(self) -> bool:
        return any(one.is_sent and one.unfinished_ids for one in self._streams.values())

    async def came_up(self) -> None:
        await self._send_next()

    def went_down(self, suspect_ids: frozenset[str], has_failed: bool) -> int:
        """No request is in an engine now. Those in the step that did not end may be its cause:
        they will be tried one by one. Twice, with nobody else to blame, is no accident."""
        on_trial, self._on_trial = self._on_trial, None
        self._forecast_reader.reset()
        lost, self._leaving = list(self._leaving.values()), {}
        sent = [one for one in self._streams.values() if one.is_sent and one.unfinished_ids]
        is_unknown = has_failed and not suspect_ids
        suspects = [one for one in sent if is_unknown or not suspect_ids.isdisjoint(one.samples)]
        for stream in suspects:
            stream.num_crashes += 1
        fresh = [stream for stream in suspects if stream.is_fresh]
        if on_trial is not None and fresh == [on_trial] and on_trial.num_crashes > 1:
            lost += self._put_away(on_trial)
        live = [one for one in self._streams.values() if one.unfinished_ids]
        # Who had gained least is the likeliest cause, and easiest to tell when it goes first.
        live.sort(key=lambda one: (not one.num_crashes, one.num_crashes and one.num_gained))
        for stream in live:
            stream.is_sent, stream.lacks_engine = False, True
        self._unsent = deque(live)
        self._listeners.tell(EventBatch(finished=lost, lost=[events.EngineLost(self._clock.now())]))
        return len(live)

    def _put_away(self, stream: RequestStream) -> list[events.Finished]:
        logger.error("request %s is quarantined", stream.request_id)
        self._quarantine.add(stream.command)
        message = "the engine failed twice while computing this request"
        return self._forget(stream, QuarantinedError(message))

    def _forget(self, stream: RequestStream, error: HeadwayError) -> list[events.Finished]:
        """Fail a request that no engine knows; the events that say so."""
        stream.fail(error)
        self._drop(stream)
        return stream.ends(self._clock.now(), FinishReason.ERROR, str(error))

    def _drop(self, stream: RequestStream) -> None:
        del self._streams[stream.request_id]
        self._waiting.pop(stream.request_id)
        for name in stream.samples:
            del self._owner_of[name]

    def gave_up(self, error: EngineError) -> None:
        self._fail_all(error)
        self.has_given_up = True

    def _fail_all(self, error: EngineError) -> None:
        self._error = error
        lost, self._leaving = list(self._leaving.values()), {}
        lost += [e for one in list(self._streams.values()) for e in self._forget(one, error)]
        self._listeners.tell(EventBatch(finished=lost))

    async def take_in(self, report: EventBatch) -> None:
        at = report.stepped[-1].at if report.stepped else self._clock.now()
        self._forecast_reader.observe(report, self._clock.now())
        refused = [self._refuse(one, at) for one in report.refused]
        # A request arrives once, here, in however many engines it runs; and it ends once. A
        # refusal is an end, and counted where it is answered.
        report = replace(report, arrived=[], refused=[], finished=[*refused, *report.finished])
        for admission in report.admitted:
            self._seat(admission)
        for fork in report.forked:  # of a prompt that is leaving: its samples leave with it
            if end := self._leaving.get(fork.parent_id):
                self._leaving[fork.request_id] = events.Finished(fork.request_id, at, end.reason, 0)
        taken: list[events.TokensEmitted] = []
        stopped: set[str] = set()
        for event in report.tokens:
            if self._is_wanted(event.request_id):
                taken.append(event)
            if await self._emit(event, at):
                stopped.add(event.request_id)
        # Whoever counts tokens counts those that went into an answer.
        report = replace(report, tokens=taken)
        for event in report.finished:
            self._leaving.pop(event.request_id, None)
            stopped.discard(event.request_id)
            await self._finish(event)
        self._listeners.tell(report)
        if stopped:
            ends = {name: events.Finished(name, at, FinishReason.STOP, 0) for name in stopped}
            self._leaving.update(ends)
            await self._supervisor.send(AbortRequests(list(stopped), FinishReason.STOP))
        if self._on_trial is not None and self._is_trial_over(self._on_trial):
            await self._end_trial(self._on_trial)

    def _refuse(self, refusal: events.Refused, at: float) -> events.Finished:
        """The engine would not take a request: an end as any other, but if it was for lack of
        time its consumer is told when to come again."""
        stream = self._owner_of.get(refusal.request_id) if refusal.retry_after_s else None
        if stream is not None:
            self._forget(stream, DeadlineError(refusal.message, ceil(refusal.retry_after_s)))
        return events.Finished(refusal.request_id, at, FinishReason.ERROR, 0, refusal.message)

    def _seat(self, admission: events.Admitted) -> None:
        owner = self._owner_of.get(admission.request_id)
        if owner is not None:
            owner.is_seated = True
        stream = self._waiting.pop(admission.request_id)
        if stream is not None:
            self.num_seated += 1
            stream.metrics.admitted_at = admission.at
            stream.metrics.num_cached_tokens = admission.num_cached_tokens

    def _is_trial_over(self, stream: RequestStream) -> bool:
        # One that finds no room must not keep all others waiting with it.
        is_stuck = not stream.is_seated and self._clock.now() - self._tried_at > MAX_TRIAL_WAIT_S
        return stream.has_passed or is_stuck

    def _is_wanted(self, request_id: str) -> bool:
        """False if its consumer has left, or a stop string ended it, before the engine heard."""
        stream = self._owner_of.get(request_id)
        return stream is not None and not stream.samples[request_id].is_finished

    async def _emit(self, event: events.TokensEmitted, at: float) -> bool:
        """Pass tokens on. True if a stop string ended the sample, which the engine, knowing no
        text, must be told."""
        stream = self._owner_of.get(event.request_id)
        if stream is None:
            return False
        stream.gain(event.request_id, len(event.token_ids))
        sample = stream.samples[event.request_id]
        if sample.is_finished:
            return False
        if stream.metrics.first_token_at is None:
            stream.metrics.first_token_at = at
        await self._put(stream, lambda: sample.push(event))
        return sample.is_finished

    async def _finish(self, event: events.Finished) -> None:
        stream = self._owner_of.get(event.request_id)
        if stream is None:
            return
        stream.end(event.request_id)
        sample = stream.samples[event.request_id]
        # A prompt forks at its first token: ended before that, none of its samples will come.
        is_unforked = sample.index == 0 and sample.num_tokens == 0
        for ended in list(stream.samples.values()) if is_unforked else (sample,):
            if not ended.is_finished:
                await self._put(stream, partial(ended.finish, event))
        if not stream.unfinished_ids:
            stream.metrics.finished_at = event.at

    async def _put(self, stream: RequestStream, make: Callable[[], SampleDelta]) -> None:
        """Give a stream its next delta. What is wrong with one request is its alone."""
        try:
            stream.put(make())
        except SlowReaderError as error:
            stream.fail(error)
            await self.abort(stream)
        except Exception:
            logger.exception("request %s: its output cannot be written", stream.request_id)
            stream.fail(HeadwayError("the output of this request cannot be written"))
            await self.abort(stream, FinishReason.ERROR)
