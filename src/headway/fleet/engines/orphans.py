"""Requests that outlive their frontend: what an engine keeps of them, and for how long.

The engine's host records the output of every request with a note. If the connection of its frontend
is lost, the request is an orphan: it runs on for a while, and another frontend may adopt it. A
request that has ended is kept as long, because its last tokens may not have reached the client.
Memory is bounded; a tenant that uses most of it loses its oldest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_fields

from headway.core.request import FinishReason
from headway.engine.client.transcript import MAX_SIZE, Transcript
from headway.engine.process.messages import AddRequest, EventBatch, Handover
from headway.fleet.engines.sessions import Session
from headway.fleet.network.wire import Credit, split_wire_id

MAX_KEPT = 4096
"""Requests whose output is recorded."""
MAX_KEPT_SIZE = 2 * 1024**2
"""Tokens and log-probabilities of these requests."""
MIN_KEPT_SIZE = MAX_KEPT_SIZE // MAX_KEPT
"""What each counts at least for its tenant: many small ones must not push out a few large."""
_GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True, eq=False)
class KeptRequest:
    """A request with a note, and its output so far."""

    session: Session
    command: AddRequest
    """The whole request, without output."""
    transcript: Transcript
    num_cached_tokens: int | None = None
    is_running: bool = True
    """Whether the engine process has it."""
    is_split: bool = False
    """Whether its samples were sent one by one."""
    expires_at: float | None = None
    """When it ends, or is forgotten; None while it runs for a frontend."""

    @property
    def tenant(self) -> str:
        return self.command.terms.tenant

    @property
    def size(self) -> int:
        return len(self.command.token_ids) + self.transcript.size

    @property
    def has_forked(self) -> bool:
        return bool(self.transcript.samples)

    @property
    def is_partial(self) -> bool:
        """Whether its frontend was lost before it had sent every sample."""
        return self.is_split and len(self.transcript.samples) < self.transcript.num_samples

    @property
    def is_orphan(self) -> bool:
        return self.session.lost_at is not None and not self.transcript.is_finished

    def handover(self, attempt: int, name: str) -> Handover:
        """Return what the next frontend gets, with the number of its attempt.

        `name` is the id or the alias by which the frontend has asked.
        """
        return Handover(
            name,
            replace_fields(self.command, attempt=attempt),
            list(self.transcript.samples.values()),
            self.num_cached_tokens,
            self.is_running,
        )


class KeptRequests:
    """The requests with a note of all frontends of an engine, by id."""

    def __init__(self, orphan_s: float, credit: Credit) -> None:
        self._orphan_s = orphan_s
        self._max_orphans = credit
        """All orphans together may be as many as the requests of one frontend."""
        self._kept: dict[str, KeptRequest] = {}
        self._ids: dict[str, str] = {}
        """Ids of requests, by alias."""
        self._size = 0
        self._surplus: list[KeptRequest] = []
        """Orphans beyond the bounds, which are to end."""

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_orphans(self) -> int:
        return sum(one.is_orphan for one in self._kept.values())

    def find(self, name: str, tenant: str) -> KeptRequest | None:
        """Return a request by id or alias; None if it is not of this tenant."""
        kept = self._kept.get(self._ids.get(name, name))
        return kept if kept is not None and kept.tenant == tenant else None

    def add(self, session: Session, command: AddRequest) -> KeptRequest | None:
        """Record a request that a frontend has sent; return an orphan that it replaces."""
        request_id = command.id.partition("#")[0]
        before = self._kept.get(request_id)
        if before is not None and before.session is session:
            if before.command.attempt == command.attempt:
                self._add_past(before, command)
                return None
            self.drop(before)
        elif before is not None and before.session.lost_at is None:
            return None  # two frontends with one id: the first keeps it
        elif before is not None:
            self.drop(before)
        if not command.note or not self._orphan_s:
            return before
        num_samples = command.params.n if command.past is None else command.past.num_samples
        whole = replace_fields(
            command,
            id=request_id,
            token_ids=command.token_ids[: command.num_prompt_tokens or len(command.token_ids)],
            params=replace(command.params, n=num_samples),
            index=0,
            num_prompt_tokens=0,
            past=None,
        )
        kept = KeptRequest(session, whole, Transcript(num_samples))
        if command.past is not None:
            # The next admission finds the output in the prefix cache too, which is not billed.
            kept.is_split, kept.num_cached_tokens = True, command.past.num_cached_tokens
        self._kept[request_id] = kept
        if command.alias:
            self._ids[command.alias] = request_id
        self._size += kept.size
        self._add_past(kept, command)
        self._make_room()
        return before

    def _add_past(self, kept: KeptRequest, command: AddRequest) -> None:
        samples = [] if command.past is None else command.past.samples
        self._size -= kept.size
        known = {**kept.transcript.samples, **{one.index: one for one in samples}}
        kept.transcript = Transcript(kept.transcript.num_samples, known.values())
        self._size += kept.size

    def record(self, session: Session, events: EventBatch, now: float) -> None:
        """Record the events of a session, which have wire ids."""
        if not self._kept:
            return
        for admission in events.admitted:
            kept, index = self._locate(session, admission.request_id)
            is_first = kept is not None and not kept.is_split and not index
            if kept is not None and is_first and kept.num_cached_tokens is None:
                kept.num_cached_tokens = admission.num_cached_tokens
        for tokens in events.tokens:
            kept, index = self._locate(session, tokens.request_id)
            if kept is not None:
                self._size -= kept.transcript.size
                kept.transcript.emit(index, tokens)
                self._size += kept.transcript.size
                if kept.transcript.size > MAX_SIZE:
                    self._evict([kept])  # a handover must be small beside the unread reports
        for end in (*events.refused, *events.finished):
            kept, index = self._locate(session, end.request_id)
            if kept is None:
                continue
            reason = getattr(end, "reason", None)
            if reason not in _GOOD_ENDS:
                self.drop(kept)
                continue
            kept.transcript.finish(index, FinishReason(reason))
            if kept.transcript.is_finished:
                kept.is_running, kept.expires_at = False, now + self._orphan_s
        self._make_room()

    def lose_frontend(self, session: Session, now: float) -> list[str]:
        """Make orphans of the live requests of a session; return their ids."""
        session.lost_at = now
        for kept in self._of(session):
            kept.expires_at = now + self._orphan_s
        while self._has_too_many_orphans():
            self._evict([one for one in self._kept.values() if one.is_orphan])
        return [one.command.id for one in self._of(session) if not one.transcript.is_finished]

    def close_session(self, session: Session) -> None:
        """Forget the live requests of a session, which end with it."""
        for kept in self._of(session):
            if not kept.transcript.is_finished:
                self.drop(kept)

    def lose_engine(self) -> None:
        """Record that the engine process is gone: orphans wait to be sent again."""
        for kept in list(self._kept.values()):
            if kept.is_orphan:
                kept.is_running = False
            elif not kept.transcript.is_finished:
                self.drop(kept)  # its frontend has it, and decides where it goes on

    def take_expired(self, now: float) -> list[KeptRequest]:
        """Remove and return the requests whose time is over, and those beyond the bounds."""
        ended = [one for one in self._kept.values() if (one.expires_at or now) < now]
        for kept in ended:
            self.drop(kept)
        surplus, self._surplus = self._surplus, []
        return [*ended, *surplus]

    def take_orphans_of(self, instance: str) -> list[KeptRequest]:
        """Remove and return the orphans of a frontend that is back: it has sent them elsewhere."""
        found = [
            one
            for one in self._kept.values()
            if one.is_orphan and instance and one.session.instance == instance
        ]
        for kept in found:
            self.drop(kept)
        return found

    def give(self, kept: KeptRequest, session: Session, attempt: int, now: float) -> None:
        """Record that a request belongs to another frontend now."""
        kept.session = session
        kept.command = replace_fields(kept.command, attempt=attempt)
        kept.expires_at = now + self._orphan_s if kept.transcript.is_finished else None

    def drop(self, kept: KeptRequest) -> None:
        if self._kept.get(kept.command.id) is kept:
            del self._kept[kept.command.id]
            self._size -= kept.size
            if self._ids.get(kept.command.alias) == kept.command.id:
                del self._ids[kept.command.alias]

    def check(self) -> None:
        if self._size != sum(one.size for one in self._kept.values()):
            raise AssertionError("the size is not that of the kept requests")
        if not self._ids.items() <= {(o.command.alias, o.command.id) for o in self._kept.values()}:
            raise AssertionError("an alias is that of no kept request")

    def _of(self, session: Session) -> list[KeptRequest]:
        return [one for one in self._kept.values() if one.session is session]

    def _locate(self, session: Session, name: str) -> tuple[KeptRequest | None, int]:
        """Return the request and the sample of a wire id; None if it is not kept."""
        attempt, sample = split_wire_id(name)
        request_id, _, index = sample.partition("#")
        kept = self._kept.get(request_id)
        if kept is None or kept.session is not session or kept.command.attempt != attempt:
            return None, 0
        return kept, int(index or 0)

    def _has_too_many_orphans(self) -> bool:
        sizes = [one.size for one in self._kept.values() if one.is_orphan]
        limit = self._max_orphans
        return len(sizes) > limit.num_requests or sum(sizes) > limit.num_tokens

    def _make_room(self) -> None:
        """Forget requests until the rest is within bounds; they run on, but not as orphans."""
        while len(self._kept) > MAX_KEPT or self._size > MAX_KEPT_SIZE:
            ended = [one for one in self._kept.values() if one.transcript.is_finished]
            attached = [one for one in self._kept.values() if not one.is_orphan]
            self._evict(ended or attached or self._kept.values())

    def _evict(self, among: Collection[KeptRequest]) -> None:
        """Drop the oldest request of the tenant that uses most memory."""
        sizes: Counter[str] = Counter()
        for kept in among:
            sizes[kept.tenant] += max(kept.size, MIN_KEPT_SIZE)
        tenant = max(sizes, key=lambda name: sizes[name])
        victim = next(one for one in among if one.tenant == tenant)
        self.drop(victim)
        if victim.is_orphan:
            self._surplus.append(victim)
