"""Follows every HTTP request by its events, and returns its account.

The prompts and samples of an HTTP request are its parts; the request ends with its last part. Each
part waits or runs. An admission or an end closes a wait and names its causes. Time that no engine
accounts for gets a cause of its own, so the causes always add up to the wait. Memory is bounded by
the live requests and by a limit per request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from headway.core.events import (
    Admitted,
    Arrived,
    EngineLost,
    Event,
    Finished,
    Forked,
    Preempted,
    Resent,
    TokensEmitted,
)
from headway.core.terms import Terms
from headway.observe.metrics.lifetimes import step_time
from headway.observe.trace.account import CauseShare, RequestAccount
from headway.observe.trace.names import split_id
from headway.observe.trace.parts import RequestPart, account_of

MAX_RECENT = 1000
"""Most accounts of finished requests in memory."""

WaitListener = Callable[[Terms, Sequence[CauseShare]], None]


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
    def key(self) -> tuple[str, str]:
        return (self.terms.tenant, self.client_id)


_decode = msgspec.msgpack.Decoder(TrackedRequest).decode


class Audit:
    """Follows requests; `consume` returns the requests that ended."""

    def __init__(self, on_wait: WaitListener | None = None, max_recent: int = MAX_RECENT) -> None:
        self._on_wait = on_wait
        self._max_recent = max_recent
        self._live: dict[str, TrackedRequest] = {}
        self._parts: dict[str, tuple[TrackedRequest, RequestPart]] = {}
        """Live parts by id."""
        self._recent: OrderedDict[str, bytes] = OrderedDict()
        """Finished requests, packed: many small long-lived objects would pin whole memory pages."""
        self._by_client: dict[tuple[str, str], str] = {}

    def __len__(self) -> int:
        """Number of live requests."""
        return len(self._live)

    def consume(self, events: Iterable[Event]) -> list[TrackedRequest]:
        """Consume the events of at most one step, in order."""
        events = list(events)
        at = step_time(events)
        ended: dict[str, TrackedRequest] = {}
        for event in events:
            if isinstance(event, TokensEmitted):  # the most frequent event
                if found := self._parts.get(event.request_id):
                    found[1].emit(len(event.token_ids), at)
            elif isinstance(event, Finished):
                request = self._finish(event)
                if request is not None:
                    ended[request.id] = request
            else:
                self._apply(event)
        return [request for request in ended.values() if not request.is_live]

    def _apply(self, event: Event) -> None:
        match event:
            case Arrived():
                self._arrive(event)
            case Admitted():
                self._admit(event)
            case Forked():
                self._fork(event)
            case Preempted():
                self._preempt(event)
            case EngineLost():
                for _, part in self._parts.values():
                    part.lose_engine(event.at)
            case Resent():
                if found := self._parts.get(event.request_id):
                    found[1].resend(event.at)
            case _:
                pass

    def set_client_id(self, request_id: str, client_id: str) -> TrackedRequest | None:
        """Set the client's id; return the request if it has already ended."""
        request = self._find_by_id(request_id)
        if request is None:
            return None
        request.client_id = client_id
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
        num_tokens = event.num_prompt_tokens
        self._add(
            request, RequestPart(event.request_id, event.at, num_tokens, waiting_since=event.at)
        )

    def _add(self, request: TrackedRequest, part: RequestPart) -> None:
        request.parts[part.id] = part
        self._parts[part.id] = (request, part)

    def _admit(self, event: Admitted) -> None:
        if found := self._parts.get(event.request_id):
            request, part = found
            self._emit_wait(request, part.admit(event))

    def _fork(self, event: Forked) -> None:
        if found := self._parts.get(event.parent_id):
            request, parent = found
            self._add(request, parent.fork(event))

    def _preempt(self, event: Preempted) -> None:
        by = self._parts.get(event.by)
        if found := self._parts.get(event.request_id):
            found[1].preempt(event, "" if by is None else by[0].terms.tenant)

    def _finish(self, event: Finished) -> TrackedRequest | None:
        found = self._parts.pop(event.request_id, None)
        if found is None:
            return None
        request, part = found
        self._emit_wait(request, part.finish(event))
        return None if request.is_live else self._close(request)

    def _emit_wait(self, request: TrackedRequest, causes: Sequence[CauseShare]) -> None:
        if causes and self._on_wait is not None:
            self._on_wait(request.terms, causes)

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
