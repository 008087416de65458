"""The pacer: limits of each step, and decodes deferred for urgent work.

Owns the step-time model and the controller of step limits. Without targets the cost is next to
nothing.

The targets of one tenant must not cost other tenants more than its share. So the step target of a
tenant is never below its step floor (headway.core.slo.feasibility), and the capacity lost to short
steps is charged to the tenant whose target asks for them. Lost is only what work of other tenants,
cut from a step by the target, costs more in later steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from headway.config import SchedulerConfig
from headway.core.plan import StepPlan
from headway.core.request import Request
from headway.core.slo.feasibility import step_floor_s
from headway.core.slo.forecast import EngineSpeed
from headway.core.slo.open_requests import OpenRequests
from headway.core.slo.step_limits import AIM, Controller, StepLimits, StepLoad
from headway.core.slo.steptime import StepCost, StepShape, StepTimeModel, shape_of
from headway.core.slo.targets import slack_s
from headway.core.terms import Terms
from headway.core.waiting.accounts import OUTPUT_COST, PROMPT_COST, Accounts

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


NO_WORK = StepShape()


class _StepTarget(NamedTuple):
    """TPOT target that limits the next step, and its tenant."""

    tightest_s: float
    """The smallest TPOT target, not below the tenant's step floor."""
    pace_s: float
    """The smallest time per token needed from now on, not below that floor."""
    tenant: str


class Pacer:
    """Sets the limits of each step, and defers decodes with slack."""

    def __init__(self, config: SchedulerConfig, accounts: Accounts) -> None:
        self.model = StepTimeModel()
        self.cost: StepCost = self.model.cost
        """Coefficients for the next step."""
        self.slow_cost: StepCost = self.model.slow_cost
        """Coefficients for the work of many steps."""
        self.open_requests = OpenRequests(self.slow_cost)
        self._config = config
        self._accounts = accounts
        self._controller = Controller(config)
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
        return bool(self.open_requests.requests)

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
        cost, step_s = self.slow_cost, self.limits.step_s
        full_step_s = cost.constant_s + cost.prefill_s(self.limits.max_num_batched_tokens)
        if step_s is None:
            step_s = full_step_s
        if not has_running:
            return EngineSpeed(cost, step_s, full_step_s)
        num_decodes, _, num_context, _ = self._last_step
        decode_s = cost.per_decode_s * num_decodes + cost.per_context_token_s * num_context
        return EngineSpeed(cost, step_s, full_step_s, decode_s, cost.predict(self._last_step))

    def lost_speed(self, tenant: str, has_running: bool) -> float:
        """Return the speed lost to short steps, if this tenant's target asks for them."""
        target = self._step_target
        if target is None or target.tenant != tenant:
            return 0.0
        speed = self.speed(has_running)
        return max(0.0, speed.full_speed - speed.speed)

    def decode_s(self, tenant: str, running: Sequence[Request], cost: StepCost) -> float:
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

    def become_idle(self) -> None:
        """Drop the limits of the time in which requests were live."""
        self._step_target = None
        self.limits = self._controller.decide(self._idle, self.cost)

    # ------------------------------------------------------------------- steps

    def begin(self, running: list[Request], num_waiting: int, now: float) -> list[Request]:
        """Set the limits of the next step; return the running requests in it."""
        self._step_target = None
        self._cut = NO_WORK
        self.open_requests.mark_stale()
        if not self.open_requests.requests and self._config.mode != "latency":
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
            if tpot_s is None or request.id not in self.open_requests.requests:
                continue
            tightest_s, pace_s, _ = wanted.get(terms.tenant, (inf, inf, terms))
            pace_s = min(pace_s, self._pace_s(request, tpot_s, now))
            wanted[terms.tenant] = (min(tightest_s, tpot_s), pace_s, terms)
        found: _StepTarget | None = None
        for tenant, (tightest_s, pace_s, terms) in wanted.items():
            own_s = self.decode_s(tenant, decoding, self.cost)
            share = self._accounts.share(terms)
            floor_s = step_floor_s(self.cost, own_s, share, self._free_step_s) / AIM
            target = _StepTarget(max(tightest_s, floor_s), max(pace_s, floor_s), tenant)
            if found is None or target.pace_s < found.pace_s:
                found = target
        return found

    def _pace_s(self, request: Request, tpot_s: float, now: float) -> float:
        """Return the time per token needed from now on to meet the TPOT target."""
        first_at = self.open_requests.first_token_at.get(request.id)
        if first_at is None:
            return tpot_s
        late_s = now - first_at - (request.num_output_tokens - 1) * tpot_s
        if late_s <= 0.0:
            return tpot_s
        needed_s = tpot_s - late_s / self.open_requests.num_left(request)
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
        cost = self.cost
        deferred: dict[str, int] = {}
        full_s = cost.constant_s + sum([cost.decode_s(one.num_computed) for one in decoding])
        excess_s = full_s + prefill_s - step_s
        if excess_s <= 0.0:
            return deferred
        slacks = [slack_s(self.open_requests.work(one), now, cost, step_s) for one in decoding]
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
                work = self.open_requests.work(request)
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
        self.cost, self.slow_cost = self.model.cost, self.model.slow_cost
        self._last_step = shape
        if self._num_deferred:
            num_decodes = shape.num_decodes + len(self._num_deferred)
            self._last_step = shape._replace(num_decodes=num_decodes)
        opened = self.open_requests
        opened.set_cost(self.slow_cost)
        opened.mark_stale()
        if opened.requests:
            for item in plan.scheduled:
                request = opened.requests.get(item.request_id)
                if request is not None:
                    opened.follow(request, now)

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


def _slack(pair: tuple[float, Request]) -> float:
    return pair[0]
