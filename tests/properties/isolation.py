"""Isolation: the requests of a hostile tenant cost other tenants no more than its share.

A scenario runs twice on a virtual clock, with the real scheduler under `fair` and a linear
step-cost model: with the targets and priorities of the hostile tenant, and without them. Both runs
have the same arrivals. There are four kinds of scenario:

    flood     random loads, targets (feasible and infeasible), priorities and samples
    kv_quota  the same, and the hostile tenant has a backlog behind a KV quota
    tpot      other tenants keep the engine full; the hostile tenant has one long request with a
              TPOT target that asks for short steps
    prefill   other tenants have a few prompts of many chunks, and mostly nothing waiting; the
              hostile tenant, spot or not, floods the engine with prompts that have loose targets

Three properties must hold for the victims, which are all other tenants.

    service   The weighted tokens of a victim are no less than its demand or its fair share of the
              unconstrained capacity, whichever is smaller, minus the bound below. Where the hostile
              tenant floods the engine in both runs, they are also no less than without targets.
              Prompt tokens count when they are computed.
    prefill   While a running prompt of a victim gets no tokens, the hostile tenant gets no more
              service than the bound.
    refusals  A request of a victim that fits into the victim's share is not refused: test (b)
              with the victim's own demand alone decides. Service that the victim owes other
              tenants counts.

The bound, in weighted tokens over the weight, is that of headway.core.waiting.fair for two tenants
that wait without a break, plus the lead of SLO requests:

    LEAD + w_p L + w_q M

L is the longest prompt. M is the most output tokens that the running requests of one tenant come
to: the sum of its longest outputs, as many as there are running slots. Both runs may be off by the
bound in opposite directions, so the comparison of floods has twice the bound. Steps shorter than
unconstrained ones lose capacity; the step floor bounds the loss by the share of the tenant that
asks for them, so the loss is inside the fair share.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from unittest.mock import patch

from headway.clock import VirtualClock
from headway.config import SchedulerConfig
from headway.core.engine import EngineCore
from headway.core.events import Event, Refused
from headway.core.executor import Capacity, Ticket
from headway.core.params import SamplingParams
from headway.core.plan import Sample, StepPlan, StepResult
from headway.core.request import Request
from headway.core.scheduler import Scheduler
from headway.core.slo.demand import Points
from headway.core.slo.feasibility import Feasible, TenantShare, judge
from headway.core.slo.forecast import NO_DEMAND, Demand
from headway.core.slo.steptime import StepCost, StepShape, shape_of
from headway.core.terms import NO_TARGETS, Targets, Terms
from headway.core.waiting.accounts import OUTPUT_COST, PROMPT_COST

COST = StepCost(0.008, 0.3e-3, 0.25e-3, 0.0, 0.0)
CAPACITY = Capacity(num_blocks=4000, block_size=16, max_model_len=8192)
MAX_NUM_SEQS = 24
DURATION_S = 10.0
LEAD = 1024.0
"""Replaces URGENT_LEAD, which is more than the service of a victim in a run of this length."""
WARM_UP_STEPS = 64
HOSTILE = "hostile"
KINDS = {2: "prefill", 3: "kv_quota", 4: "tpot"}
"""Kinds of scenario by seed modulo 5; the others are floods."""
SAMPLE = Sample((7,))


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a scenario."""

    at: float
    tenant: str
    num_prompt: int
    max_tokens: int
    n: int = 1
    priority: int = 0
    targets: Targets = NO_TARGETS


@dataclass(frozen=True, slots=True)
class Scenario:
    """Weights and KV quotas of tenants, and the arrivals."""

    weights: dict[str, float]
    arrivals: tuple[Arrival, ...]
    kv_shares: dict[str, float] = field(default_factory=dict[str, float])
    kind: str = "flood"
    is_spot: bool = False
    """Whether the requests of the hostile tenant are spot."""

    def stripped(self) -> Scenario:
        """Return the scenario without the targets and priorities of the hostile tenant."""
        return replace(
            self,
            arrivals=tuple(
                replace(one, targets=NO_TARGETS, priority=0) if one.tenant == HOSTILE else one
                for one in self.arrivals
            ),
        )

    @property
    def bound(self) -> float:
        """Service by which a victim may fall short, over its weight (see above)."""
        longest = max(one.num_prompt for one in self.arrivals)
        most = max(self._max_running_output(tenant) for tenant in self.weights)
        return LEAD + PROMPT_COST * longest + OUTPUT_COST * most

    def bound_of(self, tenant: str) -> float:
        """Return the bound in weighted tokens of a tenant."""
        return self.bound * max(1.0, self.weights[tenant] / min(self.weights.values()))

    def _max_running_output(self, tenant: str) -> int:
        outputs = [
            one.max_tokens for one in self.arrivals for _ in range(one.n) if one.tenant == tenant
        ]
        return sum(sorted(outputs)[-MAX_NUM_SEQS:])


def draw_scenario(seed: int, kind: str | None = None) -> Scenario:
    """Return a random scenario; of five seeds two are floods."""
    kind = kind or KINDS.get(seed % 5, "flood")
    draw = random.Random(f"isolation/{seed}")
    if kind == "prefill":
        return _draw_prefill(draw)
    names = [f"victim{number}" for number in range(draw.randint(1, 5))]
    weights = {name: draw.choice([0.5, 1.0, 1.0, 2.0, 4.0]) for name in [HOSTILE, *names]}
    arrivals: list[Arrival] = []
    sizes = [(20, 20), (30, 15)] if kind == "tpot" else [(20, 40), (100, 60), (600, 20), (60, 200)]
    loads = [1.5] if kind == "tpot" else [0.3, 0.8, 1.5]
    for name in names:
        prompt, output = draw.choice(sizes)
        rate = draw.choice(loads) / len(names) / work_s(prompt, output)
        targets = draw.choice(
            [
                NO_TARGETS,
                NO_TARGETS,
                Targets(deadline_s=draw.uniform(4.0, 15.0)),
                Targets(ttft_s=3.0),
            ]
        )
        if kind == "tpot":
            targets = NO_TARGETS
        arrivals += _poisson(draw, name, rate, (prompt, output), targets)
    if kind == "tpot":
        weights = dict.fromkeys(weights, 1.0)
        tpot_s = draw.choice([0.0095, 0.011, 0.013, 0.016])
        arrivals.append(Arrival(0.5, HOSTILE, 8, 900, targets=Targets(tpot_s=tpot_s)))
    else:
        arrivals += _flood(draw)
    kv_shares = {HOSTILE: 0.05} if kind == "kv_quota" else {}
    return Scenario(weights, tuple(sorted(arrivals, key=lambda one: one.at)), kv_shares, kind)


def _draw_prefill(draw: random.Random) -> Scenario:
    """Return a scenario of long prompts beside a flood of prompts with loose targets."""
    names = [f"victim{number}" for number in range(draw.randint(1, 3))]
    weights = {name: draw.choice([0.5, 1.0, 1.0, 2.0]) for name in [HOSTILE, *names]}
    targets = draw.choice([Targets(ttft_s=20.0), Targets(deadline_s=60.0)])
    prompt, output = draw.choice([(300, 5), (600, 5), (1500, 10)])
    rate = draw.choice([1.2, 2.0, 4.0]) / work_s(prompt, output)
    arrivals = _poisson(draw, HOSTILE, rate, (prompt, output), targets)
    for name in names:
        for _ in range(draw.randint(1, 3)):
            at, num_prompt = draw.uniform(0.0, 0.4 * DURATION_S), draw.randint(1000, 4000)
            arrivals.append(Arrival(at, name, num_prompt, 4))
    ordered = tuple(sorted(arrivals, key=lambda one: one.at))
    return Scenario(weights, ordered, kind="prefill", is_spot=draw.random() < 0.5)


def _flood(draw: random.Random) -> list[Arrival]:
    """Return the requests of a hostile tenant that floods the engine."""
    prompt, output = draw.choice([(8, 300), (100, 100), (1500, 10)])
    rate = draw.choice([0.05, 0.5, 2.0]) / work_s(prompt, output)
    plain = _poisson(draw, HOSTILE, max(rate, 0.5), (prompt, output), NO_TARGETS)
    return [_hostile(draw, one) for one in plain]


def work_s(num_prompt: int, num_output: int) -> float:
    """Return the seconds of work of one request, without the constant part of steps."""
    return COST.work_s(StepShape(num_output, num_prompt))


def _poisson(
    draw: random.Random, tenant: str, rate: float, size: tuple[int, int], targets: Targets
) -> list[Arrival]:
    found: list[Arrival] = []
    at = draw.expovariate(rate)
    while at < DURATION_S and len(found) < 800:
        num_prompt = max(2, int(size[0] * draw.uniform(0.5, 1.5)))
        max_tokens = max(2, int(size[1] * draw.uniform(0.5, 1.5)))
        found.append(Arrival(at, tenant, num_prompt, max_tokens, targets=targets))
        at += draw.expovariate(rate)
    return found


def _hostile(draw: random.Random, one: Arrival) -> Arrival:
    """Return the request with random targets, an extreme priority and several samples."""
    kinds = (
        NO_TARGETS,
        Targets(tpot_s=draw.choice([1e-6, 0.009, 0.012, 0.016, 0.02, 0.05])),
        Targets(ttft_s=draw.choice([0.001, 0.2, 2.0])),
        Targets(deadline_s=draw.choice([0.3, 5.0, 20.0, 60.0])),
        Targets(0.5, 0.02, 30.0),
    )
    priority = draw.choice([0, -(2**31), 2**31])
    n = draw.choice([1, 1, 1, 4])
    return replace(one, targets=draw.choice(kinds), priority=priority, n=n)


class _Executor:
    def capacity(self) -> Capacity:
        return CAPACITY

    def submit(self, plan: StepPlan) -> Ticket:
        self._plan = plan
        return Ticket(plan.step_id)

    def collect(self, ticket: Ticket) -> StepResult:
        outcomes = tuple([SAMPLE if one.has_sample else None for one in self._plan.scheduled])
        return StepResult(ticket.step_id, outcomes, COST.predict(shape_of(self._plan)))

    def close(self) -> None:
        pass


@dataclass(slots=True)
class Outcome:
    """Service and refusals of the tenants in one run."""

    service: dict[str, float]
    wrongly_refused: list[str]
    num_refused: dict[str, int]
    worst_stall: float = 0.0
    """Most service of the hostile tenant while a victim's running prompt got no tokens."""


class Run:
    """One scenario on one engine."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._clock = VirtualClock()
        config = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, scheduling_policy="fair")
        self.scheduler = Scheduler(config, CAPACITY, enable_prefix_caching=False)
        self._core = EngineCore(self.scheduler, _Executor(), self._clock, self._on_events)
        for number in range(WARM_UP_STEPS):
            shape = StepShape(number % 24, 64 * (number % 5))
            self.scheduler.pacer.model.observe(shape, COST.predict(shape))
        self.scheduler.pacer.cost = self.scheduler.pacer.model.cost
        self._requests: dict[str, Request] = {}
        self._fits: dict[str, bool] = {}
        self._stalls: dict[str, float] = {}
        """Service of the hostile tenant since a victim's running prompt got tokens."""
        self.outcome = Outcome({}, [], {})

    def play(self) -> Outcome:
        """Serve the arrivals for DURATION_S; return the outcome at its end."""
        upcoming = list(enumerate(self._scenario.arrivals))[::-1]
        while self._clock.now() < DURATION_S:
            while upcoming and upcoming[-1][1].at <= self._clock.now():
                self._add(*upcoming.pop())
            plan = self._core.begin_step()
            if plan is not None:
                elapsed_s = COST.predict(shape_of(plan))
                self._clock.advance_to(self._clock.now() + elapsed_s)
                self._observe_stalls(plan)
                self._core.end_step()
            elif upcoming:
                self._clock.advance_to(max(self._clock.now(), upcoming[-1][1].at))
            else:
                break
        accounts = self.scheduler.accounts
        for tenant in self._scenario.weights:
            account = accounts.get(tenant)
            self.outcome.service[tenant] = 0.0 if account is None else account.served
        for request in self.scheduler.running:
            num_missing = request.num_prompt_tokens - request.num_computed
            self.outcome.service[request.terms.tenant] -= PROMPT_COST * max(0, num_missing)
        return self.outcome

    def _observe_stalls(self, plan: StepPlan) -> None:
        """Add the hostile tenant's service in a step to the prompts that get no tokens in it."""
        service = 0.0
        for item in plan.scheduled:
            if self._requests[item.request_id.partition("#")[0]].terms.tenant == HOSTILE:
                num_prompt = len(item.token_ids) if len(item.token_ids) > 1 else 0
                service += PROMPT_COST * num_prompt + OUTPUT_COST * item.has_sample
        scheduled = {item.request_id for item in plan.scheduled}
        before, self._stalls = self._stalls, {}
        for request in self.scheduler.running:
            is_prefill = request.num_tokens - request.num_computed > 1
            if is_prefill and request.terms.tenant != HOSTILE and request.id not in scheduled:
                stall = self._stalls[request.id] = before.get(request.id, 0.0) + service
                self.outcome.worst_stall = max(self.outcome.worst_stall, stall)

    def _add(self, number: int, one: Arrival) -> None:
        weight = self._scenario.weights[one.tenant]
        kv_share = self._scenario.kv_shares.get(one.tenant, 1.0)
        is_spot = self._scenario.is_spot and one.tenant == HOSTILE
        terms = Terms(one.tenant, one.tenant, weight, is_spot, kv_share, targets=one.targets)
        request = Request(
            id=f"r{number}",
            token_ids=[1] * one.num_prompt,
            params=SamplingParams(max_tokens=one.max_tokens, n=one.n),
            seed=0,
            arrived_at=one.at,
            priority=one.priority,
            terms=terms,
        )
        self._requests[request.id] = request
        if one.tenant != HOSTILE and one.targets != NO_TARGETS:
            self._fits[request.id] = self._fits_into_share(request)
        self._core.add(request)

    def _fits_into_share(self, request: Request) -> bool:
        """Return whether the victim's admitted demand plus this request fits into its share."""
        pacer, scheduler, now = self.scheduler.pacer, self.scheduler, self._clock.now()
        pacer.open_requests.refresh(scheduler.running, now)
        terms = request.terms
        share = scheduler.slo_admission.share_of(
            terms, scheduler.running, scheduler.waiting.shares((terms.tenant,)), now
        )
        weights = self._scenario.weights
        own_share = terms.weight / sum(weights.values())
        share = TenantShare(
            own_share, share.demand or NO_DEMAND, share.owed_s, share.decode_s, share.lost_speed
        )
        speed = pacer.speed(bool(scheduler.running))
        full = replace(speed, step_s=speed.full_step_s)
        # Test (a) fails beside a demand without end: only the share is left.
        full_up = Points([-inf], [1e9])
        demand = Demand(full_up, full_up)
        return isinstance(
            judge(pacer.open_requests.work(request), full, demand, share, now), Feasible
        )

    def _on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Refused):
                tenant = self._requests[event.request_id].terms.tenant
                refused = self.outcome.num_refused
                refused[tenant] = refused.get(tenant, 0) + 1
                if self._fits.get(event.request_id):
                    self.outcome.wrongly_refused.append(event.request_id)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How close a scenario came to the bound."""

    worst_ratio: float
    """Missing service of a victim, or service of the hostile tenant while a victim's prompt got
    no tokens, over the bound; above 1 isolation is broken."""
    wrongly_refused: int
    num_victim_refusals: int


def judge_scenario(scenario: Scenario) -> Verdict:
    """Run a scenario with and without hostile targets, and compare the victims' service."""
    with (
        patch("headway.core.waiting.fair.URGENT_LEAD", LEAD),
        patch("headway.core.waiting.queue.URGENT_LEAD", LEAD),
    ):
        asked, stripped = Run(scenario).play(), Run(scenario.stripped()).play()
    worst = asked.worst_stall / scenario.bound_of(HOSTILE)
    fair = _fair_service(scenario)
    for tenant in scenario.weights:
        if tenant == HOSTILE:
            continue
        bound = scenario.bound_of(tenant)
        missing = stripped.service[tenant] - asked.service[tenant]
        # A victim may lose service beyond its fair share: the hostile tenant uses its own share.
        below_fair = fair[tenant] - asked.service[tenant]
        worst = max(worst, min(missing, below_fair) / bound)
        if scenario.kind != "tpot":
            worst = max(worst, missing / (2 * bound))
    victims = [count for name, count in asked.num_refused.items() if name != HOSTILE]
    return Verdict(worst, len(asked.wrongly_refused), sum(victims))


def _fair_service(scenario: Scenario) -> dict[str, float]:
    """Return the lesser of a tenant's demand and its share of the unconstrained capacity."""
    demand: dict[str, float] = dict.fromkeys(scenario.weights, 0.0)
    seconds: dict[str, float] = dict.fromkeys(scenario.weights, 0.0)
    for one in scenario.arrivals:
        num_output = one.n * one.max_tokens
        demand[one.tenant] += PROMPT_COST * one.num_prompt + OUTPUT_COST * num_output
        seconds[one.tenant] += work_s(one.num_prompt, num_output)
    speed = 1.0 - COST.constant_s / COST.predict(StepShape(MAX_NUM_SEQS))
    total = sum(scenario.weights.values())
    if scenario.is_spot:
        total -= scenario.weights[HOSTILE]
    found: dict[str, float] = {}
    for tenant, weight in scenario.weights.items():
        part = speed * DURATION_S * weight / total / max(seconds[tenant], 1e-9)
        found[tenant] = demand[tenant] * min(1.0, part)
    return found
