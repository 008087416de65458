"""SLO admission control: can the targets of a request be met?

Pure functions over plain values. The engine judges with its exact tables and decides; the API
process judges with the forecast that the engine exported after its last step.

Each request needs some of the machine's time before each of its due times. A request is feasible if

    (a) for every due time from its own on, the admitted work due by then fits into the time until
        then, with a margin and with room for requests with tighter targets; or
    (b) the same holds for the admitted work of its tenant alone, at the tenant's share of the
        machine: its weight over the weights of all tenants with requests here.

A request admitted by (a) breaks no target that was admitted before. By (b) a tenant has its share
whatever other tenants have reserved. The shares add up to the machine: the speed that is lost to
short steps is taken from the share of the tenant whose TPOT target asks for them. So requests
admitted by (b) fit together, and the order of planned starts serves them all in time. Only targets
that other tenants were admitted by (a), beyond their share, can be missed for (b).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from headway.core.slo.forecast import Demand, EngineSpeed
from headway.core.slo.steptime import StepCost
from headway.core.slo.targets import RemainingWork, tightness_of

MARGIN = 0.1
"""Part of the machine's time that is not reserved: predictions err."""
SHARE_MARGIN = 0.09
"""Further part of a tenant's share that is not reserved: bursts of several tenants coincide."""
MIN_SPEED = 0.05
MIN_PREFILL_SHARE = 0.1
"""Least part of the speed that prefill has beside decodes."""
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class Feasible:
    """The targets can be met."""

    is_by_share: bool = False
    """Whether the request fits into its tenant's share only, by test (b)."""


@dataclass(frozen=True, slots=True)
class Infeasible:
    """The targets cannot be met, or only by missing targets admitted before."""

    message: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class TenantShare:
    """Share of the machine and admitted demand of one tenant."""

    share: float = 1.0
    demand: Demand | None = None
    """None if the policy has no shares: then only test (a) applies."""
    owed_s: float = 0.0
    """Work of other tenants that goes first, because this tenant is ahead of its share."""
    decode_s: float = 0.0
    """Seconds of each step that the tenant's present decodes with TPOT targets take."""
    lost_speed: float = 0.0
    """Speed that the machine loses to short steps for this tenant's TPOT targets."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The machine, or a tenant's part of it."""

    speed: float
    """Seconds of work done per second."""
    prefill_speed: float
    """Seconds of prefill done per second, beside the decodes."""
    demand: Demand


@dataclass(frozen=True, slots=True)
class _Late:
    what: str
    expected_s: float
    late_s: float


def judge(
    work: RemainingWork, engine: EngineSpeed, demand: Demand, tenant: TenantShare, now: float
) -> Feasible | Infeasible:
    """Return whether the targets of a request can be met, by tests (a) and (b)."""
    cost, tpot_s = engine.cost, work.targets.tpot_s
    if not cost.is_known:
        return Feasible()
    if tpot_s is not None:
        own_s = tenant.decode_s + work.num_samples * cost.decode_s(work.num_context)
        floor_s = step_floor_s(cost, own_s, tenant.share, engine.full_step_s)
        if tpot_s < floor_s:
            return _below_floor(tpot_s, floor_s, tenant.share)
    if min(work.next_due_at, work.last_due_at) == inf:
        return Feasible()
    everyone = _Part(engine.speed, _prefill_speed(engine), demand)
    late = _lateness(work, engine, everyone, tenant.owed_s, now)
    if late is None:
        return Feasible()
    if tenant.demand is not None and tenant.share > 0.0:
        part = _tenant_part(engine, tenant, tenant.demand)
        own_late = _lateness(work, engine, part, tenant.owed_s, now)
        if own_late is None:
            return Feasible(is_by_share=True)
        late = min(late, own_late, key=lambda one: one.late_s)
    return _infeasible(late)


def _tenant_part(engine: EngineSpeed, tenant: TenantShare, demand: Demand) -> _Part:
    """Return a tenant's part of the machine; the parts of all tenants fit together."""
    entitled = tenant.share * engine.full_speed - tenant.lost_speed
    speed = max(MIN_SPEED * tenant.share, entitled) * (1.0 - SHARE_MARGIN)
    decode_share = tenant.decode_s / max(engine.step_s, engine.cost.constant_s, 1e-9)
    return _Part(speed, max(MIN_PREFILL_SHARE * speed, speed - decode_share), demand)


def step_floor_s(cost: StepCost, own_decode_s: float, share: float, free_step_s: float) -> float:
    """Return the shortest step that a tenant's TPOT target may ask for.

    Short steps waste capacity, because each has a constant cost c. Unconstrained steps of T0 do
    rho0 = 1 - c / T0 seconds of work per second. In a step of T the other tenants get T - c - h,
    where h are the tenant's own decodes with TPOT targets. That is at least their part of the
    unconstrained capacity, (1 - share) rho0 T, if T is at least (c + h) / (1 - (1 - share) rho0).
    """
    rho0 = unconstrained_speed(cost, free_step_s)
    return (cost.constant_s + own_decode_s) / max(1e-9, 1.0 - (1.0 - share) * rho0)


def unconstrained_speed(cost: StepCost, free_step_s: float) -> float:
    """Return the seconds of work done per second in steps of `free_step_s`."""
    return 1.0 - cost.constant_s / max(free_step_s, cost.constant_s, 1e-9)


def _prefill_speed(engine: EngineSpeed) -> float:
    cost = engine.cost
    step_s = max(engine.step_s, 2 * cost.constant_s)
    # Each step has prefill, however many decodes there are.
    return max(MIN_PREFILL_SHARE, 1.0 - (cost.constant_s + engine.decode_s) / step_s)


def expected_ttft_s(
    work: RemainingWork,
    engine: EngineSpeed,
    demand: Demand,
    owed_s: float = 0.0,
    prefill_speed: float | None = None,
) -> float:
    """Return the expected seconds from now to the first token.

    The prefills that are planned earlier and the work that other tenants are owed go first. Decodes
    take their part of every step.
    """
    cost = engine.cost
    start_at = work.planned_start_at(cost, engine.step_s)
    ahead_s = demand.starts.until(start_at) + cost.work_s(work.prefill) + owed_s
    # About half of the step that is running is still to come, if one is.
    busy_s = max(engine.busy_s, cost.constant_s + engine.decode_s) + demand.starts.total
    running_s = min(max(engine.step_s, 2 * cost.constant_s) / 2, busy_s)
    return running_s + ahead_s / (prefill_speed or _prefill_speed(engine))


def _lateness(
    work: RemainingWork, engine: EngineSpeed, part: _Part, owed_s: float, now: float
) -> _Late | None:
    """Return by how much a target would be missed in this part; None if all are met."""
    demand = part.demand
    ttft_s = expected_ttft_s(work, engine, demand, owed_s, part.prefill_speed) / (1.0 - MARGIN)
    if now + ttft_s > work.next_due_at:
        return _Late("the first token", ttft_s, now + ttft_s - work.next_due_at)
    speed = part.speed * (1.0 - MARGIN)
    left_over = speed - demand.reserved(tightness_of(work.targets))
    late_s = max(
        _lateness_s(work, engine.cost, demand, speed, now),
        _own_lateness_s(work, engine.cost, demand, left_over, now),
    )
    if late_s <= 0.0:
        return None
    has_end = work.last_due_at < inf
    due_at = work.last_due_at if has_end else work.next_due_at
    return _Late("the last token" if has_end else "the first token", due_at - now + late_s, late_s)


def _lateness_s(
    work: RemainingWork, cost: StepCost, demand: Demand, speed: float, now: float
) -> float:
    """Return by how much work exceeds time at the worst due time from the request's first on."""
    own = [(due_at, cost.work_s(shape)) for due_at, shape in work.demands]
    first_at, first_s = own[0]
    last_at, last_s = own[1] if len(own) > 1 else (inf, 0.0)
    times, totals = demand.due.since(first_at)
    late_s = 0.0
    # A due time that has passed refuses nothing; the work is still to be done.
    for due_at, others_s in zip(times, totals, strict=True):
        work_s = others_s + (first_s + last_s if due_at >= last_at else first_s)
        if due_at > now and work_s / speed - (due_at - now) > late_s:
            late_s = work_s / speed - (due_at - now)
    own_s = 0.0
    for due_at, seconds in own:
        own_s += seconds
        if due_at > now:
            late_s = max(late_s, (demand.due.until(due_at) + own_s) / speed - (due_at - now))
    return late_s


def _own_lateness_s(
    work: RemainingWork, cost: StepCost, demand: Demand, speed: float, now: float
) -> float:
    """Return the lateness of the last token at the speed that tighter requests leave."""
    due_at = work.last_due_at
    if due_at == inf:
        return 0.0
    work_s = cost.work_s(work.prefill) + cost.work_s(work.decodes) + demand.due.until(due_at)
    return inf if speed <= 0.0 else max(0.0, work_s / speed - (due_at - now))


def _infeasible(late: _Late) -> Infeasible:
    retry_after_s = min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, late.late_s))
    if late.late_s == inf:
        text = "capacity is reserved for requests with tighter targets"
    else:
        text = (
            f"{late.what} is expected in {late.expected_s:.1f} s, "
            f"{late.late_s:.1f} s after it is due"
        )
    return Infeasible(text, retry_after_s)


def _below_floor(tpot_s: float, floor_s: float, share: float) -> Infeasible:
    reason = (
        "even without other requests"
        if share >= 1.0
        else f"with a share of {share:.0%} of the machine"
    )
    return Infeasible(
        f"a token takes at least {1000 * floor_s:.0f} ms here {reason}; "
        f"tpot_ms is {1000 * tpot_s:.3g}",
        MAX_RETRY_AFTER_S,
    )
