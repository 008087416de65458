"""The frontends of an engine, and which request belongs to which of them.

The engine process knows a request by an engine id: the number of the session, then the wire id.
So two frontends cannot use the same id, and no frontend can name a request of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from headway.core.events import (
    Admitted,
    Arrived,
    Finished,
    Forked,
    Refused,
    TokensEmitted,
)
from headway.engine.process.messages import EventBatch
from headway.fleet.live import LiveRequests
from headway.fleet.wire import Credit, split_wire_id

MAX_SESSIONS = 64
MAX_ENDED = 1024
"""Connections without a session that are remembered."""

Named = TypeVar("Named", Arrived, Refused, Admitted, Finished)


@dataclass(slots=True, eq=False)
class Session:
    """One connection of a frontend, from its Hello until either side ends it."""

    number: int
    identity: bytes
    """Routing id of the connection, chosen by the socket of the engine."""
    frontend: str
    live: LiveRequests
    heard_at: float
    num_sent_bytes: int = 0
    num_read_bytes: int = 0

    @property
    def num_unread_bytes(self) -> int:
        return self.num_sent_bytes - self.num_read_bytes

    def engine_id(self, wire_id: str) -> str:
        return f"{self.number}:{wire_id}"


class Sessions:
    """The sessions of an engine, by connection and by number."""

    def __init__(self, credit: Credit) -> None:
        self._credit = credit
        self._by_identity: dict[bytes, Session] = {}
        self._by_number: dict[int, Session] = {}
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
        return sum(len(one.live) for one in self._by_identity.values())

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

    def open(self, identity: bytes, frontend: str, now: float) -> Session:
        """Open a session for a connection."""
        self._num_opened += 1
        session = Session(self._num_opened, identity, frontend, LiveRequests(self._credit), now)
        self._by_identity[identity] = session
        self._by_number[session.number] = session
        return session

    def close(self, session: Session) -> list[str]:
        """Close a session; return the engine ids of its live samples."""
        self.end(session.identity)
        self._by_identity.pop(session.identity, None)
        self._by_number.pop(session.number, None)
        return [session.engine_id(name) for name in session.live.clear()]

    def ids_of(self, session: Session, engine_ids: Iterable[str]) -> list[str]:
        """Return the wire ids of those engine ids that belong to a session."""
        found = [self._locate(name) for name in engine_ids]
        return [name for owner, name in found if owner is session]

    def split(self, batch: EventBatch) -> dict[Session, EventBatch]:
        """Return the events of each session, with wire ids; the state of the engine for all."""
        parts = {
            session: EventBatch(idled=batch.idled, stepped=batch.stepped)
            for session in self._by_identity.values()
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

    def _locate(self, engine_id: str) -> tuple[Session | None, str]:
        """Return the session and the wire id of an engine id; None if the session has ended."""
        number, _, name = engine_id.partition(":")
        return self._by_number.get(int(number) if number.isdecimal() else 0), name
