"""What a frontend has in place of a Router: one that has its requests decided elsewhere.

While a router process is there, requests that arrive wait for its decisions. The Router here hears
of all that happens as well, so that it can decide by itself as soon as the router process is gone:
it then knows the requests of this frontend and the reports of the engines, as without one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import NamedTuple

from headway.core.events import Stepped
from headway.core.request import Request
from headway.core.slo.forecast import Forecast
from headway.core.slo.steptime import StepCost
from headway.fleet.router.messages import (
    MAX_AGE_S,
    MAX_ASKED,
    MAX_ASKED_TOKENS,
    MAX_PRIORITY,
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
    LeaseOpened,
    LeaseRefused,
    RefuseLate,
    ReportSteps,
    Restore,
    RouterRequest,
    SendTo,
    ToFrontend,
)
from headway.fleet.router.quotas import SharedQuotas
from headway.routing import (
    AllowedEngines,
    EngineLimits,
    FleetDemand,
    NoEngineInTime,
    Router,
    Rule,
    Sending,
)
from headway.routing.requests import RoutedRequest

MIN_ASKED_OF_TENANT = 4
"""Requests of a tenant that may wait in the router process, however many others wait there."""
MAX_ASKED_OF_TENANT = 256
MAX_GONE = 1024
"""Keys of requests that are gone, beside as many as of those that are not."""
MAX_ARRIVALS = 128
"""Requests that are decided here at a time."""
ROUTER = "router"
"""What a request that waits for a decision has in place of an engine."""


class _Asked(NamedTuple):
    """A request that waits for a decision of the router process."""

    request: Request
    is_resent: bool


class HeldRequests:
    """Requests that have yet to be asked for, by tenant; each tenant's by priority, then age."""

    def __init__(self) -> None:
        self._requests: dict[str, _Asked] = {}
        self._heaps: dict[str, list[tuple[bool, int, float, int, str]]] = {}
        """Keys of each tenant's requests, the first on top; some are of requests that are gone."""
        self._num_gone = 0
        """Requests that have left since the keys of such requests were last dropped."""
        self._orders = count()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[_Asked]:
        return iter(self._requests.values())

    @property
    def tenants(self) -> list[str]:
        return list(self._heaps)

    def push(self, one: _Asked) -> None:
        request = one.request
        self._requests[request.id] = one
        # By arrival: requests of a lost router come back here after younger ones.
        at, number = request.arrived_at, next(self._orders)
        key = not one.is_resent, request.priority, at, number, request.id
        heappush(self._heaps.setdefault(request.terms.tenant, []), key)

    def first_of(self, tenant: str) -> _Asked | None:
        """Return the first request of a tenant; None if it has none."""
        heap = self._heaps.get(tenant, [])
        while heap and heap[0][-1] not in self._requests:
            heappop(heap)
        if not heap:
            self._heaps.pop(tenant, None)
            return None
        return self._requests[heap[0][-1]]

    def remove(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is None:
            return
        self._num_gone += 1
        if self._num_gone > len(self._requests) + MAX_GONE:
            heaps, self._heaps, self._num_gone = self._heaps, {}, 0
            for tenant, heap in heaps.items():
                left = [key for key in heap if key[-1] in self._requests]
                if left:
                    heapify(left)
                    self._heaps[tenant] = left

    def pop_next(self) -> _Asked | None:
        """Remove and return a request, of each tenant in turn; None if there is none."""
        for tenant in self.tenants:
            one = self.first_of(tenant)
            if one is not None:
                self.remove(one.request.id)
                self._heaps[tenant] = self._heaps.pop(tenant)  # its next turn is the last
                return one
        return None


class SharedRouter(Router):
    """A Router whose decisions a router process makes, while there is one."""

    def __init__(self, rule: Rule, allowed: AllowedEngines) -> None:
        super().__init__(rule, allowed)
        self.is_shared = False
        self.outbox: list[FromFrontend] = []
        """What the router process is to be told."""
        self.on_told: Callable[[], None] = lambda: None
        self.quotas = SharedQuotas()
        self.refusals: deque[RefuseLate] = deque()
        """Requests that no engine is expected to serve in time."""
        self._asked: dict[str, _Asked] = {}
        self._num_asked_tokens = 0
        self._asked_of: Counter[str] = Counter()
        """Requests that wait for a decision, by tenant."""
        self._held = HeldRequests()
        self._known: set[str] = set()
        """Requests that the router process knows."""
        self._decisions: deque[SendTo] = deque()
        self._reported: frozenset[str] = frozenset()
        """Engines whose steps this frontend tells."""

    @property
    def num_asked(self) -> int:
        """Requests that wait for a decision of the router process."""
        return len(self._asked)

    @property
    def num_held(self) -> int:
        """Requests that have yet to be asked for, or decided here."""
        return len(self._held)

    # ------------------------------------------------------- the router process

    def share(self, now: float) -> None:
        """Have a router process decide from now on; it is told what is live, where and whose."""
        self.is_shared = True
        self.quotas.share(self._tell)
        for engine in self.engines:
            self._tell_engine(engine.name, engine.limits)
            if engine.is_draining:
                self._tell(EngineGone(engine.name, is_draining=True))
        for one in list(self._requests.values()):
            if one.is_sent and one.engine is not None:
                num_cached = one.num_cached if one.is_admitted else None
                request = _described(one.request, now)
                self._known.add(one.id)
                self._tell(Restore(request, one.engine.name, num_cached, one.has_first_token))
            elif not one.is_sent:
                super().finished(one.id)
                self._ask(one.request, now, one.is_resent)

    def unshare(self, now: float) -> None:
        """Decide here from now on, also for the requests that were to be decided there."""
        self.is_shared, self._reported, self.frontends = False, frozenset(), ()
        self.quotas.unshare()
        self.outbox.clear()
        self._decisions.clear()
        self._known.clear()
        asked, self._asked, self._num_asked_tokens = self._asked, {}, 0
        self._asked_of.clear()
        for one in asked.values():
            self._held.push(one)
        self._arrive_held(now)

    def take(self, items: Iterable[ToFrontend]) -> None:
        """Take over decisions of the router process; `tick` returns what to send."""
        for item in items:
            match item:
                case SendTo():
                    self._decisions.append(item)
                case ReportSteps():
                    self._reported = frozenset(item.engines)
                case RefuseLate():
                    if self._pop_asked(item.request_id) is not None:
                        self.refusals.append(item)
                case FrontendsShown():
                    self.frontends = item.frontends
                case LeaseOpened() | LeaseRefused():
                    self.quotas.take(item)

    def _tell(self, item: FromFrontend) -> None:
        if self.is_shared:
            self.outbox.append(item)
            self.on_told()

    def _tell_engine(self, name: str, limits: EngineLimits) -> None:
        sizes = limits.num_blocks, limits.block_size, limits.max_num_seqs
        self._tell(EngineFound(name, *sizes, limits.has_prefix_cache))

    def _ask(self, request: Request, now: float, is_resent: bool) -> None:
        if not self._may_ask(request):
            self._held.push(_Asked(request, is_resent))
            return
        only: list[str] | None = None
        if self.allowed.restricts or not self._engines:
            names = [one.name for one in self.engines]
            only = [name for name in names if self.allowed.may_assign(request, name)]
            if not only:
                self._arrive_here(_Asked(request, is_resent), now)
                return
            only = None if len(only) == len(names) else only
        self._asked[request.id] = _Asked(request, is_resent)
        self._num_asked_tokens += request.num_tokens
        self._asked_of[request.terms.tenant] += 1
        self._known.add(request.id)
        self._tell(Arrive(_described(request, now), is_resent, only))

    def _may_ask(self, request: Request) -> bool:
        """Return whether one more request of a tenant may wait in the router process.

        Each tenant has a bound of its own, so that a flood of one leaves room for others.
        """
        num_of_tenant = self._asked_of[request.terms.tenant]
        if num_of_tenant < MIN_ASKED_OF_TENANT:
            return len(self._asked) < 2 * MAX_ASKED - 1
        return (
            num_of_tenant < MAX_ASKED_OF_TENANT
            and len(self._asked) < MAX_ASKED
            and self._num_asked_tokens + request.num_tokens <= MAX_ASKED_TOKENS
        )

    def _ask_held(self, now: float) -> None:
        """Ask for the requests that were held back, as far as there is room."""
        for tenant in self._held.tenants:
            while (one := self._held.first_of(tenant)) is not None and self._may_ask(one.request):
                self._held.remove(one.request.id)
                self._ask(one.request, now, one.is_resent)

    def _arrive_held(self, now: float) -> None:
        """Decide here for some of the requests that were held back, by turns of their tenants.

        Only some: a decision takes part of a millisecond, and streams must not wait for thousands.
        """
        for _ in range(MAX_ARRIVALS):
            one = self._held.pop_next()
            if one is None:
                return
            self._arrive_here(one, now)

    def _pop_asked(self, request_id: str) -> _Asked | None:
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            self._num_asked_tokens -= asked.request.num_tokens
            tenant = asked.request.terms.tenant
            self._asked_of[tenant] -= 1
            if not self._asked_of[tenant]:
                del self._asked_of[tenant]
        return asked

    def _arrive_here(self, asked: _Asked, now: float) -> None:
        # A request that waited here before it was asked for is known to queues by its old key.
        request = replace(asked.request, start_by=inf)
        outcome = super().arrive(request, now, asked.is_resent)
        if isinstance(outcome, NoEngineInTime):
            late = RefuseLate(asked.request.id, outcome.message, outcome.retry_after_s)
            self.refusals.append(late)

    # --------------------------------------------------------- calls of a Router

    def engine_of(self, request_id: str) -> str | None:
        """Return the engine of a request; ROUTER while the router process chooses it."""
        if request_id in self._asked or request_id in self._held:
            return ROUTER if self._engines else None
        return super().engine_of(request_id)

    def engine_joined(self, name: str, limits: EngineLimits, cost: StepCost | None = None) -> None:
        super().engine_joined(name, limits, cost)
        self._tell_engine(name, limits)

    def engine_lost(self, name: str, now: float) -> list[str]:
        self._known -= self._engines[name].sent.keys()
        moved = super().engine_lost(name, now)
        self._tell(EngineGone(name))
        return moved

    def engine_draining(self, name: str, now: float) -> None:
        super().engine_draining(name, now)
        self._tell(EngineGone(name, is_draining=True))

    def observe(self, name: str, stepped: Stepped, now: float) -> None:
        super().observe(name, stepped, now)
        if name in self._reported:
            self._tell(EngineStepped(name, _cut(stepped)))

    def idle(self, name: str, num_blocks_used: int) -> None:
        super().idle(name, num_blocks_used)
        if name in self._reported:
            self._tell(EngineIdled(name, num_blocks_used))

    def arrive(
        self, request: Request, now: float, is_resent: bool = False
    ) -> str | NoEngineInTime | None:
        """Ask the router process for an engine, or choose one here."""
        if not self.is_shared and not len(self._held):
            return super().arrive(request, now, is_resent)
        if not self.is_shared:
            self._held.push(_Asked(request, is_resent))
            return self.engine_of(request.id)
        if not is_resent:
            self._work.add(self._work_s(RoutedRequest(request, now)), now)
        self._ask(request, now, is_resent)
        return self.engine_of(request.id)

    def demand(self, now: float) -> FleetDemand:
        """Return the work that arrives here and waits, whoever decides about it.

        After the loss of a router process, requests that waited there count as arrived again.
        """
        found = super().demand(now)
        waiting = [one.request for one in (*self._asked.values(), *self._held)]
        backlog_s = sum(self._cost.prefill_s(request.num_tokens) for request in waiting)
        targets = [request.terms.targets.ttft_s for request in waiting]
        ttft_s = min((one for one in targets if one is not None), default=found.ttft_s)
        return replace(
            found, backlog_s=found.backlog_s + backlog_s, ttft_s=min(found.ttft_s, ttft_s)
        )

    def admitted(self, request_id: str, num_cached_tokens: int) -> None:
        super().admitted(request_id, num_cached_tokens)
        if request_id in self._known:
            self._tell(Admission(request_id, num_cached_tokens))

    def first_token(self, request_id: str) -> None:
        super().first_token(request_id)
        if request_id in self._known:
            self._tell(FirstToken(request_id))

    def finished(self, request_id: str, output_ids: Sequence[int] = ()) -> None:
        super().finished(request_id, output_ids)
        self._pop_asked(request_id)
        self._held.remove(request_id)
        if request_id in self._known:
            self._known.remove(request_id)
            self._tell(End(request_id, list(output_ids)))

    def tick(self, now: float) -> list[Sending]:
        """Return the requests to send now, by either's decision; each is returned once."""
        sendings: list[Sending] = []
        while self._decisions:
            decision = self._decisions.popleft()
            asked = self._pop_asked(decision.request_id)
            if asked is None:
                continue  # cancelled meanwhile, and the router process was told
            request, engine = asked.request, decision.engine
            if engine in self._engines and self.allowed.may_send(request, engine):
                self.restore(request, engine, now)
                sending = Sending(
                    request,
                    engine,
                    decision.reason,
                    decision.waited_s,
                    decision.num_cached,
                    decision.predicted_ttft_s,
                )
                sendings.append(sending)
            else:
                self._known.discard(request.id)
                self._tell(End(request.id, []))
                self._arrive_here(asked, now)
        if len(self._held):
            (self._ask_held if self.is_shared else self._arrive_held)(now)
        for sending in super().tick(now):
            if self.is_shared:
                self._known.add(sending.request.id)
                self._tell(Restore(_described(sending.request, now), sending.engine))
            sendings.append(sending)
        return sendings


def _cut(stepped: Stepped) -> Stepped:
    """Return a step without demand and owners: they may be large, and no router uses them."""
    forecast = stepped.forecast
    if forecast is not None and (forecast.tenants or forecast.demand.due_ms):
        forecast = Forecast(forecast.speed)
    if stepped.owners is None and forecast is stepped.forecast:
        return stepped  # most steps: a copy takes longer than all else here
    return replace(stepped, forecast=forecast, owners=None)


def _described(request: Request, now: float) -> RouterRequest:
    """Return what the router process must know; a value that it would not read is cut off."""
    return RouterRequest(
        request.id,
        request.token_ids,
        request.params.max_tokens or 1,
        request.params.n,
        max(-MAX_PRIORITY, min(request.priority, MAX_PRIORITY)),
        min(max(0.0, now - request.arrived_at), MAX_AGE_S),
        request.terms,
        request.params.prompt_logprobs is not None,
    )
