"""The link of a frontend to one engine on the network.

Connects, and connects again for as long as the frontend runs. The owner of the requests hears when
the engine is up and when it is lost, as from the supervisor of a local engine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as dataclass_replace
from typing import TypeVar

import zmq.asyncio
from msgspec.structs import replace as replace_fields

from headway.clock import Clock
from headway.core.events import (
    Admitted,
    Arrived,
    Embedded,
    Finished,
    Forked,
    Preempted,
    PromptScored,
    Refused,
    TokensEmitted,
)
from headway.core.request import sample_id
from headway.engine.process.messages import (
    AbortRequests,
    AddRequest,
    Command,
    EngineInfo,
    EventBatch,
    Handover,
    QuarantinedDigest,
)
from headway.engine.supervise.loss import EngineLoss
from headway.engine.supervise.supervisor import EngineOwner, Progress, RestartListener
from headway.errors import InvalidRequestError, WireError
from headway.fleet.network.checks import check_engine, check_handover
from headway.fleet.network.clocks import age_of, localize
from headway.fleet.network.cluster_key import ClusterKey
from headway.fleet.network.connection import (
    ConnectionLostError,
    PeerConnection,
    PeerDialect,
    SessionClosedError,
    engine_dialect,
)
from headway.fleet.network.endpoints import Endpoint
from headway.fleet.network.live import LiveRequests
from headway.fleet.network.wire import (
    DEFAULT_CREDIT,
    PROTOCOL_VERSION,
    Abort,
    Add,
    Adopt,
    EngineDown,
    EngineMessage,
    EngineUp,
    HandedOver,
    Quarantined,
    Reported,
    TriedAlone,
    encode_command,
    split_wire_id,
    wire_id,
)

logger = logging.getLogger(__name__)

Named = TypeVar("Named", Arrived, Refused, Admitted, Preempted, PromptScored, Embedded, Finished)
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0


@dataclass(frozen=True, slots=True)
class LinkParts:
    """What all links of a frontend share."""

    context: zmq.asyncio.Context
    key: ClusterKey | None
    name: str
    """Name of the frontend."""
    tokenizer: str
    """Digest of the frontend's tokenizer."""
    clock: Clock
    may_mix_weights: bool = False
    """Whether engines may have different weights."""
    weights: dict[NetworkLink, str] = field(default_factory=dict["NetworkLink", str])
    """Digest of the weights of every engine that is connected."""
    instance: str = field(default_factory=lambda: secrets.token_hex(8))
    """Random id of this process."""

    @property
    def dialect(self) -> PeerDialect[EngineMessage]:
        return engine_dialect(self.name, self.instance)


class NetworkLink:
    """Sends requests to one engine, by attempt, and drops events of older attempts."""

    def __init__(self, endpoint: Endpoint, parts: LinkParts) -> None:
        """Raise ConfigError if the endpoint needs a cluster key and there is none."""
        endpoint.check_key(parts.key is not None, "--engine")
        self.name = endpoint.address
        self.info: EngineInfo | None = None
        self.is_up = self.is_hung = self.is_connected = False
        self.restart_listeners: list[RestartListener] = []
        self._endpoint = endpoint
        self._parts = parts
        self._connection: PeerConnection[EngineMessage] | None = None
        self._epoch = 0
        self._live = LiveRequests(DEFAULT_CREDIT)
        self._backoff_s = MIN_BACKOFF_S
        self._last_problem = ""
        self._last_sent = self._alone = ""
        """Wire ids of the last sample that was sent, and of the last one that is tried alone."""

    def has_room(self, num_tokens: int) -> bool:
        return self._live.has_room(num_tokens)

    async def load(self, progress: Progress | None = None) -> None:
        """Wait until the engine is up; `progress` is not called, because the engine is not ours."""
        while not self.is_up:
            try:
                await self._wait_up()
            except ConnectionLostError as error:
                await self._retry(error)

    async def run(self, owner: EngineOwner) -> None:
        """Pass all that happens to the owner of the requests, until cancelled."""
        while True:
            kind, loss = await self._serve(owner)
            self.is_up = False
            self._live.clear()
            try:
                num_requests = await owner.on_engine_down(loss)
                self._notify(kind, num_requests)
            except Exception:
                # The link must go on: without it, nothing would be sent to the engine again.
                logger.exception("the loss of engine %s cannot be handled", self.name)
            await self.load()

    async def send(self, command: Command) -> None:
        """Send a command; a lost engine is ignored here.

        Raises WireError if the command is too large: the engine would end the connection.
        """
        if self._connection is None or not self.is_up:
            return
        if isinstance(command, AddRequest):
            frame = encode_command(Add(self._epoch, self._parts.clock.now(), command))
            self._live.add(command)
            self._last_sent = wire_id(command.attempt, command.id)
            await self._connection.send(frame)
        elif isinstance(command, AbortRequests):
            attempts = {name: self._live.attempt_of(name) for name in command.ids}
            ids = [wire_id(one, name) for name, one in attempts.items() if one is not None]
            await self._connection.send(encode_command(Abort(self._epoch, ids, command.reason)))

    def adopt(self, request_id: str, tenant: str) -> Awaitable[bool]:
        """Ask the engine for a request of another frontend; the owner gets a Handover."""
        return self._tell(Adopt(request_id, tenant))

    def share_quarantine(self, entries: Sequence[QuarantinedDigest]) -> Awaitable[bool]:
        """Have the engine refuse requests, and tell its other frontends."""
        return self._tell(Quarantined(list(entries)))

    async def _tell(self, message: Adopt | Quarantined) -> bool:
        if self._connection is None or not self.is_up:
            return False
        await self._connection.send(encode_command(message))
        return True

    def kill(self) -> None:
        """Do nothing: the engine serves other frontends too."""

    async def stop(self) -> None:
        await self._disconnect()

    # -------------------------------------------------------------- connection

    async def _wait_up(self) -> None:
        """Connect if there is no connection, and wait for EngineUp."""
        if self._connection is None:
            parts = self._parts
            self._connection = PeerConnection(
                parts.context, self._endpoint, parts.key, parts.dialect, parts.clock
            )
        while not self.is_up:
            message = await self._connection.receive()
            if isinstance(message, EngineUp):
                self._accept(message)

    def _accept(self, message: EngineUp) -> None:
        problem = self._problem_with(message)
        if problem:
            # What was there before is no longer there, so nothing may be planned with it.
            self.info = None
            raise ConnectionLostError(problem)
        self.info, self._epoch = message.info, message.epoch
        if message.weights:
            self._parts.weights[self] = message.weights
        self._live = LiveRequests(message.credit)
        self.is_up = self.is_connected = True
        self._backoff_s, self._last_problem = MIN_BACKOFF_S, ""
        logger.info(
            "engine %s is up: %s, numerics class %s",
            self.name,
            message.model[:200],
            message.info.numerics,
        )

    def _problem_with(self, message: EngineUp) -> str:
        """Return why this frontend must not use an engine; empty if it may."""
        if message.version != PROTOCOL_VERSION:
            return (
                f"it speaks version {message.version} of the protocol, the frontend version "
                f"{PROTOCOL_VERSION}; run the same release of Headway on both"
            )
        if message.tokenizer != self._parts.tokenizer:
            return (
                f"its model {message.model[:200]} has another tokenizer; start the frontend with "
                "the model of its engines"
            )
        weights = {one for link, one in self._parts.weights.items() if link is not self}
        is_known = not weights or not message.weights or message.weights in weights
        if not is_known and not self._parts.may_mix_weights:
            return (
                f"its model {message.model[:200]} has other weights than the engines in use; give "
                "it frontends of its own, or allow both with --failover any"
            )
        return check_engine(message.info, message.credit)

    async def _retry(self, error: ConnectionLostError) -> None:
        """Disconnect, and wait a while before the next attempt."""
        await self._disconnect()
        problem = str(error)
        if problem != self._last_problem:
            logger.warning("engine %s: %s", self.name, problem)
            self._last_problem = problem
        await asyncio.sleep(self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    async def _disconnect(self) -> None:
        self.is_up = self.is_connected = False
        self._parts.weights.pop(self, None)
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _serve(self, owner: EngineOwner) -> tuple[str, EngineLoss]:
        """Pass reports to the owner until the engine or the connection is lost; return how."""
        try:
            await owner.on_engine_up()
            while True:
                if self._connection is None:
                    raise ConnectionLostError("the link was stopped")
                message = await self._connection.receive()
                if isinstance(message, Reported):
                    await self._report(message, owner)
                elif isinstance(message, HandedOver):
                    handover = await self._take(message)
                    await owner.on_report(EventBatch(handovers=[handover]))
                elif isinstance(message, Quarantined):
                    await owner.on_report(EventBatch(quarantined=message.entries))
                elif isinstance(message, EngineDown):
                    logger.warning("engine %s has failed, and starts again", self.name)
                    return "failed", EngineLoss(
                        _samples(message.step_ids),
                        message.has_failed,
                        message.is_shared,
                        _samples(message.held_ids),
                    )
                elif isinstance(message, TriedAlone):
                    self._alone = message.wire_id if message.is_alone else ""
                elif isinstance(message, EngineUp):
                    raise ConnectionLostError("the engine is up twice")
        except (ConnectionLostError, WireError) as error:
            logger.warning("engine %s is lost: %s", self.name, error)
            await self._disconnect()
            # Whether a request took the machine of the engine down is not known. As after a
            # failure outside of a step, requests of two such losses in a row are suspects.
            return "lost", EngineLoss(
                has_failed=not isinstance(error, SessionClosedError),
                is_shared=not self._alone or self._alone != self._last_sent,
            )
        except Exception:
            logger.exception("a report of engine %s cannot be handled", self.name)
            await self._disconnect()
            return "lost", EngineLoss()

    async def _report(self, message: Reported, owner: EngineOwner) -> None:
        events = self._own(message.events)
        await owner.on_report(localize(events, message.sent_at, self._parts.clock.now()))

    async def _take(self, message: HandedOver) -> Handover:
        """Return a handover with times of this machine; one that is wrong holds no request."""
        handover, now = message.handover, self._parts.clock.now()
        command, nothing = handover.command, Handover(handover.request_id)
        if command is None or self.info is None:
            return nothing
        names = {sample_id(command.id, index) for index in range(command.params.n)}
        try:
            check_handover(handover, self.info)
        except InvalidRequestError as error:
            logger.warning("engine %s handed over what is no request: %s", self.name, error)
            ids = [wire_id(command.attempt, name) for name in names]
            if self._connection is not None:
                await self._connection.send(encode_command(Abort(self._epoch, ids)))
            return nothing
        ended = {sample_id(command.id, one.index) for one in handover.samples if one.reason}
        if handover.is_running and names - ended:
            self._live.adopt(command, names - ended, bool(handover.samples))
        arrived_at = now - age_of(command.arrived_at, message.sent_at)
        return replace_fields(handover, command=replace_fields(command, arrived_at=arrived_at))

    def _notify(self, kind: str, num_requests: int) -> None:
        for listener in self.restart_listeners:
            try:
                listener(kind, num_requests)
            except Exception:
                logger.exception("a restart listener failed")

    # ------------------------------------------------------------------ events

    def _own(self, batch: EventBatch) -> EventBatch:
        """Return the events of live attempts, with the ids of samples."""
        for fork in batch.forked:
            self._live.fork(*split_wire_id(fork.request_id))
        own = EventBatch(idled=batch.idled, stepped=batch.stepped)
        for event in batch.tokens:
            if name := self._name(event.request_id):
                own.tokens.append(TokensEmitted(name, event.token_ids, event.logprobs))
        for event in batch.forked:
            if name := self._name(event.request_id):
                parent_id = split_wire_id(event.parent_id)[1]
                own.forked.append(Forked(name, event.at, parent_id))
        self._translate(batch.arrived, own.arrived)
        self._translate(batch.refused, own.refused)
        self._translate(batch.admitted, own.admitted)
        self._translate(batch.preempted, own.preempted)
        self._translate(batch.scored, own.scored)
        self._translate(batch.embedded, own.embedded)
        self._translate(batch.finished, own.finished)
        for event in (*own.refused, *own.finished):
            self._live.end(event.request_id)
        return own

    def _translate(self, events: Sequence[Named], own: list[Named]) -> None:
        named = ((event, self._name(event.request_id)) for event in events)
        own.extend(dataclass_replace(event, request_id=name) for event, name in named if name)

    def _name(self, wire_name: str) -> str:
        """Return the id of a sample; empty if this attempt of it is not live."""
        attempt, name = split_wire_id(wire_name)
        return name if self._live.is_live(attempt, name) else ""


def _samples(wire_ids: Sequence[str]) -> frozenset[str]:
    return frozenset(split_wire_id(name)[1] for name in wire_ids)
