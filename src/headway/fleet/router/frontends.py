"""The frontends of a router, and one Router for the requests of all of them.

Pure: the caller passes messages and times, and sends what is in the outboxes. The Router knows a
request by the number of its frontend and its id, so that no frontend can name one of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from headway.clock import Clock
from headway.core.params import SamplingParams
from headway.core.request import Request
from headway.errors import WireError
from headway.fleet.router.messages import (
    MAX_AGE_S,
    MAX_ASKED,
    MAX_ASKED_TOKENS,
    Admission,
    Arrive,
    End,
    EngineFound,
    EngineGone,
    EngineIdled,
    EngineStepped,
    FirstToken,
    FromFrontend,
    FrontendsShown,
    RefuseLate,
    ReportSteps,
    Restore,
    RouterRequest,
    SendTo,
    ToFrontend,
)
from headway.fleet.router.quotas import FleetMeters
from headway.routing import (
    RULES,
    AllowedEngines,
    EngineLimits,
    FrontendLoad,
    NoEngineInTime,
    Router,
    Rule,
)
from headway.tenancy import QuotaLease

HARD_BOUND = 2
"""What a frontend may have in the router at most, as a multiple of what it may ask for."""
MAX_REQUESTS = 65_536
"""Requests of one frontend, sent or not."""


@dataclass(slots=True, eq=False)
class JoinedFrontend:
    """A frontend: its engines, its requests, and what it is to be told."""

    number: int
    name: str
    engines: dict[str, bool] = field(default_factory=dict[str, bool])
    """Engines that it can reach, and whether each may get further requests."""
    requests: dict[str, FrontendRequest] = field(default_factory=dict[str, "FrontendRequest"])
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    reported: set[str] = field(default_factory=set[str])
    """Engines whose steps it tells."""
    leases: dict[int, QuotaLease] = field(default_factory=dict[int, QuotaLease])
    outbox: list[ToFrontend] = field(default_factory=list[ToFrontend])

    def load(self, is_own: bool) -> FrontendLoad:
        """Return what a frontend is shown of this one."""
        num_sent = len(self.requests) - self.num_waiting
        return FrontendLoad(self.name, self.num_waiting, num_sent, len(self.engines), is_own)


@dataclass(slots=True, eq=False)
class FrontendRequest:
    """A request of a frontend, from its arrival to its end."""

    id: str
    num_tokens: int
    only: frozenset[str] | None
    is_waiting: bool


class FleetRouter:
    """Decides for all its frontends by one Router."""

    restricts = True

    def __init__(
        self,
        rule: str,
        clock: Clock,
        make_router: Callable[[Rule, AllowedEngines], Router] = Router,
    ) -> None:
        self._meters = FleetMeters(clock)
        self.router = make_router(RULES[rule](), self)
        self._frontends: dict[int, JoinedFrontend] = {}
        self._num_joined = 0
        self._limits: dict[str, EngineLimits] = {}
        """Sizes of the engines that the Router has."""
        self._reporters: dict[str, JoinedFrontend] = {}
        """The frontend that tells the steps of each engine."""

    def __iter__(self) -> Iterator[JoinedFrontend]:
        return iter(list(self._frontends.values()))

    def join(self, name: str) -> JoinedFrontend:
        """Add a frontend."""
        self._num_joined += 1
        frontend = self._frontends[self._num_joined] = JoinedFrontend(self._num_joined, name)
        return frontend

    def leave(self, frontend: JoinedFrontend, now: float) -> None:
        """Remove a frontend with its requests; other frontends tell of those that they adopt."""
        for request in list(frontend.requests.values()):
            self._end(frontend, request)
        for name in list(frontend.engines):
            self._lose_engine(frontend, name, now)
        for lease in frontend.leases.values():
            lease.release()
        del self._frontends[frontend.number]

    def handle(self, frontend: JoinedFrontend, item: FromFrontend, now: float) -> None:
        """Take over what a frontend says; raise WireError if it cannot be."""
        match item:
            case Arrive():
                self._arrive(frontend, item, now)
            case Restore():
                self._restore(frontend, item, now)
            case Admission():
                self.router.admitted(_key(frontend, item.request_id), item.num_cached)
            case FirstToken():
                self.router.first_token(_key(frontend, item.request_id))
            case End():
                request = frontend.requests.get(item.request_id)
                if request is not None:
                    self._end(frontend, request, item.output_ids)
            case EngineFound():
                self._add_engine(frontend, item, now)
            case EngineGone():
                self._remove_engine(frontend, item, now)
            case EngineStepped() | EngineIdled():
                self._observe(frontend, item, now)
            case _:
                answer = self._meters.handle(frontend.leases, item)
                if answer is not None:
                    frontend.outbox.append(answer)

    def tick(self, now: float) -> None:
        """Put what is to be sent now into the outboxes."""
        for sending in self.router.tick(now):
            number, _, request_id = sending.request.id.partition(":")
            frontend = self._frontends[int(number)]
            self._set_waiting(frontend, frontend.requests[request_id], False)
            send = SendTo(
                request_id,
                sending.engine,
                sending.reason,
                sending.waited_s,
                sending.num_cached,
                min(sending.predicted_ttft_s, MAX_AGE_S / 2),
            )
            frontend.outbox.append(send)

    def show_frontends(self) -> None:
        """Put the load of all frontends into the outboxes."""
        for frontend in self:
            loads = [one.load(is_own=one is frontend) for one in self]
            frontend.outbox.append(FrontendsShown(loads))

    # ---------------------------------------------------------------- requests

    def _arrive(self, frontend: JoinedFrontend, item: Arrive, now: float) -> None:
        request = self._begin(frontend, item.request, item.only)
        self._set_waiting(frontend, request, True)
        if (
            frontend.num_waiting > HARD_BOUND * MAX_ASKED
            or frontend.num_waiting_tokens > HARD_BOUND * MAX_ASKED_TOKENS
        ):
            raise WireError("the frontend has too many requests in the router")
        outcome = self.router.arrive(
            _make_request(frontend, item.request, now), now, item.is_resent
        )
        if isinstance(outcome, NoEngineInTime):
            self._set_waiting(frontend, request, False)
            del frontend.requests[request.id]
            refusal = RefuseLate(request.id, outcome.message, outcome.retry_after_s)
            frontend.outbox.append(refusal)

    def _restore(self, frontend: JoinedFrontend, item: Restore, now: float) -> None:
        if item.engine not in frontend.engines:
            return  # the frontend has yet to say that it lost the engine
        request = self._begin(frontend, item.request, None)
        key = _key(frontend, request.id)
        self.router.restore(_make_request(frontend, item.request, now), item.engine, now)
        if item.num_cached is not None:
            self.router.admitted(key, item.num_cached)
        if item.has_first_token:
            self.router.first_token(key)

    def _begin(
        self, frontend: JoinedFrontend, request: RouterRequest, only: list[str] | None
    ) -> FrontendRequest:
        before = frontend.requests.get(request.id)
        if before is not None:
            self._end(frontend, before)
        if len(frontend.requests) >= MAX_REQUESTS:
            raise WireError("the frontend has too many requests")
        allowed = None if only is None else frozenset(only)
        made = FrontendRequest(request.id, len(request.token_ids), allowed, False)
        frontend.requests[made.id] = made
        return made

    def _end(
        self,
        frontend: JoinedFrontend,
        request: FrontendRequest,
        output_ids: list[int] | None = None,
    ) -> None:
        self._set_waiting(frontend, request, False)
        del frontend.requests[request.id]
        self.router.finished(_key(frontend, request.id), output_ids or ())

    def _set_waiting(
        self, frontend: JoinedFrontend, request: FrontendRequest, is_waiting: bool
    ) -> None:
        sign = is_waiting - request.is_waiting
        request.is_waiting = is_waiting
        frontend.num_waiting += sign
        frontend.num_waiting_tokens += sign * request.num_tokens

    # ----------------------------------------------------------------- engines

    def _add_engine(self, frontend: JoinedFrontend, item: EngineFound, now: float) -> None:
        name = item.name
        limits = EngineLimits(
            item.num_blocks,
            item.block_size,
            item.max_num_seqs,
            has_prefix_cache=item.has_prefix_cache,
        )
        if self._limits.get(name, limits) != limits:
            self._forget_engine(name, now)  # started anew, with other settings
        if name not in self._limits:
            self.router.engine_joined(name, limits)
            self._limits[name] = limits
        frontend.engines[name] = True
        self._choose_reporter(name)

    def _remove_engine(self, frontend: JoinedFrontend, item: EngineGone, now: float) -> None:
        if item.name not in frontend.engines:
            return
        if not item.is_draining:
            self._lose_engine(frontend, item.name, now)
            return
        frontend.engines[item.name] = False
        self._move_waiting(frontend, item.name, now)
        if not any(one.engines.get(item.name) for one in self):
            self.router.engine_draining(item.name, now)

    def _lose_engine(self, frontend: JoinedFrontend, name: str, now: float) -> None:
        """Forget what a frontend had in an engine; without any frontend, the engine too."""
        del frontend.engines[name]
        frontend.reported.discard(name)
        for request in list(frontend.requests.values()):
            key = _key(frontend, request.id)
            if self.router.engine_of(key) == name and self.router.is_sent(key):
                del frontend.requests[request.id]
                self.router.forget(key)
        if any(name in one.engines for one in self):
            self._move_waiting(frontend, name, now)
            self._choose_reporter(name)
        else:
            self._forget_engine(name, now)

    def _forget_engine(self, name: str, now: float) -> None:
        self._reporters.pop(name, None)
        del self._limits[name]
        for frontend in self:
            frontend.reported.discard(name)
            for request in list(frontend.requests.values()):
                key = _key(frontend, request.id)
                if self.router.engine_of(key) == name and self.router.is_sent(key):
                    del frontend.requests[request.id]
        self.router.engine_lost(name, now)

    def _move_waiting(self, frontend: JoinedFrontend, name: str, now: float) -> None:
        """Have the requests of a frontend that wait for an engine wait for others."""
        for request in frontend.requests.values():
            if request.is_waiting and self.router.engine_of(_key(frontend, request.id)) == name:
                self.router.reassign(_key(frontend, request.id), now)

    def _choose_reporter(self, name: str) -> None:
        """Have one frontend tell the steps of an engine: that which tells of the fewest."""
        before = self._reporters.get(name)
        able = [one for one in self if name in one.engines]
        chosen = min(able, key=lambda one: (len(one.reported), one.number))
        if before in able:
            if len(before.reported) < len(chosen.reported) + 2:
                return
            before.reported.discard(name)
            before.outbox.append(ReportSteps(sorted(before.reported)))
        self._reporters[name] = chosen
        chosen.reported.add(name)
        chosen.outbox.append(ReportSteps(sorted(chosen.reported)))

    def _observe(
        self, frontend: JoinedFrontend, item: EngineStepped | EngineIdled, now: float
    ) -> None:
        if self._reporters.get(item.name) is not frontend:
            return
        if isinstance(item, EngineStepped):
            self.router.observe(item.name, item.stepped, now)
        else:
            self.router.idle(item.name, item.num_blocks_used)

    # ------------------------------------------------------ calls from the router

    def may_assign(self, request: Request, engine: str) -> bool:
        """Return whether a request may wait for an engine."""
        number, _, request_id = request.id.partition(":")
        frontend = self._frontends[int(number)]
        only = frontend.requests[request_id].only
        return frontend.engines.get(engine, False) and (only is None or engine in only)

    def may_send(self, request: Request, engine: str) -> bool:
        """Return whether a request may be sent to an engine now."""
        return self.may_assign(request, engine)

    def check(self) -> None:
        self.router.check()
        for frontend in self:
            waiting = [one for one in frontend.requests.values() if one.is_waiting]
            if frontend.num_waiting != len(waiting):
                raise AssertionError(f"{frontend.name} miscounts its waiting requests")
            if frontend.num_waiting_tokens != sum(one.num_tokens for one in waiting):
                raise AssertionError(f"{frontend.name} miscounts its waiting tokens")
            for request in frontend.requests.values():
                if self.router.is_sent(_key(frontend, request.id)) == request.is_waiting:
                    raise AssertionError(f"{frontend.name} is wrong about {request.id}")


def _key(frontend: JoinedFrontend, request_id: str) -> str:
    return f"{frontend.number}:{request_id}"


def _make_request(frontend: JoinedFrontend, request: RouterRequest, now: float) -> Request:
    return Request(
        id=_key(frontend, request.id),
        token_ids=request.token_ids,
        params=_params_of(request.max_tokens, request.num_samples, request.is_scored),
        seed=0,
        arrived_at=now - request.age_s,
        priority=request.priority,
        terms=request.terms,
    )


@lru_cache(maxsize=4096)
def _params_of(max_tokens: int, num_samples: int, is_scored: bool) -> SamplingParams:
    """Return the same value for the same sizes: to make and check one takes microseconds."""
    return SamplingParams(
        max_tokens=max_tokens, n=num_samples, prompt_logprobs=0 if is_scored else None
    )
