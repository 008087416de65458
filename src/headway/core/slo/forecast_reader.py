"""Early refusals in the API process, based on the forecast that the engine exports.

The engine decides on every request, but reads requests only between two steps. A step can take
longer than a refusal should. So the API process refuses at once the requests that are infeasible in
the most favourable case; the engine judges the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from headway.core.events import Arrived, Event, Finished, Idled, Refused, Stepped
from headway.core.params import SamplingParams
from headway.core.slo.demand import DemandEntry, DemandTable, entry_of, expected_left
from headway.core.slo.feasibility import Infeasible, TenantShare, judge
from headway.core.slo.forecast import NO_DEMAND, Demand, Forecast, TenantForecast
from headway.core.slo.steptime import StepCost
from headway.core.slo.targets import RemainingWork
from headway.core.terms import NO_TARGETS, Terms
from headway.core.waiting.policies import SLO_AWARE_POLICIES
from headway.errors import DeadlineError

_TAKEN = (Arrived, Refused, Finished)
"""Events after which an engine counts a request itself, or nobody does."""
_FORECASTING = (Stepped, Idled)
MIN_UNCACHED = 2
"""Prompt tokens that are computed even if the whole prompt is cached."""


class AskedRequest(Protocol):
    """A request that is about to be sent, as the API process or the simulator has it."""

    @property
    def id(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def params(self) -> SamplingParams: ...
    @property
    def terms(self) -> Terms: ...


class EngineTraits(Protocol):
    """What refusals depend on besides the forecast of an engine."""

    @property
    def scheduling_policy(self) -> str: ...
    @property
    def has_prefix_cache(self) -> bool: ...


class _SentDemand:
    """Demand of the requests that the forecast does not include yet, in total and by tenant."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[str, DemandEntry]] = {}
        self._table = DemandTable()
        self._tables: dict[str, DemandTable] = {}

    def add(self, request_id: str, tenant: str, entry: DemandEntry) -> None:
        """Add the work of a request."""
        self.remove(request_id)
        self._entries[request_id] = tenant, entry
        self._table.add(entry)
        self._tables.setdefault(tenant, DemandTable()).add(entry)

    def remove(self, request_id: str) -> None:
        """Remove the work of a request, if it is here."""
        tenant, entry = self._entries.pop(request_id, ("", None))
        if entry is None:
            return
        self._table.remove(entry)
        self._tables[tenant].remove(entry)
        if not self._tables[tenant].num_waiting:
            del self._tables[tenant]

    def added_to(self, demand: Demand, cost: StepCost, tenant: str | None = None) -> Demand:
        """Return a demand and that of the requests here, of one tenant or of all."""
        table = self._table if tenant is None else self._tables.get(tenant)
        if table is None or not table.num_waiting:
            return demand
        due, starts = table.due(cost), table.starts(cost)
        return replace(demand, due=demand.due.plus(due), starts=demand.starts.plus(starts))

    def check(self) -> None:
        """Check that the tables hold the requests, in total and by tenant."""
        self._table.check([entry for _, entry in self._entries.values()])
        for tenant, table in self._tables.items():
            table.check([entry for name, entry in self._entries.values() if name == tenant])
        if self._tables.keys() != {tenant for tenant, _ in self._entries.values()}:
            raise AssertionError("tables of tenants without requests")


class ForecastReader:
    """Refuses requests that are infeasible by the latest forecast."""

    def __init__(self, max_age_s: float = math.inf) -> None:
        """Refuse nothing by a forecast older than `max_age_s`: the engine may be hung by then."""
        self._max_age_s = max_age_s
        self._forecast: Forecast | None = None
        self._demand = NO_DEMAND
        """Demand of all tenants in the forecast."""
        self._received_at = 0.0
        self._sent = _SentDemand()
        """Demand of requests sent since the forecast."""

    def observe(self, report: Iterable[Event], now: float) -> None:
        """Replace the forecast by the latest, which includes requests that arrived before it."""
        forecast: Forecast | None = None
        for event in report:
            if isinstance(event, _TAKEN):
                self.remove(event.request_id)
            elif isinstance(event, _FORECASTING):
                forecast = event.forecast or forecast
        if forecast is not None:
            self._forecast, self._received_at = forecast, now
            self._demand = forecast.demand.demand(now=now)

    def reset(self) -> None:
        """Forget the forecast, because another engine takes over."""
        self._forecast = None
        self._sent = _SentDemand()

    def remove(self, request_id: str) -> None:
        """Remove the demand of a request that the engine has, or that has ended."""
        self._sent.remove(request_id)

    def check(self, request: AskedRequest, engine: EngineTraits, now: float) -> None:
        """Raise DeadlineError if a request cannot meet its targets."""
        forecast, terms = self._forecast_for(request, engine, now), request.terms
        if forecast is None:
            return
        # The verdict is that of the time of the forecast: the engine has worked since then.
        origin, cost = self._received_at, forecast.speed.cost
        tenant = self._tenant_forecast(terms, forecast)
        work = _work(request, tenant.length_share, engine.has_prefix_cache, now)
        demand, own = self._sent.added_to(self._demand, cost), None
        if engine.scheduling_policy == "fair":
            own = tenant.demand.demand(forecast.made_at - tenant.made_at, origin)
            own = self._sent.added_to(own, cost, terms.tenant)
        share = TenantShare(tenant.share, own, tenant.owed_s, lost_speed=tenant.lost_speed)
        verdict = judge(work, forecast.speed, demand, share, origin)
        if isinstance(verdict, Infeasible):
            raise DeadlineError(verdict.message, math.ceil(verdict.retry_after_s))

    def add(self, request: AskedRequest, engine: EngineTraits, now: float) -> None:
        """Count the work of a request that is about to be sent, until a forecast includes it."""
        forecast = self._forecast_for(request, engine, now)
        if forecast is None:
            return
        tenant = self._tenant_forecast(request.terms, forecast)
        work = _work(request, tenant.length_share, engine.has_prefix_cache, now)
        start_at = work.planned_start_at(forecast.speed.cost, forecast.speed.step_s)
        entry = entry_of(work.demands, start_at, work.prefill, now)
        self._sent.add(request.id, request.terms.tenant, entry)

    def _forecast_for(
        self, request: AskedRequest, engine: EngineTraits, now: float
    ) -> Forecast | None:
        """Return the forecast to judge a request by; None if it is not to be judged here."""
        if (
            request.terms.targets == NO_TARGETS
            or engine.scheduling_policy not in SLO_AWARE_POLICIES
        ):
            return None
        is_recent = now - self._received_at <= self._max_age_s
        return self._forecast if is_recent else None

    def _tenant_forecast(self, terms: Terms, forecast: Forecast) -> TenantForecast:
        tenant = forecast.tenants.get(terms.tenant)
        if tenant is None or forecast.made_at - tenant.made_at > self._max_age_s:
            return _favourable(terms, forecast)
        return tenant


def _favourable(terms: Terms, forecast: Forecast) -> TenantForecast:
    """Return the best case for a tenant that is not in the forecast."""
    share = 0.0 if terms.is_spot else terms.weight / max(terms.weight, forecast.active_weight)
    return TenantForecast(share, length_share=0.0, made_at=forecast.made_at)


def _work(
    request: AskedRequest, length_share: float, has_prefix_cache: bool, arrived_at: float
) -> RemainingWork:
    """Return the work of a request; with a prefix cache the prompt counts as cached."""
    num_prompt, max_tokens = len(request.token_ids), request.params.max_tokens or 1
    num_prefill = min(MIN_UNCACHED, num_prompt) if has_prefix_cache else num_prompt
    num_output = 1 if length_share == 0.0 else expected_left(length_share, 0, max_tokens)
    return RemainingWork(
        arrived_at,
        request.terms.targets,
        num_prefill,
        0,
        num_output,
        num_prompt,
        num_samples=request.params.n,
    )
