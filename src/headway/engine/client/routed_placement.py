"""Placement by a router: predicted TTFT, prefix caches, and fair shares over the fleet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import ceil

from headway.core.events import Routed
from headway.core.request import Request
from headway.core.terms import NO_TARGETS
from headway.engine.client.eligible import EligibleEngines
from headway.engine.client.placement import Placed
from headway.engine.client.replica import EngineReplica
from headway.engine.client.streams import RequestStream
from headway.engine.process.messages import EventBatch
from headway.errors import DeadlineError
from headway.routing import (
    RULES,
    AllowedEngines,
    EngineLimits,
    FleetDemand,
    FrontendLoad,
    NoEngineInTime,
    Router,
    Rule,
    Sending,
)


class RoutedPlacement:
    """Tells a Router what happens to requests and engines, and sends what it decides."""

    restricts = True

    def __init__(
        self,
        eligible: EligibleEngines,
        rule: str,
        make_router: Callable[[Rule, AllowedEngines], Router] = Router,
    ) -> None:
        self._eligible = eligible
        self._router = make_router(RULES[rule](), self)
        self._replicas: dict[str, EngineReplica] = {}
        """Engines of the router, by name."""
        self._streams: dict[str, RequestStream] = {}
        """Requests of the router, sent or not."""
        self._num_known: dict[str, int] = {}
        """Output tokens of the first sample when its request was added."""
        self._waiting: set[str] = set()
        self._prefilling: set[str] = set()
        """Requests sent and without a first token."""
        self._feasible: dict[str, frozenset[str]] = {}
        """Engines whose forecasts do not rule out a request, if others' do."""
        self._sendings: deque[Sending] = deque()
        """Requests that the router counts as sent; each still waits here."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, stream: RequestStream) -> bool:
        return stream.request_id in self._waiting

    def has_engine(self, stream: RequestStream) -> bool:
        return self._router.engine_of(stream.request_id) is not None

    def demand(self, now: float) -> FleetDemand | None:
        return self._router.demand(now)

    def frontends(self) -> Sequence[FrontendLoad]:
        return self._router.frontends

    def add(self, stream: RequestStream, now: float) -> None:
        request_id, command = stream.request_id, stream.command
        self.remove(stream)
        is_resent = stream.was_sent or stream.is_awaiting_engine
        if command.terms.targets != NO_TARGETS and not is_resent:
            feasible = self._eligible.find_feasible(command)
            self._feasible[request_id] = frozenset(one.link.name for one in feasible)
        self._streams[request_id] = stream
        sample = stream.samples[request_id]
        self._num_known[request_id] = sample.num_tokens
        request = Request(
            id=request_id,
            token_ids=[*command.token_ids, *sample.token_ids],
            params=command.params,
            seed=command.seed,
            arrived_at=command.arrived_at,
            priority=command.priority,
            terms=command.terms,
            num_prompt_tokens=len(command.token_ids),
        )
        outcome = self._router.arrive(request, now, is_resent)
        if isinstance(outcome, NoEngineInTime):
            self._forget(request_id)
            raise DeadlineError(outcome.message, ceil(outcome.retry_after_s))
        self._waiting.add(request_id)

    def remove(self, stream: RequestStream) -> None:
        request_id = stream.request_id
        if request_id in self._streams:
            output_ids = stream.samples[request_id].token_ids[self._num_known[request_id] :]
            self._router.finished(request_id, output_ids)
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        del self._streams[request_id], self._num_known[request_id]
        self._waiting.discard(request_id)
        self._prefilling.discard(request_id)
        self._feasible.pop(request_id, None)

    # ------------------------------------------------------------------ engines

    def observe(self, replica: EngineReplica, report: EventBatch, now: float) -> bool:
        name, router = replica.link.name, self._router
        if name not in self._replicas:
            return False
        for stepped in report.stepped:
            router.observe(name, stepped, now)
        for idled in report.idled:
            router.idle(name, idled.num_blocks_used)
        for admitted in report.admitted:
            if not admitted.is_resumed:
                router.admitted(_prompt_id(admitted.request_id), admitted.num_cached_tokens)
        for tokens in report.tokens:
            request_id = _prompt_id(tokens.request_id)
            if request_id in self._prefilling:
                self._prefilling.remove(request_id)
                router.first_token(request_id)
        for finished in report.finished:
            stream = self._streams.get(_prompt_id(finished.request_id))
            # An end of an earlier attempt is not that of a request that waits again.
            if stream is not None and stream not in self and not stream.unfinished_ids:
                self.remove(stream)
        return bool(self._waiting)

    def engine_changed(self, replica: EngineReplica, is_up: bool, now: float) -> None:
        name, info = replica.link.name, replica.info
        if name in self._replicas and not is_up:
            self._lose(name, now)
        elif name in self._replicas and replica.is_retired:
            # Without any left, a request may wait for every engine.
            self._feasible = {key: one - {name} for key, one in self._feasible.items()}
            self._router.engine_draining(name, now)
        elif name not in self._replicas and is_up and info is not None:
            capacity = info.capacity
            limits = EngineLimits(
                capacity.num_blocks,
                capacity.block_size,
                info.max_num_seqs,
                has_prefix_cache=info.has_prefix_cache,
            )
            self._replicas[name] = replica
            self._router.engine_joined(name, limits)

    def _lose(self, name: str, now: float) -> None:
        """Forget an engine and what it was sent; what waited for it waits for others."""
        self._sendings = deque(one for one in self._sendings if one.engine != name)
        del self._replicas[name]
        self._feasible.clear()
        lost = [
            request_id
            for request_id in self._streams
            if self._router.engine_of(request_id) == name and self._router.is_sent(request_id)
        ]
        self._router.engine_lost(name, now)
        for request_id in lost:
            self._forget(request_id)

    def may_assign(self, request: Request, engine: str) -> bool:
        """Return whether a request may wait for an engine."""
        feasible = self._feasible.get(request.id)
        if feasible and engine not in feasible:
            return False
        return self._eligible.may_wait_for(self._streams[request.id], self._replicas[engine])

    def may_send(self, request: Request, engine: str) -> bool:
        """Return whether a request may be sent to an engine now."""
        return self._eligible.may_send(self._streams[request.id], self._replicas[engine])

    # ------------------------------------------------------------------ sending

    def next_send(self, now: float) -> Placed | None:
        if not self._sendings and self._waiting:
            self._sendings.extend(self._router.tick(now))
        while self._sendings:
            sending = self._sendings.popleft()
            request_id = sending.request.id
            if request_id in self._waiting:
                self._waiting.remove(request_id)
                self._prefilling.add(request_id)
                routed = Routed(
                    request_id,
                    now,
                    sending.engine,
                    str(sending.reason),
                    sending.waited_s,
                    sending.num_cached,
                    sending.predicted_ttft_s,
                )
                return Placed(self._streams[request_id], self._replicas[sending.engine], routed)
        return None


def _prompt_id(sample_id: str) -> str:
    return sample_id.partition("#")[0]
