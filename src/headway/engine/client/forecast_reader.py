"""Early refusals in the API process, based on the forecast that the engine exports.

The engine decides on every request, but reads requests only between two steps. A step can take
longer than a refusal should. So the API process refuses at once the requests that are infeasible in
the most favourable case; the engine judges the others.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from headway.core.slo.demand import expected_left
from headway.core.slo.feasibility import Infeasible, TenantShare, judge
from headway.core.slo.forecast import NO_DEMAND, Demand, Forecast, TenantForecast
from headway.core.slo.steptime import StepCost
from headway.core.slo.targets import RemainingWork
from headway.core.terms import NO_TARGETS, Terms
from headway.core.waiting.policies import SLO_AWARE_POLICIES
from headway.engine.process.messages import AddRequest, EngineInfo, EventBatch
from headway.engine.supervise.restart_policy import RestartLimits
from headway.errors import DeadlineError

MIN_UNCACHED = 2
"""Prompt tokens that are computed even if the whole prompt is cached."""


class _Sent(NamedTuple):
    """Request that the forecast does not include yet."""

    tenant: str
    work: RemainingWork


class ForecastReader:
    """Refuses requests that are infeasible by the latest forecast."""

    def __init__(self, max_age_s: float = RestartLimits().hang_s) -> None:
        """Refuse nothing by a forecast older than `max_age_s`: the engine may be hung by then."""
        self._max_age_s = max_age_s
        self._forecast: Forecast | None = None
        self._demand = NO_DEMAND
        """Demand of all tenants in the forecast."""
        self._received_at = 0.0
        self._sent: dict[str, _Sent] = {}
        """Requests sent since the forecast: their demand is added to it."""

    def observe(self, batch: EventBatch, now: float) -> None:
        """Replace the forecast by the latest, which includes requests that arrived before it."""
        for event in (*batch.arrived, *batch.refused, *batch.finished):
            self._sent.pop(event.request_id, None)
        for event in (*batch.idled, *batch.stepped):  # a step follows the commands of its batch
            if event.forecast is not None:
                self._forecast, self._received_at = event.forecast, now
                self._demand = event.forecast.demand.demand()

    def reset(self) -> None:
        """Forget the forecast, because another engine takes over."""
        self._forecast = None
        self._sent.clear()

    def check(self, command: AddRequest, info: EngineInfo, now: float) -> None:
        """Raise DeadlineError if a request cannot meet its targets."""
        forecast, terms = self._forecast, command.terms
        if terms.targets == NO_TARGETS or info.scheduling_policy not in SLO_AWARE_POLICIES:
            return
        if forecast is None or now - self._received_at > self._max_age_s:
            return
        # All times count from the forecast: the engine has worked since then.
        tenant = forecast.tenants.get(terms.tenant)
        if tenant is None or forecast.made_at - tenant.made_at > self._max_age_s:
            tenant = _favourable(terms, forecast)
        work = _work(command, tenant.length_share, info.has_prefix_cache, now - self._received_at)
        demand, own = self._demand, tenant.demand.demand(forecast.made_at - tenant.made_at)
        if self._sent:
            demand, own = self._with_sent(demand, None), self._with_sent(own, terms.tenant)
        share = TenantShare(
            tenant.share,
            own if info.scheduling_policy == "fair" else None,
            tenant.owed_s,
            lost_speed=tenant.lost_speed,
        )
        verdict = judge(work, forecast.speed, demand, share, 0.0)
        if isinstance(verdict, Infeasible):
            raise DeadlineError(verdict.message, math.ceil(verdict.retry_after_s))
        self._sent[command.id] = _Sent(terms.tenant, work._replace(arrived_at=now))

    def _with_sent(self, demand: Demand, tenant: str | None) -> Demand:
        """Return a demand plus that of requests sent since, of one tenant or of all."""
        if self._forecast is None:
            return demand
        speed, origin = self._forecast.speed, self._received_at
        cost: StepCost = speed.cost
        due: list[tuple[float, float]] = []
        starts: list[tuple[float, float]] = []
        for sent in self._sent.values():
            if tenant is None or sent.tenant == tenant:
                due += [(at - origin, cost.work_s(shape)) for at, shape in sent.work.demands]
                start_at = sent.work.planned_start_at(cost, speed.step_s) - origin
                starts.append((start_at, cost.work_s(sent.work.prefill)))
        return replace(demand, due=demand.due.plus(due), starts=demand.starts.plus(starts))


def _favourable(terms: Terms, forecast: Forecast) -> TenantForecast:
    """Return the best case for a tenant that is not in the forecast."""
    share = 0.0 if terms.is_spot else terms.weight / max(terms.weight, forecast.active_weight)
    return TenantForecast(share, length_share=0.0, made_at=forecast.made_at)


def _work(
    command: AddRequest, length_share: float, has_prefix_cache: bool, arrived_at: float
) -> RemainingWork:
    """Return the work of a request; with a prefix cache the prompt counts as cached."""
    num_prompt, max_tokens = len(command.token_ids), command.params.max_tokens or 1
    num_prefill = min(MIN_UNCACHED, num_prompt) if has_prefix_cache else num_prompt
    num_output = 1 if length_share == 0.0 else expected_left(length_share, 0, max_tokens)
    return RemainingWork(
        arrived_at,
        command.terms.targets,
        num_prefill,
        0,
        num_output,
        num_prompt,
        num_samples=command.params.n,
    )
