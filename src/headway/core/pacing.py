"""The pace of the engine: what a step may take, who must be in it, and who may still come in.

Owns the step-time model, the controller, and for each live request that was promised something
when its first token came. The scheduler asks before a step and tells what came of it; where
nobody was promised anything, all this costs next to nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import inf

from headway.config import SchedulerConfig
from headway.core.control import AIM, Controller, Limits, Load
from headway.core.deadlines import Feasible, Infeasible, Job, Pace, Shares, job_of, slack_s
from headway.core.plan import StepPlan
from headway.core.promises import Promises
from headway.core.request import FinishReason, Request, RequestState
from headway.core.steptime import StepCost, StepShape, StepTimeModel, shape_of
from headway.core.terms import NO_TARGETS
from headway.core.waiting.policies import SLO_AWARE_POLICIES

MAX_HELD_STEPS = 8
"""Steps in a row that a decode may give way; then it is in the next one, whatever its slack."""
MAX_PREFILL_SHARE = 0.7
"""Of a step's time, the most that decodes leave to urgent prefill."""
EARLIER = 0.2
"""Share of the time until the last moment to begin that is kept in hand."""
MOST_CATCH_UP = 0.5
"""Share of its time per token that steps are shortened to at most for one that is late; one that
would need more is not going to be in time."""
ON_ITS_OWN = 0.95
"""One that needs no less than this share of its time per token makes up for it without help: steps
are planned to take less than that anyway."""
MAX_TOLD = 64
"""How many tenants the API process is told of after a step. Of the others it does not know what
they owe, and the engine refuses."""
SharesOf = Callable[[Iterable[str]], Shares]
"""Where tenants stand (headway.core.waiting.queue)."""
ENDED = (FinishReason.STOP, FinishReason.LENGTH)


class Pacer:
    """Decides by slack: the size of a step, the decodes in it, and what may still be promised."""

    def __init__(self, config: SchedulerConfig, find_cached: Callable[[Request], int]) -> None:
        """`find_cached` counts the tokens of a request that are in the prefix cache."""
        self.model = StepTimeModel()
        self.cost: StepCost = self.model.cost
        """What the next step costs."""
        self._config = config
        self._heeds_targets = config.scheduling_policy in SLO_AWARE_POLICIES
        self._controller = Controller(config)
        self._promised: dict[str, Request] = {}
        """The live requests that have targets."""
        self._promised_tenants: Counter[str] = Counter()
        """Whose they are."""
        self._first_token_at: dict[str, float] = {}
        self._find_cached = find_cached
        self._num_cached: dict[str, int] = {}
        """Of those with targets: tokens that were cached when they came."""
        self._num_held: dict[str, int] = {}
        self._promises = Promises()
        self._idle = Load(0, StepShape())
        self.limits: Limits = self._controller.decide(self._idle, self.cost)
        """Those of the step that is planned or running."""

    @property
    def has_promises(self) -> bool:
        """Whether the order of the step's work should go by what is due."""
        return self._heeds_targets and bool(self._promised)

    @property
    def told_tenants(self) -> Iterable[str]:
        """Some of those that were promised something: the longest here."""
        return islice(self._promised_tenants, MAX_TOLD)

    def pace(self, shares: Shares) -> Pace:
        """How the engine goes; by this the API process refuses what would be refused here."""
        outlook, step_s = self.model.outlook, self.limits.step_s
        if step_s is None:
            num_tokens = self.limits.max_num_batched_tokens
            step_s = outlook.constant_s + outlook.prefill_s(num_tokens)
        return Pace(outlook, step_s, shares)

    # ---------------------------------------------------------------- promises

    def add(
        self,
        request: Request,
        running: Iterable[Request],
        shares: SharesOf,
        now: float,
        is_resent: bool = False,
    ) -> Feasible | Infeasible:
        """A request wants in. If it may, it gets its place in a line by slack."""
        if request.terms.targets == NO_TARGETS:
            return Feasible()
        self._num_cached[request.id] = self._find_cached(request)
        pace, job = self.pace(shares((request.terms.tenant,))), self._job(request)
        verdict: Feasible | Infeasible = Feasible()
        if self._heeds_targets and not is_resent:
            others = {one.id: one for one in running} | self._promised
            jobs = [(other.terms.tenant, self._job(other)) for other in others.values()]
            verdict = self._promises.judge(job, request.terms.tenant, jobs, pace, now)
        if isinstance(verdict, Feasible):
            self._promise(request)
            self._first_token_at.pop(request.id, None)  # an earlier one may have had this id
            latest_at = job.latest_start_at(pace.cost, pace.step_s)
            if latest_at < inf and self._heeds_targets:
                # Somewhat before the last moment: what follows will not go as expected either.
                hand_s = EARLIER * max(0.0, latest_at - request.arrived_at)
                request.due_at = latest_at - hand_s
        else:
            del self._num_cached[request.id]
        return verdict

    def add_forked(self, parent: Request, children: Iterable[Request]) -> None:
        """Its further samples begin: they were promised what their prompt was."""
        if parent.id in self._promised:
            for child in children:
                self._promise(child)

    def _promise(self, request: Request) -> None:
        self._promised[request.id] = request
        self._promised_tenants[request.terms.tenant] += 1

    def leave(self, request: Request) -> None:
        """It has ended: nothing is owed to it any more, and how long it was is known."""
        self._num_cached.pop(request.id, None)
        if self._promised.pop(request.id, None) is None:
            return
        tenant = request.terms.tenant
        self._promised_tenants[tenant] -= 1
        if not self._promised_tenants[tenant]:
            del self._promised_tenants[tenant]
        self._first_token_at.pop(request.id, None)
        if request.finish_reason in ENDED:
            lengths, max_tokens = self._promises.lengths, request.params.max_tokens or 1
            lengths.observe(request.terms.tier, request.num_output_tokens, max_tokens)

    def _job(self, request: Request) -> Job:
        max_tokens = request.params.max_tokens or 1
        lengths, num_output = self._promises.lengths, request.num_output_tokens
        num_left = lengths.expected_left(request.terms.tier, num_output, max_tokens)
        num_cached = self._num_cached.get(request.id, 0)
        return job_of(request, num_left, self._first_token_at.get(request.id), num_cached)

    # ------------------------------------------------------------------- steps

    def begin(self, running: list[Request], now: float) -> list[Request]:
        """Set the limits of the next step; the running requests that have a part in it."""
        if not self._promised and self._config.mode != "latency":
            self.limits = self._controller.decide(self._idle, self.cost)
            return running
        tightest_s: float | None = None
        pace_s: float | None = None
        decoding: list[Request] = []
        prefill_start = 0
        for request in running:
            if len(request.token_ids) - request.num_computed == 1:
                decoding.append(request)
            elif request.num_computed > prefill_start:
                prefill_start = request.num_computed
            targets = request.terms.targets
            if targets is not NO_TARGETS and targets.tpot_s is not None:
                tightest_s = min(targets.tpot_s, tightest_s or inf)
                pace_s = min(self._pace_s(request, targets.tpot_s, now), pace_s or inf)
        held: dict[str, int] = {}
        if pace_s is not None and self._heeds_targets and self.cost.is_known:
            held = self._hold(running, decoding, AIM * pace_s, now)
        self._num_held = held
        if held:
            running = [one for one in running if one.id not in held]
            decoding = [one for one in decoding if one.id not in held]
        shape = StepShape(len(decoding), 0, sum([one.num_computed for one in decoding]))
        load = Load(len(running), shape, tightest_s, prefill_start, pace_s, len(held))
        self.limits = self._controller.decide(load, self.cost)
        return running

    def _pace_s(self, request: Request, tpot_s: float, now: float) -> float:
        """The time per token that this one needs from now on, to have had at most `tpot_s` on
        average when it ends."""
        first_at = self._first_token_at.get(request.id)
        if first_at is None:
            return tpot_s
        num_output, max_tokens = request.num_output_tokens, request.params.max_tokens or 1
        late_s = now - first_at - (num_output - 1) * tpot_s
        if late_s <= 0.0:
            return tpot_s
        tier = request.terms.tier
        num_left = self._promises.lengths.expected_left(tier, num_output, max_tokens)
        needed_s = tpot_s - late_s / num_left
        if needed_s < MOST_CATCH_UP * tpot_s:
            return tpot_s
        return min(tpot_s, needed_s / ON_ITS_OWN)

    def by_urgency(self, prefilling: list[Request]) -> list[Request]:
        """Those with prompts to compute: who must be begun first, then as they are."""
        return sorted(prefilling, key=_due_at) if self.has_promises else prefilling

    def _hold(
        self, running: Sequence[Request], decoding: Sequence[Request], step_s: float, now: float
    ) -> dict[str, int]:
        """The decodes that are furthest ahead of their readers leave the step, until it is
        expected to end in time with what urgent prefill needs. For how many steps each has."""
        if self._config.mode not in ("auto", "latency"):
            return {}
        cost, held = self.cost, dict[str, int]()
        full_s = cost.constant_s + sum([cost.decode_s(one.num_computed) for one in decoding])
        excess_s = full_s + self._urgent_prefill_s(running, step_s, now) - step_s
        if excess_s <= 0.0:
            return held
        slacks = [slack_s(self._job(one), now, cost, step_s) for one in decoding]
        ranked = sorted(zip(slacks, decoding, strict=True), key=_slack, reverse=True)
        for slack, request in ranked[:-1]:  # one stays: a step without work would be no step
            if excess_s <= 0.0 or slack < step_s:
                break
            num_held = self._num_held.get(request.id, 0)
            if num_held < MAX_HELD_STEPS:
                held[request.id] = num_held + 1
                excess_s -= cost.decode_s(request.num_computed)
        return held

    def _urgent_prefill_s(self, running: Sequence[Request], step_s: float, now: float) -> float:
        """Seconds of this step that prefills need so that each is done when it is due."""
        needed_s = self.cost.prefill_s(self._config.prefill_floor)
        for request in running:
            if len(request.token_ids) - request.num_computed > 1:
                job = self._job(request)
                left_s = max(step_s, min(job.next_due_at, job.last_due_at) - now - step_s)
                needed_s += job.prefill_s(self.cost) * step_s / left_s if left_s < inf else 0.0
        return min(needed_s, MAX_PREFILL_SHARE * step_s)

    def end(self, plan: StepPlan, elapsed_s: float, now: float) -> None:
        """Learn from a step that was measured."""
        shape = shape_of(plan)
        self.model.observe(shape, elapsed_s)
        self._controller.observe(shape, elapsed_s)
        self.cost = self.model.cost
        if self._promised:
            for item in plan.scheduled:
                request = self._promised.get(item.request_id)
                if request is not None:
                    self._follow(request, now)

    def _follow(self, request: Request, now: float) -> None:
        if request.state is RequestState.FINISHED:
            self.leave(request)
        elif request.num_output_tokens and request.id not in self._first_token_at:
            # One that was continued after a crash has had others; it is taken to be on time.
            had_s = (request.num_output_tokens - 1) * (request.terms.targets.tpot_s or 0.0)
            self._first_token_at[request.id] = now - had_s


def _due_at(request: Request) -> float:
    return request.due_at


def _slack(pair: tuple[float, Request]) -> float:
    return pair[0]
