"""An observer that keeps the last ten minutes for the dashboard.

The work of a step is constant per event, and memory is bounded however many tenants and requests
there are. Every five seconds it counts the live requests once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from heapq import nlargest

from headway.clock import Clock
from headway.core.events import Arrived, Event, Preempted, Routed, Stepped
from headway.core.owners import BlockOwners
from headway.core.terms import Terms
from headway.dashboard.history import History, ServerState, TenantLoad, count_kind
from headway.dashboard.tenants import TenantWindow
from headway.dashboard.waits import INTERVAL_S, WaitHistory
from headway.engine.client.async_engine import AsyncEngine
from headway.engine.client.replica import EngineReplica
from headway.observe import Observers
from headway.observe.ledger.usage import tokens_cost_e12
from headway.observe.metrics.goodput import Verdict, verdict_on
from headway.observe.requests.parts import RequestPart
from headway.observe.requests.table import Changes, TrackedRequest

MAX_SHOWN = 8
"""Tenants with a series of their own; all others share one."""
NUM_PREEMPTIONS = 50
NUM_RESTARTS = 20
NUM_ENDED = 200
"""Requests that ended last."""
MAX_ENGINES = 64
"""Most engines whose routed requests are counted apart."""


class Collector:
    """Counts what the dashboard shows; `consume` is called after each step."""

    def __init__(
        self,
        engine: AsyncEngine,
        observers: Observers,
        clock: Clock,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        """Subscribe to the events, refusals and restarts of a server."""
        self._engine = engine
        self.requests = observers.requests
        self._ledger = observers.ledger
        self.clock = clock
        self.time_of_day = time_of_day
        now = clock.now()
        self.history = History(now)
        self.waits = WaitHistory()
        self.waits.advance(self.history.newest.number)
        self.tenants = TenantWindow(now)
        self.num_output_tokens = 0
        self.last_step: Stepped | None = None
        self.preemptions: deque[dict[str, object]] = deque(maxlen=NUM_PREEMPTIONS)
        self.restarts: deque[dict[str, object]] = deque(maxlen=NUM_RESTARTS)
        self.ended: deque[dict[str, object]] = deque(maxlen=NUM_ENDED)
        self.routed: dict[str, int] = {}
        """Requests sent to each engine by the router."""
        observers.others.append(self)
        observers.metrics.refusal_listeners.append(self.count_refusal)
        engine.subscribe_restarts(self.count_restart)

    def consume(self, changes: Changes) -> None:
        """Count what the events of at most one step changed."""
        now = self.clock.now()
        self.advance(now)
        interval = self.history.newest
        for event in changes.events:
            self._count_event(event)
        interval.num_output_tokens += changes.num_output_tokens
        self.num_output_tokens += changes.num_output_tokens
        for part in changes.first_tokens:
            interval.num_first_tokens += 1
            interval.ttft_s += part.ttft_s or 0.0
        for terms, causes in changes.waits:
            waited_s = self.waits.add(causes, now)
            interval.wait_s += waited_s
            counts = self.tenants.of(terms.tenant)
            counts.add("wait_s", waited_s)
            for share in causes:
                counts.add(f"wait:{share.cause}", share.seconds)
        for terms, part in changes.finished:
            self._finish(terms, part)
        for request in changes.ended:
            self.ended.append(self._summary(request))

    def count_refusal(self, reason: str) -> None:
        """Count a refused request."""
        self.advance(self.clock.now())
        count_kind(self.history.newest.refusals, reason)

    def count_restart(self, reason: str, num_resubmitted: int) -> None:
        """Count an engine restart."""
        self.advance(self.clock.now())
        self.history.newest.num_restarts += 1
        at = self.time_of_day()
        self.restarts.append({"at": at, "reason": reason, "num_resubmitted": num_resubmitted})

    def advance(self, now: float) -> None:
        """Begin a new interval if the last one is over, after a look at the live requests."""
        if int(now // INTERVAL_S) <= self.history.newest.number:
            return
        self.history.advance(now, self.state())
        self.waits.advance(self.history.newest.number)
        self.tenants.advance(now)

    def state(self) -> ServerState:
        """Count the live requests by tenant, and the KV blocks by owner."""
        loads: dict[str, TenantLoad] = {}
        for request, part in self.requests.live_parts:
            load = loads.get(request.terms.tenant)
            if load is None:
                load = loads[request.terms.tenant] = TenantLoad()
            if part.waiting_since is None:
                load.num_running += 1
            else:
                load.num_waiting += 1
        most = dict(nlargest(MAX_SHOWN, loads.items(), key=lambda one: one[1].size))
        rest = [load for name, load in loads.items() if name not in most]
        others = TenantLoad(
            sum(one.num_running for one in rest), sum(one.num_waiting for one in rest)
        )
        return ServerState(most, others, *_blocks_of(self._engine.engines))

    # ------------------------------------------------------------------ events

    def _count_event(self, event: Event) -> None:
        interval = self.history.newest
        match event:
            case Stepped():
                self.last_step = event
                interval.step(event)
            case Arrived():
                interval.num_arrived += 1
                self.tenants.of(event.terms.tenant).add("arrived")
            case Preempted():
                count_kind(interval.preemptions, str(event.cause))
                self._preempt(event)
            case Routed():
                is_known = event.engine in self.routed or len(self.routed) < MAX_ENGINES
                name = event.engine if is_known else "other"
                self.routed[name] = self.routed.get(name, 0) + 1
            case _:
                pass

    def _preempt(self, event: Preempted) -> None:
        tenant, by = (self.requests.tenant_of(one) for one in (event.request_id, event.by))
        if tenant is not None:
            self.tenants.of(tenant).add("preempted")
        self.preemptions.append(
            {
                "at": self.time_of_day(),
                "id": event.request_id,
                "tenant": tenant,
                "by": event.by,
                "by_tenant": by,
                "cause": str(event.cause),
                "method": str(event.method),
                "num_tokens_lost": event.num_tokens_lost,
            }
        )

    def _finish(self, terms: Terms, part: RequestPart) -> None:
        interval, counts = self.history.newest, self.tenants.of(terms.tenant)
        interval.num_finished += 1
        counts.add("finished")
        if not part.is_fork:
            counts.add("prompt_tokens", part.num_prompt_tokens)
            counts.add("cached_tokens", part.num_cached_tokens or 0)
        counts.add("output_tokens", part.num_output_tokens)
        if part.ttft_s is not None:
            counts.add("first_tokens")
            counts.add("ttft_s", part.ttft_s)
        verdict = verdict_on(part, terms.targets)
        if verdict is not Verdict.UNKNOWN:
            is_met = verdict is Verdict.MET
            interval.num_met += is_met
            interval.num_missed += not is_met
            counts.add("met" if is_met else "missed")
        num_prompt, num_cached = part.num_prompt_tokens, part.num_cached_tokens or 0
        billed = (num_prompt, num_cached) if part.is_billed else (0, 0)
        price = self._ledger.price_of(terms.tier)
        counts.add("cost", tokens_cost_e12(*billed, part.num_output_tokens, price) / 1e12)

    def _summary(self, request: TrackedRequest) -> dict[str, object]:
        parts = request.parts.values()
        arrived_at = min(part.arrived_at for part in parts)
        ends = [part.finished_at for part in parts if part.finished_at is not None]
        ended_at = max(ends, default=arrived_at)
        return {
            "id": request.id,
            "tenant": request.terms.tenant,
            "state": "finished",
            "age_s": ended_at - arrived_at,
            "wait_s": sum(share.seconds for part in parts for share in part.shares),
            "num_prompt_tokens": sum(one.num_prompt_tokens for one in parts if not one.is_fork),
            "num_output_tokens": sum(part.num_output_tokens for part in parts),
            "reason": max((str(part.reason) for part in parts), default=""),
            "ended_at": self.time_of_day(),
        }


def _blocks_of(engines: Iterable[EngineReplica]) -> tuple[int, BlockOwners]:
    """Return the KV blocks of all engines, and their owners."""
    num_blocks = num_used = num_kept = num_cached = 0
    by_tenant: dict[str, int] = {}
    for engine in engines:
        step, owners = engine.last_step, engine.owners
        if engine.info is not None:
            num_blocks += engine.info.capacity.num_blocks
        if step is None:
            continue
        if owners is None or not step.num_running:
            # The last requests may have ended since the count, without a step.
            num_used += step.num_blocks_used
            num_cached += 0 if owners is None else owners.num_cached
            continue
        num_used += owners.num_used
        num_kept += owners.num_kept
        num_cached += owners.num_cached
        for tenant, count in owners.by_tenant.items():
            by_tenant[tenant] = by_tenant.get(tenant, 0) + count
    most = nlargest(MAX_SHOWN, by_tenant.items(), key=lambda one: one[1])
    return num_blocks, BlockOwners(num_used, dict(most), num_kept, num_cached)
