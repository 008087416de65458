"""Which engine gets a request, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headway.core.events import Routed
from headway.engine.client.eligible import EligibleEngines
from headway.engine.client.replica import EngineReplica
from headway.engine.client.streams import RequestStream
from headway.engine.process.messages import EventBatch

if TYPE_CHECKING:
    from headway.routing import FleetDemand, FrontendLoad


class Placed(NamedTuple):
    """A request to send to an engine now."""

    stream: RequestStream
    replica: EngineReplica
    routed: Routed | None = None
    """How a router chose the engine."""


class Placement(Protocol):
    """Has the requests that no engine has, except suspects, and chooses their engines."""

    has_engine: Callable[[RequestStream], bool]
    """Returns whether a request that is not sent waits for a certain engine."""
    demand: Callable[[float], FleetDemand | None]
    """Returns the work that arrives and waits now; None if it is not measured."""
    frontends: Callable[[], Sequence[FrontendLoad]]
    """Returns the frontends that share a router process; none without one."""

    def __len__(self) -> int: ...

    def __contains__(self, stream: RequestStream) -> bool: ...

    def add(self, stream: RequestStream, now: float) -> None:
        """Take a request that no engine has; raise DeadlineError if it cannot meet its targets."""
        ...

    def remove(self, stream: RequestStream) -> None:
        """Forget a request that has ended, sent or not."""
        ...

    def observe(self, replica: EngineReplica, report: EventBatch, now: float) -> bool:
        """Take over what an engine reports; return whether requests may be sent now."""
        ...

    def engine_changed(self, replica: EngineReplica, is_up: bool, now: float) -> None:
        """Take over that an engine is up, is lost, or was retired."""
        ...

    def next_send(self, now: float) -> Placed | None:
        """Return the next request to send; it is no longer here."""
        ...


class LeastLoaded:
    """Chooses the engine with the fewest sequences, then with the fewest tokens.

    A request is sent as soon as an engine may have it.
    """

    def __init__(self, eligible: EligibleEngines) -> None:
        self._eligible = eligible
        self._waiting: dict[str, RequestStream] = {}
        """In order of arrival, if `_is_sorted`."""
        self._is_sorted = True
        self.has_engine: Callable[[RequestStream], bool] = lambda _stream: False
        self.demand: Callable[[float], FleetDemand | None] = lambda _now: None
        self.frontends: Callable[[], Sequence[FrontendLoad]] = lambda: ()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, stream: RequestStream) -> bool:
        return stream.request_id in self._waiting

    def add(self, stream: RequestStream, now: float) -> None:
        self._waiting[stream.request_id] = stream
        self._is_sorted = self._is_sorted and not stream.was_sent

    def remove(self, stream: RequestStream) -> None:
        self._waiting.pop(stream.request_id, None)

    def observe(self, replica: EngineReplica, report: EventBatch, now: float) -> bool:
        # With each report, all requests that wait would be looked at: only if there is room now.
        return bool(report.finished)

    def engine_changed(self, replica: EngineReplica, is_up: bool, now: float) -> None:
        pass

    def next_send(self, now: float) -> Placed | None:
        if not self._eligible.is_any_up:
            return None
        if not self._is_sorted:
            ordered = sorted(self._waiting.items(), key=lambda item: item[1].command.arrived_at)
            self._waiting, self._is_sorted = dict(ordered), True
        for stream in self._waiting.values():
            engines = self._eligible.find(stream)
            if engines:
                del self._waiting[stream.request_id]
                return Placed(stream, min(engines, key=lambda one: (one.num_seqs, one.num_tokens)))
        return None
