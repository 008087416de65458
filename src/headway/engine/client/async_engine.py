"""The API process's side of the engines: submit a prompt, iterate over its deltas.

AsyncEngine owns the live requests. Each is in one engine, or waits for one. When an engine dies,
hangs, sends unreadable reports or is out of reach, every request that it had continues after its
last delivered token: in another engine, or in the one that replaces it. A consumer that stops
iterating aborts its request, so that the request's blocks are free within a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil, inf
from typing import TYPE_CHECKING

from msgspec.structs import replace

from headway.clock import Clock
from headway.core import events
from headway.core.params import SamplingParams
from headway.core.request import FinishReason, sample_id
from headway.core.terms import NO_TERMS, Terms
from headway.engine.client.adoption import (
    ANSWER_S,
    Adoptions,
    adoption_events,
    stopped_samples,
)
from headway.engine.client.delivery import Delivery, LiveStreams
from headway.engine.client.eligible import EligibleEngines
from headway.engine.client.inputs import draw_seed, resolve_params
from headway.engine.client.link import EngineLink
from headway.engine.client.listeners import EventListeners, Listener, StepListener, total_steps
from headway.engine.client.outputs import SampleDelta
from headway.engine.client.placement import LeastLoaded, Placed, Placement
from headway.engine.client.replica import EngineReplica
from headway.engine.client.streams import RequestStream
from headway.engine.client.waiting_streams import WaitingStreams
from headway.engine.process.messages import (
    NO_NOTE,
    AbortRequests,
    AddRequest,
    EngineInfo,
    EventBatch,
    Handover,
    Note,
    QuarantinedDigest,
)
from headway.engine.supervise.loss import EngineLoss
from headway.engine.supervise.quarantine import Quarantine, digest_of
from headway.engine.supervise.restart_policy import RestartLimits
from headway.engine.supervise.supervisor import Progress, RestartListener
from headway.errors import (
    DeadlineError,
    EngineDeadError,
    EngineError,
    HeadwayError,
    QuarantinedError,
)
from headway.text import Tokenizer

if TYPE_CHECKING:
    from headway.routing import FleetDemand, FrontendLoad

logger = logging.getLogger(__name__)

_QUARANTINED = "the engine failed twice while computing this request"


@dataclass(frozen=True, slots=True)
class FailoverRules:
    """Where a request may continue after its engine is lost, and how long it may wait."""

    may_change_numerics: bool = False
    """Whether a request with tokens may continue in an engine of another numerics class."""
    max_wait_s: float | None = None
    """Seconds without an engine after which a request fails; None for no limit."""


class AsyncEngine:
    """Live requests of the API process, and the engines that compute them."""

    def __init__(
        self,
        links: Sequence[EngineLink],
        tokenizer: Tokenizer,
        clock: Clock,
        max_forecast_age_s: float = RestartLimits().hang_s,
        make_placement: Callable[[EligibleEngines], Placement] = LeastLoaded,
        failover: FailoverRules | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._clock = clock
        self._max_forecast_age_s = max_forecast_age_s
        self._failover = failover or FailoverRules()
        self._replicas: list[EngineReplica] = []
        self._eligible = EligibleEngines(self._replicas, self._failover.may_change_numerics)
        self._placement = make_placement(self._eligible)
        self._tasks: dict[EngineReplica, asyncio.Task[None]] = {}
        self._is_started = False
        self._last_info: EngineInfo | None = None
        """Facts about engines that were there, for a fleet that has none for a while."""
        self.is_managed = False
        """Whether a manager starts engines when requests wait: there may be none for a while."""
        self._up = asyncio.Event()
        """Set when an engine has loaded."""
        self._progress: Progress | None = None
        self._live = LiveStreams()
        self._delivery = Delivery(self._live, self.abort)
        self._quarantine = Quarantine(clock)
        self._listeners = EventListeners()
        self._adoptions = Adoptions()
        self._restart_listeners: list[RestartListener] = []
        self._error: EngineError | None = None
        self._unexplained_at = -inf
        """When an engine was last lost without a step that explains it."""
        self.has_given_up = False
        for link in links:
            self.add_engine(link)

    @property
    def info(self) -> EngineInfo:
        """Facts about the largest engine: a request must fit it."""
        infos = [one.info for one in self._replicas if one.info is not None]
        if infos:
            self._last_info = max(
                infos, key=lambda one: (one.capacity.max_model_len, one.capacity.num_blocks)
            )
        if self._last_info is None or not (infos or self.is_managed):
            raise EngineDeadError("the engine is not ready yet")
        return self._last_info

    @property
    def engines(self) -> Sequence[EngineReplica]:
        return self._replicas

    @property
    def last_steps(self) -> list[events.Stepped]:
        """The last step of each engine that takes requests."""
        found = [one.last_step for one in self._replicas if one.is_ready and not one.is_retired]
        return [step for step in found if step is not None]

    @property
    def engine_states(self) -> list[tuple[str, int, int, float]]:
        """Name, running and waiting requests, and KV usage of each engine that is up."""
        return [one.state for one in self._replicas if one.link.is_up]

    @property
    def is_ready(self) -> bool:
        """Whether an engine is up and makes progress, or comes when there is a request."""
        return any(one.is_ready for one in self._replicas) or self._is_next_awaited

    @property
    def _is_next_awaited(self) -> bool:
        """Whether no engine is up, but one was, and there will be another."""
        return self.is_managed and self._last_info is not None and not self.is_up

    @property
    def is_up(self) -> bool:
        return any(one.link.is_up for one in self._replicas)

    @property
    def takes_requests(self) -> bool:
        """Whether requests are accepted; true also while engines are replaced."""
        is_known = any(one.info is not None for one in self._replicas)
        return self._error is None and (is_known or self._is_next_awaited)

    @property
    def num_requests(self) -> int:
        return len(self._live.by_id)

    @property
    def num_admitted(self) -> int:
        """Ordinary requests admitted to the running set since the server started."""
        return self._delivery.num_admitted

    @property
    def num_ordinary(self) -> int:
        """Requests that are not spot, waiting or running."""
        return sum(not one.command.terms.is_spot for one in self._live.by_id.values())

    @property
    def waiting(self) -> WaitingStreams:
        """Requests that no engine has admitted yet."""
        return self._live.waiting

    @property
    def demand(self) -> FleetDemand | None:
        """The work that arrives and waits; None if it is not measured."""
        return self._placement.demand(self._clock.now())

    @property
    def frontends(self) -> Sequence[FrontendLoad]:
        """The frontends that share a router process, this one among them; none without one."""
        return self._placement.frontends()

    def subscribe(self, listener: Listener) -> None:
        """Pass every batch of events to `listener`, which must not block."""
        self._listeners.add(listener)

    def subscribe_steps(self, listener: StepListener) -> None:
        """Pass the steps of each engine to `listener`, with the counts of that engine alone."""
        self._listeners.add_for_steps(listener)

    def subscribe_restarts(self, listener: RestartListener) -> None:
        self._restart_listeners.append(listener)
        for replica in self._replicas:
            replica.link.restart_listeners.append(listener)

    # ----------------------------------------------------------------- engines

    def add_engine(self, link: EngineLink) -> None:
        """Use one more engine as soon as it is up."""
        link.restart_listeners.extend(self._restart_listeners)
        replica = EngineReplica(link, self, self._max_forecast_age_s)
        self._replicas.append(replica)
        if self._is_started:
            self._tasks[replica] = asyncio.create_task(self._follow(replica))

    def expect(self, info: EngineInfo) -> None:
        """Accept requests for an engine with these facts before there is one."""
        if self._last_info is None:
            self._last_info = info

    def retire_engine(self, name: str) -> None:
        """Send no further requests to an engine, and leave it when its requests have ended."""
        for replica in self._replicas:
            if replica.link.name == name:
                replica.is_retired = True
                self._placement.engine_changed(replica, replica.link.is_up, self._clock.now())

    async def start(self, progress: Progress | None = None) -> None:
        """Wait until an engine is up; raise EngineError if the only engine fails to load."""
        self._progress, self._is_started = progress, True
        self._tasks = {one: asyncio.create_task(self._follow(one)) for one in self._replicas}
        up = asyncio.create_task(self._up.wait())
        try:
            # Only an engine that fails to load ends its task.
            await asyncio.wait((up, *self._tasks.values()), return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks.values():
                if task.done():
                    task.result()
        finally:
            up.cancel()

    async def _follow(self, replica: EngineReplica) -> None:
        await replica.link.load(self._progress)
        self._up.set()
        await replica.link.run(replica)

    def kill(self) -> None:
        """Kill the engine processes; `close` must still follow."""
        for replica in self._replicas:
            replica.link.kill()

    async def close(self) -> None:
        """End every stream, then stop the engines that this process has started."""
        self._fail_all(EngineDeadError("the server is shutting down"))
        for replica in list(self._replicas):
            await self._leave(replica)

    async def _leave(self, replica: EngineReplica) -> None:
        task = self._tasks.pop(replica, None)
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, HeadwayError):
                await task
        await replica.link.stop()

    async def leave_retired(self) -> None:
        """Leave the retired engines that have no requests."""
        for replica in list(self._replicas):
            if replica.is_retired and not replica.streams and not replica.suspects.is_under_way:
                self._replicas.remove(replica)
                self._placement.engine_changed(replica, False, self._clock.now())
                await self._leave(replica)

    async def fail_overdue(self) -> None:
        """Fail the requests that have been without an engine for too long."""
        await self._resume_sending()
        limit_s, now = self._failover.max_wait_s, self._clock.now()
        if limit_s is None:
            return
        for stream in list(self._live.by_id.values()):
            is_overdue = stream.lost_at is not None and now - stream.lost_at > limit_s
            if is_overdue and not self._placement.has_engine(stream):
                message = f"no engine continued this request within {limit_s:.0f} s (failover_s)"
                stream.fail(EngineDeadError(message))
                await self.abort(stream, FinishReason.ERROR, message)

    # ---------------------------------------------------------------- requests

    async def submit(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        terms: Terms = NO_TERMS,
        note: Note = NO_NOTE,
    ) -> RequestStream:
        """Check a prompt and send it to an engine; the caller then iterates `deltas`.

        A request with a note is resumable: it goes on when its consumer leaves, until `abort`.
        """
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
            note=note.content,
            alias=note.alias,
        )
        self._quarantine.check(command)
        self._eligible.find_feasible(command)
        stream = RequestStream(command, self.tokenizer)
        self._placement.add(stream, command.arrived_at)
        self._live.add(stream)
        arrived = events.Arrived(
            request_id,
            command.arrived_at,
            len(command.token_ids),
            terms,
            resolved.max_tokens or 0,
            resolved.n,
            priority,
        )
        self._listeners.notify(EventBatch(arrived=[arrived]))
        try:
            await self._send_next()
        except BaseException:
            await self.abort(stream)
            raise
        has_engine = stream.is_sent or self._placement.has_engine(stream)
        stream.is_awaiting_engine = not has_engine
        return stream

    async def deltas(self, stream: RequestStream) -> AsyncGenerator[list[SampleDelta], None]:
        """Yield the deltas of a request; leaving early aborts it unless it is resumable."""
        reader = stream.num_readers
        try:
            while stream.has_more:
                yield await stream.take(reader)
        finally:
            if stream.transcript is None or not stream.unfinished_ids:
                await self.abort(stream)

    async def adopt(
        self, name: str, tenant: str, answer_s: float = ANSWER_S
    ) -> RequestStream | None:
        """Take over a request of another frontend, by id or alias.

        Returns None if no engine has it for this tenant, or none says so within `answer_s`.
        """
        if name in self._live.by_id:
            return None
        return await self._adoptions.ask(name, tenant, self._replicas, answer_s)

    async def _take_over(self, replica: EngineReplica, handover: Handover) -> None:
        """Continue a request that an engine has handed over; an exception ends it only."""
        command, stream = handover.command, None
        try:
            if command is not None and self._adoptions.is_wanted(handover):
                stream = await self._adopt_stream(replica, handover)
        except Exception:
            logger.exception("request %s cannot be adopted", handover.request_id)
        if stream is None and command is not None:
            names = [sample_id(command.id, index) for index in range(command.params.n)]
            await replica.link.send(AbortRequests(names, FinishReason.ABORT))
        self._adoptions.answer(handover.request_id, stream)
        await self._resume_sending()

    async def _adopt_stream(
        self, replica: EngineReplica, handover: Handover
    ) -> RequestStream | None:
        """Return the stream of a request that was handed over; None if it is here already."""
        now = self._clock.now()
        stream = RequestStream.adopt(handover, self.tokenizer, now)
        events_so_far = adoption_events(stream, handover, now)
        if stream in self._live:
            return None
        stream.set_numerics("" if replica.info is None else replica.info.numerics)
        self._live.add(stream)
        self._listeners.notify(events_so_far)
        if handover.is_running:
            replica.add(stream)
            # A stop string may have ended a sample while no frontend read its text.
            if stopped := stopped_samples(stream, handover, now):
                replica.aborting.update(stopped)
                await replica.link.send(AbortRequests(list(stopped), FinishReason.STOP))
        elif stream.unfinished_ids:
            self._placement.add(stream, now)
        logger.info("request %s is adopted from %s", stream.request_id, replica.link.name)
        return stream

    async def abort(
        self, stream: RequestStream, reason: FinishReason = FinishReason.ABORT, message: str = ""
    ) -> None:
        """Remove a request, and abort its unfinished samples in the engine."""
        if stream not in self._live:
            return
        ids = stream.unfinished_ids
        ended = stream.finish_events(self._clock.now(), reason, message)
        replica = self._replica_of(stream)
        self._remove_stream(stream)
        if replica is None:
            self._listeners.notify(EventBatch(finished=ended))
        elif ids:
            replica.aborting.update({event.request_id: event for event in ended})
            # Every sample id: the prompt may have forked since the last report.
            await replica.link.send(AbortRequests(ids, reason))
        await self._resume_sending()

    async def refuse(self, stream: RequestStream, error: HeadwayError) -> None:
        """End a waiting request; its consumer gets `error`."""
        stream.fail(error)
        await self.abort(stream, FinishReason.TIMEOUT, str(error))

    async def refuse_by_id(self, request_id: str, error: HeadwayError) -> None:
        """End a request that no engine has; nothing happens if it is not here."""
        stream = self._live.by_id.get(request_id)
        if stream is not None and not stream.is_sent:
            await self.refuse(stream, error)

    # ----------------------------------------------------------------- sending

    async def send_ready(self) -> None:
        """Send the requests that a router process has decided on."""
        await self._resume_sending()

    async def _send_next(self) -> None:
        """Send the next groups of suspects, then the requests without suspicion."""
        for replica in list(self._replicas):
            while replica.link.is_up:
                group = replica.suspects.begin_trial(self._clock.now(), self._unexplained_at)
                for stream in group:
                    await self._send(stream, replica, is_alone=replica.suspects.is_alone)
                if not group:
                    break
        while (placed := self._placement.next_send(self._clock.now())) is not None:
            await self._send_placed(placed)

    async def _send_placed(self, placed: Placed) -> None:
        if placed.routed is not None and placed.stream in self._live:
            self._listeners.notify(EventBatch(routed=[placed.routed]))
        await self._send(placed.stream, placed.replica)

    async def _send(
        self, stream: RequestStream, replica: EngineReplica, is_alone: bool = False
    ) -> None:
        """Send a request with its output so far; an exception ends this request only.

        `is_alone` says that it is the only suspect on trial.
        """
        if stream not in self._live or stream.is_sent:
            return
        now, num_sent = self._clock.now(), 0
        try:
            self._note_numerics(stream, replica)
            commands = stream.commands(now, is_alone)
            replica.add(stream)
            if stream.is_awaiting_engine:
                stream.is_awaiting_engine = False
                resent = [events.Resent(command.id, now) for command in commands]
                self._listeners.notify(EventBatch(resent=resent))
            elif replica.info is not None:
                replica.forecast_reader.add(stream.command, replica.info, now)
            for command in commands:
                await replica.link.send(command)
                num_sent += 1
        except Exception:
            logger.exception("request %s cannot be sent", stream.request_id)
            if not num_sent:
                replica.remove(stream)
            stream.fail(HeadwayError("this request cannot be sent to the engine"))
            await self.abort(stream, FinishReason.ERROR)

    def _note_numerics(self, stream: RequestStream, replica: EngineReplica) -> None:
        numerics = "" if replica.info is None else replica.info.numerics
        if stream.num_output_tokens and numerics != stream.numerics:
            logger.warning(
                "request %s continues in numerics class %s, not %s (failover: any)",
                stream.request_id,
                numerics or "unknown",
                stream.numerics or "unknown",
            )
        stream.set_numerics(numerics)

    async def _resume_sending(self) -> None:
        """Send requests that waited for a trial or for room, if that has changed."""
        if len(self._placement) or any(one.suspects.is_under_way for one in self._replicas):
            await self._send_next()

    def _replica_of(self, stream: RequestStream) -> EngineReplica | None:
        """Return the engine that has a request; None if none has."""
        return next((one for one in self._replicas if stream in one), None)

    # ------------------------------------------------------- calls from engines

    async def on_engine_up(self, replica: EngineReplica) -> None:
        if len(self._quarantine):
            await replica.link.share_quarantine(self._quarantine.entries)
        self._placement.engine_changed(replica, True, self._clock.now())
        for other in self._replicas:
            if not other.link.is_connected:
                self._move_suspects(other, replica)
        await self._send_next()

    async def on_engine_down(self, replica: EngineReplica, loss: EngineLoss) -> int:
        """Take back the requests of a lost engine, and send them to others; return their number."""
        now = self._clock.now()
        if loss.has_failed and not loss.step_ids:
            self._unexplained_at = now
        lost, replica.aborting = list(replica.aborting.values()), {}
        sent = [one for one in replica.lose_engine() if one.unfinished_ids]
        culprit = replica.suspects.lose_engine(sent, loss)
        if culprit is not None:
            lost += await self._quarantine_stream(culprit)
            sent.remove(culprit)
        for stream in sent:
            stream.lose_engine(now)
        self._place_suspects(replica)
        self._placement.engine_changed(replica, False, now)
        for stream in self._live.by_id.values():
            if not stream.is_sent and not any(stream in one.suspects for one in self._replicas):
                self._place_again(stream, now)
        ids = tuple(name for one in sent for name in one.unfinished_ids)
        self._listeners.notify(EventBatch(finished=lost, lost=[events.EngineLost(now, ids)]))
        await self._send_next()
        return len(sent)

    def _place_again(self, stream: RequestStream, now: float) -> None:
        """Have a request that no engine has wait for one, unless it does."""
        if stream not in self._placement:
            stream.is_awaiting_engine = True
            self._placement.add(stream, now)
        elif not self._placement.has_engine(stream):
            stream.is_awaiting_engine = True

    def _place_suspects(self, replica: EngineReplica) -> None:
        """Decide where the suspects of a lost engine are tried.

        If there is another engine, suspects of one failure go to it at once: a pause is shorter
        than a restart. Suspects of more failures wait for the engine that they took down last, so
        that a request takes down two engines at most, or for another if that one is out of reach.
        """
        others = [one for one in self._replicas if one is not replica and one.link.is_up]
        if not others:
            return
        replica.suspects.release_new()
        if not replica.link.is_connected:
            self._move_suspects(replica, min(others, key=lambda one: one.num_seqs))

    def _move_suspects(self, replica: EngineReplica, target: EngineReplica) -> None:
        """Have the suspects of one engine tried in another."""
        groups, keeps = replica.suspects.take_groups(), self._eligible.keeps_numerics
        target.suspects.add_groups(
            [[one for one in group if keeps(one, target)] for group in groups]
        )
        replica.suspects.add_groups(
            [[one for one in group if not keeps(one, target)] for group in groups]
        )

    async def _quarantine_stream(self, stream: RequestStream) -> list[events.Finished]:
        logger.error("request %s is quarantined", stream.request_id)
        entry = self._quarantine.add(stream.command)
        for replica in self._replicas:
            await replica.link.share_quarantine([entry])
        return self._fail_stream(stream, QuarantinedError(_QUARANTINED))

    async def _learn_quarantine(
        self, replica: EngineReplica, entries: Sequence[QuarantinedDigest]
    ) -> None:
        """Refuse what another frontend has quarantined, end it here, and tell other engines."""
        fresh = self._quarantine.learn(entries)
        digests = {one.digest for one in fresh}
        if not fresh:
            return
        for other in self._replicas:
            if other is not replica:
                await other.link.share_quarantine(fresh)
        for stream in list(self._live.by_id.values()):
            if digest_of(stream.command) in digests:
                logger.error("request %s is quarantined elsewhere", stream.request_id)
                stream.fail(QuarantinedError(_QUARANTINED))
                await self.abort(stream, FinishReason.ERROR, _QUARANTINED)

    def _fail_stream(self, stream: RequestStream, error: HeadwayError) -> list[events.Finished]:
        """Fail a request that no engine has; return its finish events."""
        stream.fail(error)
        self._remove_stream(stream)
        return stream.finish_events(self._clock.now(), FinishReason.ERROR, str(error))

    def _remove_stream(self, stream: RequestStream) -> None:
        self._live.remove(stream)
        self._placement.remove(stream)
        for replica in self._replicas:
            replica.forecast_reader.remove(stream.request_id)
            replica.remove(stream)

    def on_give_up(self, replica: EngineReplica, error: EngineError) -> None:
        replica.has_given_up = True
        if all(one.has_given_up for one in self._replicas):
            self._fail_all(error)
            self.has_given_up = True

    def _fail_all(self, error: EngineError) -> None:
        self._error = error
        lost: list[events.Finished] = []
        for replica in self._replicas:
            lost += replica.aborting.values()
            replica.aborting = {}
        lost += [
            e for one in list(self._live.by_id.values()) for e in self._fail_stream(one, error)
        ]
        self._listeners.notify(EventBatch(finished=lost))

    async def on_report(self, replica: EngineReplica, report: EventBatch) -> None:
        """Apply the events of a report to the streams, then pass them to the listeners."""
        for handover in report.handovers:
            await self._take_over(replica, handover)
        if report.quarantined:
            await self._learn_quarantine(replica, report.quarantined)
        at = report.stepped[-1].at if report.stepped else self._clock.now()
        self._estimate(partial(replica.read_forecast, report, self._clock.now()))
        for event in report.arrived:
            if (stream := self._live.by_sample.get(event.request_id)) is not None:
                stream.reach(self._clock.now())
        refused = [self._refuse(one, at) for one in report.refused]
        # A request arrives once and ends once for listeners, in however many engines it runs.
        # A refusal is an end; the error answer counts it.
        report = replace(report, arrived=[], refused=[], finished=[*refused, *report.finished])
        self._delivery.move(replica, report, at)
        replica.suspects.record_steps(len(report.stepped), self._clock.now())
        self._delivery.add_prompt_results(report)
        delivered, stopped = await self._delivery.emit_all(report.tokens)
        # Listeners count delivered tokens only, and need nothing of prompts.
        report = replace(report, tokens=delivered, scored=[], embedded=[])
        for event in report.finished:
            replica.aborting.pop(event.request_id, None)
            stopped.discard(event.request_id)
        await self._delivery.finish_all(report.finished)
        self._listeners.notify_steps(replica.link.name, report.stepped)
        last_steps = [one.last_step for one in self._replicas]
        self._listeners.notify(total_steps(report, last_steps, len(self._placement)))
        if stopped:
            ends = {name: events.Finished(name, at, FinishReason.STOP, 0) for name in stopped}
            replica.aborting.update(ends)
            await replica.link.send(AbortRequests(list(stopped), FinishReason.STOP))
        await self._delivery.end_broken()
        if self._observe(replica, report) or any(
            one.suspects.is_under_way for one in self._replicas
        ):
            await self._resume_sending()

    def _observe(self, replica: EngineReplica, report: EventBatch) -> bool:
        """Have the placement take over a report; return whether requests may be sent now."""
        try:
            return self._placement.observe(replica, report, self._clock.now())
        except Exception:
            logger.exception("a report of engine %s cannot be used", replica.link.name)
            return True

    def _estimate(self, update: Callable[[], None]) -> None:
        """Run an update of the forecast; an exception in it must not end a request."""
        try:
            update()
        except Exception:
            logger.exception("the forecast cannot be updated")

    def _refuse(self, refusal: events.Refused, at: float) -> events.Finished:
        """Return the finish event of a request that the engine refused.

        A refusal for lack of time also gives the consumer a Retry-After.
        """
        stream = self._live.by_sample.get(refusal.request_id) if refusal.retry_after_s else None
        if stream is not None:
            try:
                self._fail_stream(
                    stream, DeadlineError(refusal.message, ceil(refusal.retry_after_s))
                )
            except Exception:
                self._delivery.note_broken(refusal.request_id)
        return events.Finished(refusal.request_id, at, FinishReason.ERROR, 0, refusal.message)
