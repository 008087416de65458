"""SLO admission control, per-step limits and deferred decodes, for the scheduler.

Owns the step-time model, the controller of step limits, and the demand of the open SLO requests.
Targets have an effect under the SLO-aware policies only. Without targets the cost is next to
nothing.

The targets of one tenant must not cost other tenants more than its share. So the step target of a
tenant is never below its step floor (headway.core.slo.feasibility), and the capacity lost to short
steps is charged to the tenant whose target asks for them. Lost is only what work of other tenants,
cut from a step by the target, costs more in later steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import inf
from typing import NamedTuple

from headway.config import SchedulerConfig
from headway.core.plan import StepPlan
from headway.core.request import FinishReason, Request, RequestState
from headway.core.slo.demand import (
    DemandEntry,
    DemandTable,
    OutputLengths,
    RunningWork,
    entry_of,
)
from headway.core.slo.feasibility import (
    Feasible,
    Infeasible,
    TenantShare,
    judge,
    step_floor_s,
)
from headway.core.slo.forecast import (
    NO_DEMAND,
    NO_SAMPLE,
    Demand,
    EngineSpeed,
    Forecast,
    TenantForecast,
    sample_of,
)
from headway.core.slo.step_limits import AIM, Controller, StepLimits, StepLoad
from headway.core.slo.steptime import StepCost, StepShape, StepTimeModel, shape_of
from headway.core.slo.targets import RemainingWork, remaining_work, slack_s
from headway.core.terms import NO_TARGETS, Terms
from headway.core.waiting.accounts import OUTPUT_COST, PROMPT_COST, Accounts, Shares
from headway.core.waiting.policies import SLO_AWARE_POLICIES

MAX_DEFERRED_STEPS = 8
"""Most consecutive steps that a decode may be deferred."""
MAX_PREFILL_SHARE = 0.7
"""Most of a step's time that decodes leave to urgent prefill."""
MOST_CATCH_UP = 0.5
"""Least share of a TPOT target to which steps are shortened for a late request; a request that
needs shorter steps will miss its target."""
ON_ITS_OWN = 0.95
"""Share of a TPOT target above which a late request needs no shorter steps: steps are planned to
take less."""
MAX_TENANTS = 64
"""Most tenants in a forecast, the latest to ask; the engine alone judges the other tenants."""
FORECAST_S = 60.0
"""How long a tenant that has asked for targets stays in the forecast."""
TENANTS_PER_STEP = 4
"""Most tenants whose forecast is made anew in a step: it bounds the cost of a forecast."""
COST_TOLERANCE = 0.01
"""Relative change of a cost coefficient that is ignored in the demand tables: a new cost means
computing all of their entries again."""
SharesOf = Callable[[Iterable[str]], Shares]
"""How far tenants are ahead of their share."""
ENDED = (FinishReason.STOP, FinishReason.LENGTH)


class _StepTarget(NamedTuple):
    """TPOT target that limits the next step, and its tenant."""

    tightest_s: float
    """The smallest TPOT target, not below the tenant's step floor."""
    pace_s: float
    """The smallest time per token needed from now on, not below that floor."""
    tenant: str


class Pacer:
    """Sets per-step limits, defers decodes with slack, and runs SLO admission control."""

    def __init__(
        self, config: SchedulerConfig, accounts: Accounts, find_cached: Callable[[Request], int]
    ) -> None:
        """Start idle; `find_cached` counts a request's tokens in the prefix cache."""
        self.model = StepTimeModel()
        self.cost: StepCost = self.model.cost
        """Coefficients for the next step."""
        self._slow_cost = self.model.slow_cost
        self._table_cost = self._slow_cost
        """The slow cost, changed only if it moves by more than COST_TOLERANCE."""
        self._config = config
        self._accounts = accounts
        self._is_slo_aware = config.scheduling_policy in SLO_AWARE_POLICIES
        self._has_shares = config.scheduling_policy == "fair"
        self._controller = Controller(config)
        self._lengths = OutputLengths()
        self._open: dict[str, Request] = {}
        """Live requests with targets."""
        self._first_token_at: dict[str, float] = {}
        self._find_cached = find_cached
        self._num_cached: dict[str, int] = {}
        """Tokens of open requests that were cached when they arrived."""
        self._entries: dict[str, DemandEntry] = {}
        """Table entries of the open requests that wait."""
        self._table = DemandTable()
        self._tables: dict[str, DemandTable] = {}
        """By tenant."""
        self._running_ids: set[str] = set()
        """Open requests that were running when the tables were last refreshed."""
        self._changed_tenants: set[str] = set()
        """Tenants with requests that were running then, or that left the tables since then."""
        self._is_stale = True
        """Whether requests may have started, ended or progressed since then."""
        self._asked: OrderedDict[str, tuple[float, Terms]] = OrderedDict()
        """When each tenant last asked for targets and on which terms, the latest last."""
        self._forecasts: OrderedDict[str, TenantForecast | None] = OrderedDict()
        """Forecasts of the tenants in `_asked`, oldest first; None before the first."""
        self._num_deferred: dict[str, int] = {}
        self._last_step = StepShape()
        self._step_target: _StepTarget | None = None
        self._cut = StepShape()
        """Work of other tenants that the step target keeps out of this step."""
        self._free_step_s = 0.0
        self._idle = StepLoad(0, StepShape())
        self.limits: StepLimits = self._controller.decide(self._idle, self.cost)
        """Limits of the step that is planned or running."""

    @property
    def has_slo_requests(self) -> bool:
        """Whether due times should order the work of a step."""
        return bool(self._open)

    @property
    def step_tenant(self) -> str | None:
        """Tenant whose TPOT target limits the next step."""
        target = self._step_target
        return None if target is None or self.limits.step_s is None else target.tenant

    @property
    def free_limits(self) -> StepLimits:
        """Limits of a step without a target."""
        return self._controller.free_limits

    def is_cut_for(self, request: Request) -> bool:
        """Whether the step target takes from a request of another tenant that is not spot."""
        return request.terms.tenant != self.step_tenant and not request.terms.is_spot

    def add_cut(self, cut: StepShape) -> None:
        """Add work that the step target keeps out of this step, beside deferred decodes."""
        self._cut = self._cut.plus(cut)

    def speed(self, has_running: bool) -> EngineSpeed:
        """Return the speed of the engine as of the last step."""
        cost, step_s = self._slow_cost, self.limits.step_s
        full_step_s = cost.constant_s + cost.prefill_s(self.limits.max_num_batched_tokens)
        if step_s is None:
            step_s = full_step_s
        if not has_running:
            return EngineSpeed(cost, step_s, full_step_s)
        num_decodes, _, num_context, _ = self._last_step
        decode_s = cost.work_s(StepShape(num_decodes, 0, num_context))
        return EngineSpeed(cost, step_s, full_step_s, decode_s, cost.predict(self._last_step))

    # --------------------------------------------------------------- admission

    def add(
        self,
        request: Request,
        running: Sequence[Request],
        shares: SharesOf,
        now: float,
        is_resent: bool = False,
    ) -> Feasible | Infeasible:
        """Judge a request; if it is feasible, set its planned start and add its demand.

        A request that an earlier engine admitted is not judged again.
        """
        terms = request.terms
        if terms.targets == NO_TARGETS or not self._is_slo_aware:
            return Feasible()
        self.refresh(running, now)
        tenant = terms.tenant
        self._asked[tenant] = now, terms
        self._asked.move_to_end(tenant)
        if tenant not in self._forecasts:
            self._forecasts[tenant] = None
            self._forecasts.move_to_end(tenant, last=False)
        if len(self._asked) > MAX_TENANTS:
            self._drop_oldest_forecast()
        self._num_cached[request.id] = self._find_cached(request)
        work, speed = self._work(request), self.speed(bool(running))
        verdict: Feasible | Infeasible = Feasible()
        if not is_resent:
            share = self._share_of(terms, running, shares((tenant,)), now)
            verdict = judge(work, speed, self._demand(self._table, now), share, now)
        if isinstance(verdict, Infeasible):
            del self._num_cached[request.id]
            return verdict
        request.start_by = work.planned_start_at(speed.cost, speed.step_s)
        self._admit(request, work, verdict.is_by_share, now)
        return verdict

    def _admit(self, request: Request, work: RemainingWork, is_by_share: bool, now: float) -> None:
        self._open[request.id] = request
        self._first_token_at.pop(request.id, None)  # an earlier request may have had this id
        self._enter(request, now)
        horizon_s = min(work.next_due_at, work.last_due_at) - now
        cost = self._slow_cost
        if horizon_s < inf and cost.is_known:
            work_s = cost.work_s(work.prefill) + cost.work_s(work.decodes)
            self._table.tighter.add(0.0 if is_by_share else horizon_s, work_s, now)
            self._tables[request.terms.tenant].tighter.add(horizon_s, work_s, now)

    def add_forked(self, parent: Request, children: Iterable[Request]) -> None:
        """Add further samples of a prompt, with the prompt's targets."""
        if parent.id in self._open:
            for child in children:
                self._open[child.id] = child
                self._running_ids.add(child.id)
            self._is_stale = True

    def leave(self, request: Request) -> None:
        """Remove the demand of a request that has ended, and learn its length."""
        self._num_cached.pop(request.id, None)
        if self._open.pop(request.id, None) is None:
            return
        self._exit(request)
        self._first_token_at.pop(request.id, None)
        self._is_stale = True
        if request.finish_reason in ENDED:
            terms, max_tokens = request.terms, request.params.max_tokens or 1
            num_tokens = request.num_output_tokens
            self._lengths.observe(terms.tenant, terms.tier, num_tokens, max_tokens)

    def _share_of(
        self, terms: Terms, running: Sequence[Request], shares: Shares, now: float
    ) -> TenantShare:
        table, share = self._tables.get(terms.tenant), self._accounts.share(terms)
        owed_s, demand = self._owed_s(terms.tenant, table, shares), NO_DEMAND
        if table is not None:
            demand = self._demand(table, now)
        decode_s = self._decode_s(terms.tenant, running, self._slow_cost)
        lost_speed = self._lost_speed(terms.tenant, bool(running))
        own = demand if self._has_shares else None
        return TenantShare(share, own, owed_s, decode_s, lost_speed)

    def _lost_speed(self, tenant: str, has_running: bool) -> float:
        """Return the speed lost to short steps, if this tenant's target asks for them."""
        target = self._step_target
        if target is None or target.tenant != tenant:
            return 0.0
        speed = self.speed(has_running)
        return max(0.0, speed.full_speed - speed.speed)

    def _owed_s(self, tenant: str, table: DemandTable | None, shares: Shares) -> float:
        num_ahead = 0.0 if table is None else table.num_tokens
        return shares.owed(tenant, num_ahead) * self._slow_cost.per_prefill_token_s

    def _decode_s(self, tenant: str, running: Sequence[Request], cost: StepCost) -> float:
        """Return the seconds of each step for a tenant's decodes with TPOT targets.

        Other decodes of the tenant can be deferred.
        """
        own = [
            one
            for one in running
            if one.terms.tenant == tenant and one.terms.targets.tpot_s is not None
        ]
        num_context = sum([one.num_computed for one in own])
        return cost.per_decode_s * len(own) + cost.per_context_token_s * num_context

    def _demand(self, table: DemandTable, now: float) -> Demand:
        cost = self._table_cost
        return Demand(table.due(cost), table.starts(cost), table.tighter.rates(now))

    def _work(self, request: Request) -> RemainingWork:
        terms, max_tokens = request.terms, request.params.max_tokens or 1
        num_left = self._lengths.expected_left(
            terms.tenant, terms.tier, request.num_output_tokens, max_tokens
        )
        num_cached = self._num_cached.get(request.id, 0)
        return remaining_work(request, num_left, self._first_token_at.get(request.id), num_cached)

    # ------------------------------------------------------------------ demand

    def _enter(self, request: Request, now: float) -> None:
        """Add the work of a waiting request to the tables."""
        work = self._work(request)
        entry = entry_of(work.demands, request.start_by, work.prefill, now, _num_tokens(work))
        self._entries[request.id] = entry
        self._table.add(entry)
        self._tables.setdefault(request.terms.tenant, DemandTable()).add(entry)

    def _exit(self, request: Request) -> None:
        """Remove the work of a request that no longer waits from the tables."""
        entry = self._entries.pop(request.id, None)
        if entry is not None:
            self._table.remove(entry)
            self._tables[request.terms.tenant].remove(entry)
            self._changed_tenants.add(request.terms.tenant)

    def refresh(self, running: Iterable[Request], now: float) -> None:
        """Update the tables with requests that started, were preempted or progressed."""
        if not self._is_stale:
            return
        self._is_stale = False
        everyone, by_tenant = RunningWork(), dict[str, RunningWork]()
        before, self._running_ids = self._running_ids, set()
        if self._open:
            for request in running:
                if request.id in self._open:
                    self._exit(request)
                    self._running_ids.add(request.id)
                    own = by_tenant.get(request.terms.tenant)
                    if own is None:
                        own = by_tenant[request.terms.tenant] = RunningWork()
                    self._collect(request, everyone, own)
            for request_id in before - self._running_ids:
                if request_id in self._open and request_id not in self._entries:
                    self._enter(self._open[request_id], now)
        self._table.set_running(everyone)
        for tenant in self._changed_tenants | by_tenant.keys():
            work, table = by_tenant.get(tenant), self._tables.get(tenant)
            if table is None:
                table = self._tables[tenant] = DemandTable()
            table.set_running(work or RunningWork())
            if work is None and not table.num_waiting:
                del self._tables[tenant]
        self._changed_tenants = set(by_tenant)

    def _collect(self, request: Request, everyone: RunningWork, own: RunningWork) -> None:
        work_s, work = self._slow_cost.work_s, self._work(request)
        for due_at, shape in work.demands:
            point = (due_at, work_s(shape))
            everyone.due.append(point)
            own.due.append(point)
        if work.num_prefill_left:
            point = (request.start_by, work_s(work.prefill))
            everyone.starts.append(point)
            own.starts.append(point)
        own.num_tokens += _num_tokens(work)

    def forecast(self, running: Sequence[Request], shares: SharesOf, now: float) -> Forecast:
        """Return the state by which the API process refuses infeasible requests."""
        speed, active_weight = self.speed(bool(running)), self._accounts.active_weight
        while self._asked and next(iter(self._asked.values()))[0] < now - FORECAST_S:
            self._drop_oldest_forecast()
        if not self._asked and not self._open:
            return Forecast(speed, active_weight=active_weight, made_at=now)
        self.refresh(running, now)
        chosen = list(islice(self._forecasts, TENANTS_PER_STEP))
        leads = shares(chosen)
        for tenant in chosen:
            terms = self._asked[tenant][1]
            self._forecasts[tenant] = self._tenant_forecast(terms, leads, bool(running), now)
            self._forecasts.move_to_end(tenant)
        tenants = {name: one for name, one in self._forecasts.items() if one is not None}
        demand = sample_of(self._demand(self._table, now), now)
        return Forecast(speed, demand, tenants, active_weight, now)

    def become_idle(self) -> None:
        """Drop the limits and tenants' forecasts of the time in which requests were live."""
        self._step_target = None
        self.limits = self._controller.decide(self._idle, self.cost)
        self._asked.clear()
        self._forecasts.clear()

    def _drop_oldest_forecast(self) -> None:
        tenant, _ = self._asked.popitem(last=False)
        del self._forecasts[tenant]

    def _tenant_forecast(
        self, terms: Terms, shares: Shares, has_running: bool, now: float
    ) -> TenantForecast:
        table = self._tables.get(terms.tenant)
        return TenantForecast(
            self._accounts.share(terms),
            NO_SAMPLE if table is None else sample_of(self._demand(table, now), now),
            self._owed_s(terms.tenant, table, shares),
            self._lengths.share(terms.tenant, terms.tier),
            self._lost_speed(terms.tenant, has_running),
            now,
        )

    # ------------------------------------------------------------------- steps

    def begin(self, running: list[Request], num_waiting: int, now: float) -> list[Request]:
        """Set the limits of the next step; return the running requests in it."""
        self._step_target = None
        self._cut = StepShape()
        self._is_stale = True
        if not self._open and self._config.mode != "latency":
            self.limits = self._controller.decide(self._idle, self.cost)
            return running
        decoding: list[Request] = []
        prefill_start = 0
        for request in running:
            if len(request.token_ids) - request.num_computed == 1:
                decoding.append(request)
            elif request.num_computed > prefill_start:
                prefill_start = request.num_computed
        self._free_step_s = self._unconstrained_step_s(running, decoding, num_waiting)
        target = self._step_target = self._find_step_target(running, decoding, now)
        deferred: dict[str, int] = {}
        if target is not None and self.cost.is_known:
            prefill_s = self._urgent_prefill_s(running, num_waiting, AIM * target.pace_s, now)
            deferred = self._defer(decoding, prefill_s, AIM * target.pace_s, now)
        self._num_deferred = deferred
        left_out = [one for one in decoding if one.id in deferred]
        if deferred:
            running = [one for one in running if one.id not in deferred]
            decoding = [one for one in decoding if one.id not in deferred]
        shape = StepShape(len(decoding), 0, sum([one.num_computed for one in decoding]))
        tightest_s, pace_s = (None, None) if target is None else target[:2]
        load = StepLoad(len(running), shape, tightest_s, prefill_start, pace_s, len(deferred))
        self.limits = self._controller.decide(load, self.cost)
        self._cut = StepShape(sum([self.is_cut_for(one) for one in left_out]))
        return running

    def _unconstrained_step_s(
        self, running: Sequence[Request], decoding: Sequence[Request], num_waiting: int
    ) -> float:
        """Return the time of the next step without targets: a full budget if prompts wait."""
        cost, config = self.cost, self._config
        shape = StepShape(len(decoding), 0, sum([one.num_computed for one in decoding]))
        has_room = num_waiting > 0 and self._accounts.num_running < config.max_num_seqs
        if has_room or len(decoding) < len(running):
            shape = shape.plus_prefill(max(0, config.max_num_batched_tokens - len(decoding)))
        return cost.predict(shape)

    def _find_step_target(
        self, running: Sequence[Request], decoding: Sequence[Request], now: float
    ) -> _StepTarget | None:
        """Return the shortest step that a tenant's TPOT targets ask for, within its share."""
        wanted: dict[str, tuple[float, float, Terms]] = {}
        for request in running:
            terms = request.terms
            tpot_s = terms.targets.tpot_s
            if tpot_s is None or request.id not in self._open:
                continue
            tightest_s, pace_s, _ = wanted.get(terms.tenant, (inf, inf, terms))
            pace_s = min(pace_s, self._pace_s(request, tpot_s, now))
            wanted[terms.tenant] = (min(tightest_s, tpot_s), pace_s, terms)
        found: _StepTarget | None = None
        for tenant, (tightest_s, pace_s, terms) in wanted.items():
            own_s = self._decode_s(tenant, decoding, self.cost)
            share = self._accounts.share(terms)
            floor_s = step_floor_s(self.cost, own_s, share, self._free_step_s) / AIM
            target = _StepTarget(max(tightest_s, floor_s), max(pace_s, floor_s), tenant)
            if found is None or target.pace_s < found.pace_s:
                found = target
        return found

    def _pace_s(self, request: Request, tpot_s: float, now: float) -> float:
        """Return the time per token needed from now on to meet the TPOT target."""
        first_at = self._first_token_at.get(request.id)
        if first_at is None:
            return tpot_s
        num_output, max_tokens = request.num_output_tokens, request.params.max_tokens or 1
        late_s = now - first_at - (num_output - 1) * tpot_s
        if late_s <= 0.0:
            return tpot_s
        terms = request.terms
        num_left = self._lengths.expected_left(terms.tenant, terms.tier, num_output, max_tokens)
        needed_s = tpot_s - late_s / num_left
        if needed_s < MOST_CATCH_UP * tpot_s:
            return tpot_s
        return min(tpot_s, needed_s / ON_ITS_OWN)

    def _defer(
        self, decoding: Sequence[Request], prefill_s: float, step_s: float, now: float
    ) -> dict[str, int]:
        """Return decodes to defer, the most slack first, until the step ends in time.

        The values count the consecutive steps that a decode has been deferred.
        """
        if self._config.mode not in ("auto", "latency"):
            return {}
        cost, deferred = self.cost, dict[str, int]()
        full_s = cost.constant_s + sum([cost.decode_s(one.num_computed) for one in decoding])
        excess_s = full_s + prefill_s - step_s
        if excess_s <= 0.0:
            return deferred
        slacks = [slack_s(self._work(one), now, cost, step_s) for one in decoding]
        ranked = sorted(zip(slacks, decoding, strict=True), key=_slack, reverse=True)
        for slack, request in ranked[:-1]:  # a step needs at least one request
            if excess_s <= 0.0 or slack < step_s:
                break
            num_deferred = self._num_deferred.get(request.id, 0)
            if num_deferred < MAX_DEFERRED_STEPS:
                deferred[request.id] = num_deferred + 1
                excess_s -= cost.decode_s(request.num_computed)
        return deferred

    def _urgent_prefill_s(
        self, running: Sequence[Request], num_waiting: int, step_s: float, now: float
    ) -> float:
        """Return the seconds of this step that prefills need to be done when they are due."""
        num_free = self.limits.max_num_seqs - self._accounts.num_running
        is_prefilling = any(len(one.token_ids) - one.num_computed > 1 for one in running)
        if not is_prefilling and (num_waiting == 0 or num_free <= 0):
            return 0.0
        needed_s = self.cost.prefill_s(self._config.prefill_floor)
        for request in running:
            # Spot requests have what others leave: decodes are not deferred for them.
            is_spot = request.terms.is_spot and not request.is_aged
            if len(request.token_ids) - request.num_computed > 1 and not is_spot:
                work = self._work(request)
                left_s = max(step_s, min(work.next_due_at, work.last_due_at) - now - step_s)
                if left_s < inf:
                    needed_s += self.cost.work_s(work.prefill) * step_s / left_s
        return min(needed_s, MAX_PREFILL_SHARE * step_s)

    def end(self, plan: StepPlan, elapsed_s: float, now: float) -> None:
        """Update the model and the open requests after a measured step."""
        shape = shape_of(plan)
        self._charge_lost(shape)
        self.model.observe(shape, elapsed_s)
        self._controller.observe(shape, elapsed_s)
        self.cost, self._slow_cost = self.model.cost, self.model.slow_cost
        if not self._slow_cost.is_close(self._table_cost, COST_TOLERANCE):
            self._table_cost = self._slow_cost
        self._is_stale = True
        num_deferred = len(self._num_deferred)
        self._last_step = shape._replace(num_decodes=shape.num_decodes + num_deferred)
        if self._open:
            for item in plan.scheduled:
                request = self._open.get(item.request_id)
                if request is not None:
                    self._follow(request, now)

    def _charge_lost(self, shape: StepShape) -> None:
        """Charge the capacity lost to a short step to the tenant whose target set it.

        Later steps do the work that was cut, and spend the constant cost of a step on it once more:
        its part of the step that would have had it all.
        """
        tenant, cut, cost = self.step_tenant, self._cut, self.cost
        if tenant is not None and any(cut):
            service = OUTPUT_COST * cut.num_decodes + PROMPT_COST * cut.num_prefill_tokens
            full_step_s = cost.predict(shape.plus(cut))
            self._accounts.charge_lost(tenant, service * cost.constant_s / full_step_s)

    def _follow(self, request: Request, now: float) -> None:
        if request.state is RequestState.FINISHED:
            self.leave(request)
        elif request.num_output_tokens and request.id not in self._first_token_at:
            # A request continued after a crash has earlier tokens; they count as on time.
            had_s = (request.num_output_tokens - 1) * (request.terms.targets.tpot_s or 0.0)
            self._first_token_at[request.id] = now - had_s

    def check(self) -> None:
        """Check that the tables hold the waiting requests, in total and by tenant."""
        self._table.check(list(self._entries.values()))
        if not self._entries.keys() <= self._open.keys():
            raise AssertionError("demand of requests that have ended")
        if sum(table.num_waiting for table in self._tables.values()) != len(self._entries):
            raise AssertionError("the demand of tenants does not add up")
        tenants = {one.terms.tenant for one in self._open.values()}
        if not self._tables.keys() <= tenants | self._changed_tenants:
            raise AssertionError("tables of tenants without requests")


def _num_tokens(work: RemainingWork) -> float:
    """Return the weighted tokens that the tenant will be charged."""
    num_output = work.num_samples * work.num_output_left
    return PROMPT_COST * work.num_prefill_left + OUTPUT_COST * num_output


def _slack(pair: tuple[float, Request]) -> float:
    return pair[0]
