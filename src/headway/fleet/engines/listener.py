"""The engine's side of all connections: frontends in, their requests to the engine process.

EngineListener owns the socket and the sessions, and is the owner of the requests for the
supervisor of the engine process. A frontend that is gone, silent, too slow or sends nonsense loses
its session: its requests are aborted or become orphans, and those of other frontends go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_fields

from headway.clock import Clock
from headway.core.events import Finished, Refused
from headway.core.request import FinishReason
from headway.engine.process.messages import (
    AbortRequests,
    AddRequest,
    EngineInfo,
    EventBatch,
    Handover,
)
from headway.engine.supervise.loss import EngineLoss
from headway.engine.supervise.quarantine import Quarantine
from headway.engine.supervise.supervisor import Supervisor
from headway.errors import EngineError, InvalidRequestError, QuarantinedError, WireError
from headway.fleet.engines.numerics import numerics_class, own_class
from headway.fleet.engines.orphans import KeptRequest, KeptRequests
from headway.fleet.engines.sessions import Session, Sessions
from headway.fleet.engines.trials import Trials
from headway.fleet.network.checks import (
    check_id,
    check_name,
    check_request,
    loggable_name,
    refuse_version,
)
from headway.fleet.network.clocks import age_of
from headway.fleet.network.cluster_key import ClusterKey
from headway.fleet.network.endpoints import Endpoint
from headway.fleet.network.server_socket import ServerSocket
from headway.fleet.network.wire import (
    DEFAULT_CREDIT,
    HEARTBEAT_S,
    MAX_SILENCE_S,
    MAX_UNREAD_BYTES,
    PROTOCOL_VERSION,
    Abort,
    Add,
    Adopt,
    Closed,
    Credit,
    EngineDown,
    EngineMessage,
    EngineUp,
    FrontendMessage,
    HandedOver,
    Heartbeat,
    Hello,
    Pulse,
    Quarantined,
    Reported,
    TriedAlone,
    decode_frontend_message,
    decode_hello,
    encode,
    split_wire_id,
    wire_id,
)

logger = logging.getLogger(__name__)

RELEASE_EVERY_S = 0.05
"""How often requests are looked at that wait for a trial."""
HARD_CREDIT = 2
"""What a frontend may have in the engine at most, as a multiple of its credit."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What an engine says about itself beside the facts of its process."""

    model: str
    tokenizer: str
    """Digest of the tokenizer."""
    weights: str = ""
    """Digest of the weights; empty if it is not known."""
    credit: Credit = DEFAULT_CREDIT


class EngineListener:
    """Passes requests of frontends to one supervised engine process, and its events back."""

    def __init__(
        self,
        endpoint: Endpoint,
        key: ClusterKey | None,
        supervisor: Supervisor,
        identity: EngineIdentity,
        clock: Clock,
        orphan_s: float = 0.0,
    ) -> None:
        """Bind the socket; raise ConfigError if that is not possible or not safe."""
        self._supervisor = supervisor
        self._identity = identity
        self._clock = clock
        credit = identity.credit
        self._sessions = Sessions(
            Credit(HARD_CREDIT * credit.num_requests, HARD_CREDIT * credit.num_tokens)
        )
        self._kept = KeptRequests(orphan_s, credit)
        self._quarantine = Quarantine(clock)
        self._trials = Trials()
        self._alone: tuple[Session | None, str] = None, ""
        """Session and wire id of the request that is tried alone."""
        self._releasing: asyncio.Task[None] | None = None
        """Passes on requests that wait for a trial, while there are any."""
        self._epoch = 0
        self._is_up = False
        self._info: EngineInfo | None = None
        """Facts of the engine process, with its numerics class."""
        self._own_class = own_class()
        self._error: EngineError | None = None
        self._used_at = clock.now()
        """When there was last a session, or when the first could have begun."""
        self._socket = ServerSocket(endpoint, key)

    @property
    def address(self) -> str:
        """The address with the port that was bound."""
        return self._socket.address

    @property
    def error(self) -> EngineError | None:
        """Why the engine was given up; None while it was not."""
        return self._error

    @property
    def unused_s(self) -> float:
        """Seconds for which no frontend has been connected."""
        now = self._clock.now()
        if len(self._sessions):
            self._used_at = now
        return now - self._used_at

    async def run(self) -> None:
        """Serve frontends until cancelled."""
        pulses = asyncio.create_task(self._send_pulses())
        try:
            while True:
                await self._receive(await self._socket.receive())
        finally:
            pulses.cancel()
            if self._releasing is not None:
                self._releasing.cancel()

    async def close(self) -> None:
        """End all sessions, so that frontends continue elsewhere at once."""
        for session in self._sessions:
            await self._close_session(session, "the engine stops", tells=True)
        self._socket.close()

    # --------------------------------------------------------------- frontends

    async def _receive(self, frames: list[bytes]) -> None:
        """Handle one message; one that cannot be handled ends its session, and nothing else."""
        session = self._sessions.find(frames[0])
        if self._sessions.has_ended(frames[0]):
            return
        try:
            if len(frames) != 2:
                raise WireError(f"{len(frames)} frames")
            if session is None:
                await self._open_session(frames[0], decode_hello(frames[1]))
                return
            session.heard_at = self._clock.now()
            await self._handle(session, decode_frontend_message(frames[1]))
        except WireError as error:
            if session is None:
                self._sessions.end(frames[0])
            else:
                logger.warning("%s sent what is no message: %s", session.frontend, error)
                await self._close_session(session, "a message is not part of the protocol")
        except Exception:
            logger.exception("a message of a frontend cannot be handled")
            if session is not None:
                await self._close_session(session, "a message cannot be handled", tells=True)

    async def _handle(self, session: Session, message: FrontendMessage) -> None:
        if isinstance(message, Add):
            await self._add(session, message)
        elif isinstance(message, Abort):
            await self._abort(session, message)
        elif isinstance(message, Adopt):
            await self._adopt(session, message)
        elif isinstance(message, Quarantined):
            await self._learn_quarantine(session, message)
        elif isinstance(message, Heartbeat):
            self._note_read(session, message.num_read_bytes)
        else:
            raise WireError("a second Hello")

    async def _open_session(self, identity: bytes, hello: Hello) -> None:
        name = loggable_name(hello.frontend)
        refusal = refuse_version("engine", PROTOCOL_VERSION, hello.version)
        if not refusal and self._sessions.is_full:
            refusal = f"the engine has {len(self._sessions)} frontends, as many as it takes"
        if refusal:
            logger.warning("frontend %s is refused: %s", name, refusal)
            self._sessions.end(identity)
            await self._send_to(identity, Closed(refusal))
            return
        session = self._sessions.open(identity, name, self._clock.now(), hello.instance)
        logger.info("frontend %s is connected", name)
        await self._end_orphans(self._kept.take_orphans_of(hello.instance))
        if self._is_up:
            await self._send_up(session)

    async def _send_up(self, session: Session) -> None:
        await self._send(session, self._engine_up())
        if len(self._quarantine):
            await self._send(session, Quarantined(self._quarantine.entries))

    async def _learn_quarantine(self, session: Session, message: Quarantined) -> None:
        """Refuse what a frontend has quarantined, and tell the other frontends."""
        fresh = self._quarantine.learn(message.entries)
        if fresh:
            logger.warning("%s has quarantined %d requests", session.frontend, len(fresh))
        for other in self._sessions:
            if fresh and other is not session and self._is_up:
                await self._send(other, Quarantined(fresh))

    async def _close_session(self, session: Session, reason: str, tells: bool = False) -> None:
        """End a session, and abort its requests; with `tells`, the frontend hears of it."""
        self._used_at = self._clock.now()
        self._kept.close_session(session)
        ids = self._sessions.close(session)
        logger.info("frontend %s is gone (%s); %d samples", session.frontend, reason, len(ids))
        if tells:
            await self._send_to(session.identity, Closed(reason))
        await self._abort_samples(ids)

    async def _lose_session(self, session: Session, reason: str, tells: bool = False) -> None:
        """End a session whose frontend is out of reach; requests with a note become orphans."""
        self._used_at = now = self._clock.now()
        orphans = self._kept.lose_frontend(session, now)
        ids = self._sessions.lose(session, orphans, now)
        logger.info(
            "frontend %s is gone (%s); %d samples, %d orphans",
            session.frontend,
            reason,
            len(ids),
            len(orphans),
        )
        if tells:
            await self._send_to(session.identity, Closed(reason))
        await self._abort_samples(ids)

    async def _abort_samples(
        self, ids: list[str], reason: FinishReason = FinishReason.ABORT
    ) -> None:
        if not self._is_up:
            return
        held, now = self._trials.take(ids), self._clock.now()
        others = [name for name in ids if name not in held]
        if others:
            await self._supervisor.send(AbortRequests(others, reason))
        if held:
            ends = [Finished(name, now, reason, 0) for name in held]
            await self._share(EventBatch(finished=ends))

    async def _pass_on(self) -> None:
        """Send the process all requests that it gets now, and others when their time comes."""
        while (command := self._trials.pop_ready(self._clock.now())) is not None:
            await self._pass_on_one(command)
        if self._trials.is_holding and (self._releasing is None or self._releasing.done()):
            self._releasing = asyncio.create_task(self._release())

    async def _pass_on_one(self, command: AddRequest) -> None:
        try:
            self._quarantine.check(command)  # it may be known since the request is held
        except QuarantinedError as error:
            refused = Refused(command.id, self._clock.now(), "invalid", str(error))
            await self._share(EventBatch(refused=[refused]))
            return
        await self._supervisor.send(command)
        await self._tell_alone(command)

    async def _tell_alone(self, command: AddRequest) -> None:
        """Tell the frontend of a request on trial whether it is alone, when that changes."""
        sessions, (before, name) = self._sessions, self._alone
        session = sessions.owner_of(command.id)
        if before is not None and session is not before:
            self._alone = None, ""
            if sessions.find(before.identity) is before:
                await self._send(before, TriedAlone(name, False))
        if command.num_crashes and session is not None and session.lost_at is None:
            new_ids = self._trials.new_ids
            if len(sessions.ids_of(session, new_ids)) == len(new_ids):
                (name,) = sessions.ids_of(session, [command.id])
                self._alone = session, name
                await self._send(session, TriedAlone(name, True))

    async def _release(self) -> None:
        while self._trials.is_holding:
            await asyncio.sleep(RELEASE_EVERY_S)
            await self._pass_on()

    async def _end_orphans(self, orphans: Sequence[KeptRequest]) -> None:
        """Abort requests that are no longer kept, if no frontend has them."""
        lost = [one for one in orphans if one.session.lost_at is not None]
        ids = [name for one in lost for name in self._sessions.release(one.session, one.command.id)]
        if ids:
            logger.info("%d orphaned samples end", len(ids))
        await self._abort_samples(ids)

    async def _adopt(self, session: Session, message: Adopt) -> None:
        """Give a request of another frontend to this one, or say that there is none."""
        now = self._clock.now()
        try:
            check_id(message.request_id)
            check_name(message.tenant)
        except InvalidRequestError as error:
            raise WireError(str(error)) from error
        if not self._is_up:
            return  # the frontend has yet to hear of it, and would not read the answer
        kept = self._kept.find(message.request_id, message.tenant)
        has_room = kept is not None and session.live.has_room(kept.command.size)
        if kept is None or kept.session is session or not has_room:
            await self._send(session, HandedOver(now, Handover(message.request_id)))
            return
        before, attempt = kept.session, kept.command.attempt + 1
        ended: list[str] = []
        if kept.is_running and kept.is_partial:
            await self._abort_samples(self._sessions.release(before, kept.command.id))
            kept.is_running = False
        if kept.is_running:
            command = replace_fields(kept.command, attempt=attempt)
            ended = self._sessions.move(before, session, command, kept.has_forked)
        self._kept.give(kept, session, attempt, now)
        handover = kept.handover(attempt, message.request_id)
        if not handover.is_running and not kept.transcript.is_finished:
            self._kept.drop(kept)  # its new frontend sends it again
        logger.info("%s adopts a request of %s", session.frontend, before.frontend)
        await self._send(session, HandedOver(now, handover))
        if ended and before.lost_at is None:
            moved = "another frontend continues this request"
            ends = [Finished(one, now, FinishReason.ABORT, 0, moved) for one in ended]
            await self._send(before, Reported(now, EventBatch(finished=ends)))

    async def _add(self, session: Session, message: Add) -> None:
        info = self._info
        if message.epoch != self._epoch or info is None or not self._is_up:
            return  # the frontend has yet to hear that this engine process is gone
        command, now = message.request, self._clock.now()
        try:
            check_request(command, info)
            if not session.live.has_room(command.size, command.id):
                raise InvalidRequestError("the frontend exceeds its credit")
            self._quarantine.check(command)
        except (InvalidRequestError, QuarantinedError) as error:
            await self._refuse(session, command.attempt, command.id, str(error))
            return
        older = session.live.add(command)
        replaced = self._kept.add(session, command)
        if replaced is not None:
            await self._end_orphans([replaced])
        await self._abort_samples([session.engine_id(name) for name in older])
        self._trials.add(
            replace_fields(
                command,
                id=session.engine_id(wire_id(command.attempt, command.id)),
                arrived_at=now - age_of(command.arrived_at, message.sent_at),
                attempt=0,
                note=b"",
                alias="",
                past=None,
            ),
            now,
        )
        await self._pass_on()

    async def _refuse(self, session: Session, attempt: int, name: str, message: str) -> None:
        logger.warning("a request of %s is refused: %s", session.frontend, message)
        now = self._clock.now()
        refused = Refused(wire_id(attempt, name), now, "invalid", message)
        await self._send(session, Reported(now, EventBatch(refused=[refused])))

    async def _abort(self, session: Session, message: Abort) -> None:
        if message.epoch != self._epoch:
            return
        ids = []
        for name in message.ids:
            attempt, sample = split_wire_id(name)
            try:
                check_id(sample)
            except InvalidRequestError as error:
                raise WireError(str(error)) from error
            if session.live.is_live(attempt, sample):
                ids.append(session.engine_id(name))
        await self._abort_samples(ids, message.reason)

    def _note_read(self, session: Session, num_read_bytes: int) -> None:
        if not session.num_read_bytes <= num_read_bytes <= session.num_sent_bytes:
            raise WireError(f"{num_read_bytes} bytes were not sent")
        session.num_read_bytes = num_read_bytes

    async def _send_pulses(self) -> None:
        """Send a pulse to every frontend at intervals; end the sessions of silent ones."""
        checked_at = self._clock.now()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now = self._clock.now()
            # Time in which this process itself was delayed is no silence: messages are unread.
            late_s, checked_at = now - checked_at - HEARTBEAT_S, now
            await self._end_orphans(self._kept.take_expired(now))
            for session in self._sessions:
                session.heard_at += max(0.0, late_s)
                if now - session.heard_at > MAX_SILENCE_S:
                    await self._lose_session(session, "it is silent", tells=True)
                else:
                    await self._send(session, Pulse())

    async def _send(self, session: Session, message: EngineMessage) -> None:
        num_bytes = await self._send_to(session.identity, message)
        if num_bytes is None:
            await self._lose_session(session, "the connection is lost")
            return
        session.num_sent_bytes += num_bytes
        if session.num_unread_bytes > MAX_UNREAD_BYTES:
            await self._lose_session(session, "it does not read", tells=True)

    async def _send_to(self, identity: bytes, message: EngineMessage) -> int | None:
        """Send a message; return its size, or None if the connection is gone."""
        frame = encode(message)
        return len(frame) if await self._socket.send(identity, frame) else None

    def _engine_up(self) -> EngineUp:
        info, identity = self._info, self._identity
        if info is None:
            raise RuntimeError("an engine without facts is not up")
        return EngineUp(
            PROTOCOL_VERSION,
            identity.model,
            identity.tokenizer,
            self._epoch,
            info,
            identity.credit,
            identity.weights,
        )

    # ------------------------------------------------- calls from the supervisor

    def has_work_in_engine(self) -> bool:
        return self._sessions.num_requests > 0

    async def on_engine_up(self) -> None:
        info = self._supervisor.info
        if info is None:
            raise RuntimeError("an engine without facts is not up")
        numerics = info.numerics or numerics_class(info, self._identity.weights)
        self._info = replace(info, numerics=numerics or self._own_class)
        self._epoch += 1
        self._is_up = True
        self._trials.start_process(self._clock.now())
        for session in self._sessions:
            await self._send_up(session)

    async def on_report(self, report: EventBatch) -> None:
        await self._share(report)
        if self._trials.is_holding:
            await self._pass_on()

    async def _share(self, report: EventBatch) -> None:
        """Send the frontends their events."""
        self._trials.record(report)
        for session, events in self._sessions.split(report).items():
            self._kept.record(session, events, self._clock.now())
            if session.lost_at is None:
                await self._send(session, Reported(self._clock.now(), events))

    async def on_engine_down(self, loss: EngineLoss) -> int:
        """Give the requests back to their frontends; return their number."""
        self._is_up = False
        num_requests = self._sessions.num_requests
        messages = {one: self._engine_down(one, loss) for one in self._sessions}
        self._trials.lose_process(loss)
        self._alone = None, ""
        self._kept.lose_engine()
        self._sessions.lose_engine()
        for session, message in messages.items():
            await self._send(session, message)
        return num_requests

    def _engine_down(self, session: Session, loss: EngineLoss) -> EngineDown:
        """Return what a frontend hears of a loss."""
        ids_of = self._sessions.ids_of
        step_ids = ids_of(session, loss.step_ids)
        # New samples of the step may be the cause, or without a step all of them.
        new_ids = [one for one in self._trials.new_ids if one in (loss.step_ids or {one})]
        return EngineDown(
            step_ids,
            has_failed=loss.has_failed and (bool(step_ids) or not loss.step_ids),
            is_shared=len(ids_of(session, new_ids)) < len(new_ids),
            held_ids=ids_of(session, self._trials.held_ids),
        )

    def on_give_up(self, error: EngineError) -> None:
        self._error = error
