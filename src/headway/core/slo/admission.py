"""SLO admission control, and the forecast from which the API process judges likewise.

Refuses a request whose targets cannot be met, or only by missing targets admitted before
(headway.core.slo.feasibility). Targets have an effect under the SLO-aware policies only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from headway.config import SchedulerConfig
from headway.core.request import Request
from headway.core.slo.feasibility import Feasible, Infeasible, TenantShare, judge
from headway.core.slo.forecast import NO_DEMAND, NO_SAMPLE, Forecast, TenantForecast, sample_of
from headway.core.slo.open_requests import OpenRequests
from headway.core.slo.pacer import Pacer
from headway.core.terms import NO_TARGETS, Terms
from headway.core.waiting.accounts import Accounts, Shares
from headway.core.waiting.policies import SLO_AWARE_POLICIES

MAX_TENANTS = 64
"""Most tenants in a forecast, the latest to ask; the engine alone judges the other tenants."""
FORECAST_S = 60.0
"""How long a tenant that has asked for targets stays in the forecast."""
TENANTS_PER_STEP = 4
"""Most tenants whose forecast is made anew in a step: it bounds the cost of a forecast."""
SharesOf = Callable[[Iterable[str]], Shares]
"""How far tenants are ahead of their share."""


class SloAdmission:
    """Judges requests with targets, and makes the forecast."""

    def __init__(
        self,
        config: SchedulerConfig,
        accounts: Accounts,
        pacer: Pacer,
        find_cached: Callable[[Request], int],
    ) -> None:
        """Start without tenants; `find_cached` counts a request's tokens in the prefix cache."""
        self._accounts = accounts
        self._pacer = pacer
        self._open: OpenRequests = pacer.open_requests
        self._find_cached = find_cached
        self._is_slo_aware = config.scheduling_policy in SLO_AWARE_POLICIES
        self._has_shares = config.scheduling_policy == "fair"
        self._asked: OrderedDict[str, tuple[float, Terms]] = OrderedDict()
        """When each tenant last asked for targets and on which terms, the latest last."""
        self._forecasts: OrderedDict[str, TenantForecast | None] = OrderedDict()
        """Forecasts of the tenants in `_asked`, oldest first; None before the first."""

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
        self._open.refresh(running, now)
        self._add_tenant(terms, now)
        num_cached = self._find_cached(request)
        work, speed = self._open.work(request, num_cached), self._pacer.speed(bool(running))
        verdict: Feasible | Infeasible = Feasible()
        if not is_resent:
            share = self.share_of(terms, running, shares((terms.tenant,)), now)
            verdict = judge(work, speed, self._open.demand(now), share, now)
        if isinstance(verdict, Infeasible):
            return verdict
        request.start_by = work.planned_start_at(speed.cost, speed.step_s)
        self._open.add(request, work, num_cached, verdict.is_by_share, now)
        return verdict

    def share_of(
        self, terms: Terms, running: Sequence[Request], shares: Shares, now: float
    ) -> TenantShare:
        """Return a tenant's share of the machine and its admitted demand."""
        tenant, pacer = terms.tenant, self._pacer
        demand = self._open.tenant_demand(tenant, now) or NO_DEMAND
        return TenantShare(
            self._accounts.share(terms),
            demand if self._has_shares else None,
            self._owed_s(tenant, shares),
            pacer.decode_s(tenant, running, pacer.slow_cost),
            pacer.lost_speed(tenant, bool(running)),
        )

    def _owed_s(self, tenant: str, shares: Shares) -> float:
        table = self._open.tables.get(tenant)
        num_ahead = 0.0 if table is None else table.num_tokens
        return shares.owed(tenant, num_ahead) * self._pacer.slow_cost.per_prefill_token_s

    # ------------------------------------------------------------------ forecast

    def forecast(self, running: Sequence[Request], shares: SharesOf, now: float) -> Forecast:
        """Return the state by which the API process refuses infeasible requests."""
        has_running, active_weight = bool(running), self._accounts.active_weight
        speed = self._pacer.speed(has_running)
        while self._asked and next(iter(self._asked.values()))[0] < now - FORECAST_S:
            self._drop_oldest_tenant()
        if not self._asked and not self._open.requests:
            return Forecast(speed, active_weight=active_weight, made_at=now)
        self._open.refresh(running, now)
        chosen = list(islice(self._forecasts, TENANTS_PER_STEP))
        leads = shares(chosen)
        for tenant in chosen:
            terms = self._asked[tenant][1]
            self._forecasts[tenant] = self._tenant_forecast(terms, leads, has_running, now)
            self._forecasts.move_to_end(tenant)
        tenants = {name: one for name, one in self._forecasts.items() if one is not None}
        demand = sample_of(self._open.demand(now), now)
        return Forecast(speed, demand, tenants, active_weight, now)

    def become_idle(self) -> None:
        """Drop the step limits and tenants' forecasts of the time in which requests were live."""
        self._pacer.become_idle()
        self._asked.clear()
        self._forecasts.clear()

    def _add_tenant(self, terms: Terms, now: float) -> None:
        tenant = terms.tenant
        self._asked[tenant] = now, terms
        self._asked.move_to_end(tenant)
        if tenant not in self._forecasts:
            self._forecasts[tenant] = None
            self._forecasts.move_to_end(tenant, last=False)
        if len(self._asked) > MAX_TENANTS:
            self._drop_oldest_tenant()

    def _drop_oldest_tenant(self) -> None:
        tenant, _ = self._asked.popitem(last=False)
        del self._forecasts[tenant]

    def _tenant_forecast(
        self, terms: Terms, shares: Shares, has_running: bool, now: float
    ) -> TenantForecast:
        tenant = terms.tenant
        demand = self._open.tenant_demand(tenant, now)
        return TenantForecast(
            self._accounts.share(terms),
            NO_SAMPLE if demand is None else sample_of(demand, now),
            self._owed_s(tenant, shares),
            self._open.lengths.share(tenant, terms.tier),
            self._pacer.lost_speed(tenant, has_running),
            now,
        )
