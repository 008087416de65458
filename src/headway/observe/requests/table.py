"""The request table: every live HTTP request, from events.

Metrics, ledger and the statistics line read the table, and keep no state of a request.

The prompts and samples of an HTTP request are its parts; the request ends with its last part. Each
part waits or runs. An admission or an end closes a wait and names its causes. Time that no engine
accounts for gets a cause of its own, so the causes always add up to the wait. Tokens carry no time:
they exist from the end of their step. Memory is bounded by the live requests and by a limit per
request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from headway.core.events import (
    Admitted,
    Adopted,
    Arrived,
    Embedded,
    EngineLost,
    Event,
    Finished,
    Forked,
    Preempted,
    PromptScored,
    Resent,
    Routed,
    TokensEmitted,
)
from headway.core.terms import Terms
from headway.observe.requests.parts import RequestPart, account_of
from headway.observe.trace.account import CauseShare, RequestAccount
from headway.observe.trace.names import split_id

MAX_RECENT = 4000
"""Most accounts of finished requests in memory; about 1 KiB each."""


@dataclass(slots=True)
class TrackedRequest:
    """One HTTP request, live or finished."""

    id: str
    terms: Terms
    parts: dict[str, RequestPart] = field(default_factory=dict[str, RequestPart])
    client_id: str = ""
    revision: int = 0
    """How often the request ended; it continues if a further prompt arrives after the others
    ended."""

    @property
    def is_live(self) -> bool:
        return any(part.is_live for part in self.parts.values())

    @property
    def ended_at(self) -> float:
        """End of the last part that has ended."""
        return max(part.finished_at or 0.0 for part in self.parts.values())

    @property
    def key(self) -> tuple[str, str]:
        return (self.terms.tenant, self.client_id)


_decode = msgspec.msgpack.Decoder(TrackedRequest).decode


@dataclass(slots=True)
class Changes:
    """What the events of at most one step changed, in the order of the events."""

    events: Sequence[Event]
    """All events but tokens, scores and embeddings."""
    admitted: list[Admitted] = field(default_factory=list)
    """First admissions of prompts."""
    num_output_tokens: int = 0
    first_tokens: list[RequestPart] = field(default_factory=list)
    """Parts that gained their first tokens."""
    token_gaps_s: list[float] = field(default_factory=list)
    """Time since the previous tokens, for each part that gained further tokens."""
    waits: list[tuple[Terms, tuple[CauseShare, ...]]] = field(default_factory=list)
    """Waits that ended, by cause."""
    finished: list[tuple[Terms, RequestPart]] = field(default_factory=list)
    ended: list[TrackedRequest] = field(default_factory=list)
    """Requests whose last part finished."""


class RequestTable:
    """Follows requests by their events; `consume` returns what changed."""

    def __init__(self, max_recent: int = MAX_RECENT) -> None:
        self._max_recent = max_recent
        self._live: dict[str, TrackedRequest] = {}
        self._parts: dict[str, tuple[TrackedRequest, RequestPart]] = {}
        """Live parts by id."""
        self._recent: OrderedDict[str, bytes] = OrderedDict()
        """Finished requests, packed: many small long-lived objects would pin whole memory pages."""
        self._by_client: dict[tuple[str, str], str] = {}

    def __len__(self) -> int:
        """Number of live HTTP requests."""
        return len(self._live)

    @property
    def num_live_parts(self) -> int:
        return len(self._parts)

    @property
    def live_parts(self) -> Iterable[tuple[TrackedRequest, RequestPart]]:
        """Parts that have not ended, each with its request."""
        return self._parts.values()

    @property
    def live_requests(self) -> Iterable[TrackedRequest]:
        """HTTP requests that have not ended."""
        return self._live.values()

    def tenant_of(self, part_id: str) -> str | None:
        """Return the tenant of a live part; None for an unknown part."""
        found = self._parts.get(part_id)
        return None if found is None else found[0].terms.tenant

    def consume(self, events: Iterable[Event]) -> Changes:
        """Consume the events of at most one step, in order; return what they changed."""
        events = list(events)
        untimed = (TokensEmitted, PromptScored, Embedded)
        timed = [one for one in events if not isinstance(one, untimed)]
        # The last event is the end of the step.
        at = max((event.at for event in timed), default=0.0)
        changes = Changes(timed)
        for event in events:
            if isinstance(event, TokensEmitted):  # the most frequent event
                if found := self._parts.get(event.request_id):
                    part, num_tokens = found[1], len(event.token_ids)
                    changes.num_output_tokens += num_tokens
                    gap_s = part.emit(num_tokens, at)
                    if gap_s is None:
                        changes.first_tokens.append(part)
                    else:
                        changes.token_gaps_s.append(gap_s)
            else:
                self._apply(event, changes)
        return changes

    def _apply(self, event: Event, changes: Changes) -> None:
        match event:
            case Arrived():
                self._arrive(event)
            case Admitted():
                self._admit(event, changes)
            case Finished():
                self._finish(event, changes)
            case Forked():
                self._fork(event)
            case Preempted():
                self._preempt(event)
            case Adopted():
                self._adopt(event)
            case EngineLost():
                self._lose_engine(event)
            case Resent() | Routed():
                self._send(event)
            case _:
                pass

    def _lose_engine(self, event: EngineLost) -> None:
        ids = self._parts if event.request_ids is None else event.request_ids
        for found in [self._parts[one] for one in ids if one in self._parts]:
            found[1].lose_engine(event.at)

    def _send(self, event: Resent | Routed) -> None:
        if found := self._parts.get(event.request_id):
            part = found[1]
            if isinstance(event, Routed):
                part.route(event)
            else:
                part.resend(event.at)

    def set_client_id(
        self, request_id: str, client_id: str, revision: int = 0
    ) -> TrackedRequest | None:
        """Set the client's id, and the least revision; return the request if it has ended."""
        request = self._find_by_id(request_id)
        if request is None:
            return None
        request.client_id = client_id
        request.revision = max(request.revision, revision)
        self._by_client[request.key] = request_id
        return None if request.is_live else self._close(request)

    def find(self, name: str, tenant: str | None) -> TrackedRequest | None:
        """Return a request by either id; of any tenant if `tenant` is None.

        If a client used an id twice, the latest request is returned.
        """
        request = self._find_by_id(name)
        if request is None or tenant not in (None, request.terms.tenant):
            names = self._by_client.items()
            ids = [one for key, one in names if key[1] == name] if tenant is None else []
            found = ids[-1] if ids else self._by_client.get((tenant or "", name), "")
            request = self._find_by_id(found)
        return request

    def since(self, at: float) -> tuple[Iterator[TrackedRequest], bool]:
        """Return live requests and those that ended at `at` or later, and whether these are all.

        The requests are those of now, the latest first, however slowly the caller takes them.
        """
        live, packed = list(self._live.values()), list(self._recent.values())
        ended = (one for one in map(_decode, reversed(packed)) if one.ended_at >= at)
        is_complete = len(packed) < self._max_recent or _decode(packed[0]).ended_at < at
        return chain(reversed(live), ended), is_complete

    def _find_by_id(self, request_id: str) -> TrackedRequest | None:
        """Return a live request, or a copy of a finished one."""
        if request := self._live.get(request_id):
            return request
        packed = self._recent.get(request_id)
        return None if packed is None else _decode(packed)

    def check(self) -> None:
        for request in self._live.values():
            if not request.is_live:
                raise AssertionError(f"{request.id} has ended and is still tracked")
        if len(self._recent) > self._max_recent:
            raise AssertionError(f"{len(self._recent)} finished requests exceed max_recent")
        parts = {
            part.id for one in self._live.values() for part in one.parts.values() if part.is_live
        }
        if parts != self._parts.keys():
            raise AssertionError("the live parts are not those of the live requests")
        known = self._live.keys() | self._recent.keys()
        if not known.issuperset(self._by_client.values()):
            raise AssertionError("a client id maps to an unknown request")

    # ------------------------------------------------------------------ events

    def _arrive(self, event: Arrived) -> None:
        request_id = split_id(event.request_id)[0]
        request = self._find_by_id(request_id) or TrackedRequest(request_id, event.terms)
        self._recent.pop(request_id, None)
        self._live[request_id] = request
        self._add(request, RequestPart.arrive(event))

    def _adopt(self, event: Adopted) -> None:
        """Follow a sample of a request that another frontend had."""
        request_id = split_id(event.request_id)[0]
        request = self._live.get(request_id)
        if request is None:
            # The rows of frontends before have lower revisions: this one replaces them.
            self._recent.pop(request_id, None)
            request = TrackedRequest(request_id, event.terms, revision=event.attempt)
            self._live[request_id] = request
        self._add(request, RequestPart.adopt(event))

    def _add(self, request: TrackedRequest, part: RequestPart) -> None:
        request.parts[part.id] = part
        self._parts[part.id] = (request, part)

    def _admit(self, event: Admitted, changes: Changes) -> None:
        if found := self._parts.get(event.request_id):
            request, part = found
            if part.admitted_at is None:
                changes.admitted.append(event)
            if causes := part.admit(event):
                changes.waits.append((request.terms, causes))

    def _fork(self, event: Forked) -> None:
        if found := self._parts.get(event.parent_id):
            request, parent = found
            self._add(request, parent.fork(event))

    def _preempt(self, event: Preempted) -> None:
        by = self._parts.get(event.by)
        if found := self._parts.get(event.request_id):
            found[1].preempt(event, "" if by is None else by[0].terms.tenant)

    def _finish(self, event: Finished, changes: Changes) -> None:
        found = self._parts.pop(event.request_id, None)
        if found is None:
            return
        request, part = found
        if causes := part.finish(event):
            changes.waits.append((request.terms, causes))
        changes.finished.append((request.terms, part))
        if not request.is_live:
            changes.ended.append(self._close(request))

    def _close(self, request: TrackedRequest) -> TrackedRequest:
        request.revision += 1
        self._live.pop(request.id, None)
        self._recent[request.id] = msgspec.msgpack.encode(request)
        self._recent.move_to_end(request.id)
        while len(self._recent) > self._max_recent:
            oldest = _decode(self._recent.popitem(last=False)[1])
            if self._by_client.get(oldest.key) == oldest.id:
                del self._by_client[oldest.key]
        return request


def account(request: TrackedRequest, now: float, wall_offset_s: float) -> RequestAccount:
    """Return the account as of `now`; `wall_offset_s` converts to wall-clock time."""
    return account_of(
        request.id,
        request.terms,
        list(request.parts.values()),
        client_id=request.client_id,
        now=now,
        wall_offset_s=wall_offset_s,
    )
