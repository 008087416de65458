"""The frontends of an engine, and which request belongs to which of them.

The engine process knows a request by an engine id: the number of the session, then the wire id.
So two frontends cannot use the same id, and no frontend can name a request of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from headway.core.events import (
    Admitted,
    Arrived,
    Embedded,
    Finished,
    Forked,
    PromptScored,
    Refused,
    TokensEmitted,
)
from headway.engine.process.messages import AddRequest, EventBatch
from headway.fleet.network.live import LiveRequests
from headway.fleet.network.wire import Credit, split_wire_id, wire_id

MAX_SESSIONS = 64
MAX_ENDED = 1024
"""Connections without a session that are remembered."""

Named = TypeVar("Named", Arrived, Refused, Admitted, PromptScored, Embedded, Finished)


@dataclass(slots=True, eq=False)
class Session:
    """One connection of a frontend, from its Hello until either side ends it."""

    number: int
    identity: bytes
    """Routing id of the connection, chosen by the socket of the engine."""
    frontend: str
    live: LiveRequests
    heard_at: float
    instance: str = ""
    lost_at: float | None = None
    """When its connection was lost; its live requests are orphans then."""
    num_sent_bytes: int = 0
    num_read_bytes: int = 0
    engine_ids: dict[str, str] = field(default_factory=dict[str, str])
    """Engine ids of adopted requests, by wire id."""

    @property
    def num_unread_bytes(self) -> int:
        return self.num_sent_bytes - self.num_read_bytes

    def engine_id(self, wire_id: str) -> str:
        """Return the name of a sample in the engine process."""
        request, mark, index = wire_id.partition("#")
        adopted = self.engine_ids.get(request)
        return f"{self.number}:{wire_id}" if adopted is None else f"{adopted}{mark}{index}"


class Sessions:
    """The sessions of an engine, by connection and by number."""

    def __init__(self, credit: Credit) -> None:
        self._credit = credit
        self._by_identity: dict[bytes, Session] = {}
        self._by_number: dict[int, Session] = {}
        self._adopted: dict[str, tuple[Session, str]] = {}
        """New session and wire id of adopted requests, by engine id."""
        self._ended: dict[bytes, None] = {}
        """Connections whose session has ended or was refused, the oldest first."""
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_identity.values()))

    @property
    def is_full(self) -> bool:
        return len(self) >= MAX_SESSIONS

    @property
    def num_requests(self) -> int:
        return sum(len(one.live) for one in self._by_number.values())

    @property
    def lost(self) -> list[Session]:
        """Sessions whose connection was lost, with their orphans."""
        return [one for one in self._by_number.values() if one.lost_at is not None]

    def find(self, identity: bytes) -> Session | None:
        return self._by_identity.get(identity)

    def has_ended(self, identity: bytes) -> bool:
        """Return whether a connection had its session, or was refused one."""
        return identity in self._ended

    def end(self, identity: bytes) -> None:
        """Have a connection get no session from now on.

        What it has not read is still queued, so a session after another would be without bound.
        """
        self._ended[identity] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def open(self, identity: bytes, frontend: str, now: float, instance: str = "") -> Session:
        """Open a session for a connection."""
        self._num_opened += 1
        live = LiveRequests(self._credit)
        session = Session(self._num_opened, identity, frontend, live, now, instance)
        self._by_identity[identity] = session
        self._by_number[session.number] = session
        return session

    def close(self, session: Session) -> list[str]:
        """Close a session; return the engine ids of its live samples."""
        self._disconnect(session)
        self._by_number.pop(session.number, None)
        ids = [session.engine_id(name) for name in session.live.clear()]
        for request in session.engine_ids.values():
            self._adopted.pop(request, None)
        return ids

    def lose(self, session: Session, orphans: Iterable[str], now: float) -> list[str]:
        """Close a session but for its orphans; return the engine ids of its other samples."""
        self._disconnect(session)
        session.lost_at = now
        kept = set(orphans)
        others = [one for one in session.live.request_ids if one not in kept]
        ids = [name for one in others for name in self.release(session, one)]
        if not len(session.live):
            self._by_number.pop(session.number, None)
        return ids

    def lose_engine(self) -> None:
        """Remove all requests, because the engine process is gone."""
        for session in list(self._by_number.values()):
            session.live.clear()
            session.engine_ids.clear()
            if session.lost_at is not None:
                del self._by_number[session.number]
        self._adopted.clear()

    def _disconnect(self, session: Session) -> None:
        self.end(session.identity)
        self._by_identity.pop(session.identity, None)

    def release(self, session: Session, request_id: str) -> list[str]:
        """Remove a request from its session; return the engine ids of its samples."""
        ids = [session.engine_id(name) for name in session.live.release(request_id)]
        self._forget(session, request_id)
        return ids

    def move(
        self, session: Session, target: Session, command: AddRequest, has_forked: bool
    ) -> list[str]:
        """Give a live request to another session; return the wire ids that end with it.

        `command` has the attempt by which the new session knows it.
        """
        open_ids = session.live.open_ids_of(command.id)
        ended = session.live.release(command.id)
        old = wire_id(split_wire_id(ended[0])[0], command.id)
        engine_id, new = session.engine_id(old), wire_id(command.attempt, command.id)
        self._forget(session, command.id)
        target.live.adopt(command, set(open_ids), has_forked)
        target.engine_ids[new] = engine_id
        self._adopted[engine_id] = target, new
        return ended

    def _forget(self, session: Session, request_id: str) -> None:
        """Forget where an adopted request came from, once its session has it no more."""
        for name in [one for one in session.engine_ids if split_wire_id(one)[1] == request_id]:
            self._adopted.pop(session.engine_ids.pop(name), None)
        if session.lost_at is not None and not len(session.live):
            self._by_number.pop(session.number, None)

    def owner_of(self, engine_id: str) -> Session | None:
        """Return the session that has a sample; None if it has ended."""
        return self._locate(engine_id)[0]

    def ids_of(self, session: Session, engine_ids: Iterable[str]) -> list[str]:
        """Return the wire ids of those engine ids that belong to a session."""
        found = [self._locate(name) for name in engine_ids]
        return [name for owner, name in found if owner is session]

    def split(self, batch: EventBatch) -> dict[Session, EventBatch]:
        """Return the events of each session, with wire ids; the state of the engine for all."""
        parts = {
            session: EventBatch(idled=batch.idled, stepped=batch.stepped)
            for session in self._by_number.values()
        }
        self._share(batch.arrived, lambda part: part.arrived, parts)
        self._share(batch.refused, lambda part: part.refused, parts)
        self._share(batch.admitted, lambda part: part.admitted, parts)
        for fork in batch.forked:
            session, name = self._locate(fork.request_id)
            if session is not None:
                session.live.fork(*split_wire_id(name))
                parent_id = self._locate(fork.parent_id)[1]
                parts[session].forked.append(Forked(name, fork.at, parent_id))
        for preempted in batch.preempted:
            session, name = self._locate(preempted.request_id)
            if session is not None:
                by_session, by = self._locate(preempted.by)
                by = split_wire_id(by)[1] if by_session is session else ""
                parts[session].preempted.append(replace(preempted, request_id=name, by=by))
        for tokens in batch.tokens:
            session, name = self._locate(tokens.request_id)
            if session is not None:
                emitted = TokensEmitted(name, tokens.token_ids, tokens.logprobs)
                parts[session].tokens.append(emitted)
        self._share(batch.scored, lambda part: part.scored, parts)
        self._share(batch.embedded, lambda part: part.embedded, parts)
        self._share(batch.finished, lambda part: part.finished, parts)
        self._end(batch)
        return parts

    def _share(
        self,
        events: Sequence[Named],
        list_of: Callable[[EventBatch], list[Named]],
        parts: dict[Session, EventBatch],
    ) -> None:
        for event in events:
            session, name = self._locate(event.request_id)
            if session is not None:
                list_of(parts[session]).append(replace(event, request_id=name))

    def _end(self, batch: EventBatch) -> None:
        for event in (*batch.refused, *batch.finished):
            session, name = self._locate(event.request_id)
            if session is not None:
                attempt, sample = split_wire_id(name)
                if session.live.is_live(attempt, sample):
                    session.live.end(sample)
                    request_id = sample.partition("#")[0]
                    if not session.live.open_ids_of(request_id):
                        self._forget(session, request_id)

    def _locate(self, engine_id: str) -> tuple[Session | None, str]:
        """Return the session and the wire id of an engine id; None if the session has ended."""
        request, mark, index = engine_id.partition("#")
        if adopted := self._adopted.get(request):
            return adopted[0], f"{adopted[1]}{mark}{index}"
        number, _, name = engine_id.partition(":")
        return self._by_number.get(int(number) if number.isdecimal() else 0), name
