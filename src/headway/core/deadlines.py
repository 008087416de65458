"""Promises: by when each token of a request is due, and whether all of them can be kept.

Pure functions over plain values, asked by the scheduler and, with the coefficients it exports, by
the API process before it sends a request. A reader reads at a pace: the first token is due
`ttft_s` after arrival, each further one `tpot_s` after the one before it; a deadline is due when
the last token must be there.

Whether a promise can be kept is a matter of the machine's time. Each request needs some of it
before each of its due times. If for every due time there is less work due by then than there is
time, then serving by due time keeps all promises; if not, somebody's will be broken, and it
should not be made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from headway.core.request import Request
from headway.core.steptime import StepCost
from headway.core.terms import Targets

MARGIN = 0.1
"""Share of the machine's time that no promise is made of: predictions err, and new requests that
may not be refused come in."""
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


def met(targets: Targets, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None) -> bool:
    """Whether a finished request had what it was promised. One without a first token has no
    TTFT and missed any; an answer of one token has no TPOT and meets any."""
    if targets.ttft_s is not None and (ttft_s is None or ttft_s > targets.ttft_s):
        return False
    if targets.tpot_s is not None and tpot_s is not None and tpot_s > targets.tpot_s:
        return False
    return targets.deadline_s is None or (e2e_s is not None and e2e_s <= targets.deadline_s)


class Job(NamedTuple):
    """The work that is left of a request, and what it was promised."""

    arrived_at: float
    targets: Targets
    num_prefill_left: int
    num_output: int
    num_output_left: int
    """Expected, the last one included."""
    num_context: int
    """Tokens known: what a decode reads."""
    first_token_at: float | None = None
    num_samples: int = 1
    """That will decode, each of them as long."""

    @property
    def next_due_at(self) -> float:
        """When the next token is due by the reader's pace; infinity if no promise says so."""
        targets = self.targets
        if self.first_token_at is None:
            return inf if targets.ttft_s is None else self.arrived_at + targets.ttft_s
        if targets.tpot_s is None:
            return inf
        return self.first_token_at + self.num_output * targets.tpot_s

    @property
    def last_due_at(self) -> float:
        """When the last token is due, by the deadline and by the reader's pace."""
        targets, due_at = self.targets, inf
        if targets.deadline_s is not None:
            due_at = self.arrived_at + targets.deadline_s
        if targets.tpot_s is not None:
            paced_s = max(0, self.num_output_left - 1) * targets.tpot_s
            due_at = min(due_at, self.next_due_at + paced_s)
        return due_at

    def prefill_s(self, cost: StepCost) -> float:
        start = max(0, self.num_context - self.num_prefill_left)
        return cost.prefill_s(self.num_prefill_left, start) if self.num_prefill_left > 0 else 0.0

    def decode_s(self, cost: StepCost) -> float:
        """The prefill's last step gives the first token: it is no decode."""
        num_steps = self.num_output_left - (1 if self.num_prefill_left > 0 else 0)
        mean_context = self.num_context + num_steps / 2
        return self.num_samples * max(0, num_steps) * cost.decode_s(mean_context)

    def latest_start_at(self, cost: StepCost, step_s: float) -> float:
        """The last moment at which it can be begun, alone and with steps of `step_s`, without
        breaking a promise."""
        prefill_s = self.prefill_s(cost)
        next_at = self.next_due_at - prefill_s
        last_at = self.last_due_at - prefill_s - self.num_output_left * step_s
        return min(next_at, last_at)


def job_of(
    request: Request,
    num_output_left: int,
    first_token_at: float | None = None,
    num_cached: int = 0,
) -> Job:
    """What is left of a request that is expected to produce so many more tokens. Before it is
    begun, what was found cached of it is not."""
    num_left = request.num_tokens - request.num_computed
    if num_cached and not request.num_computed:
        num_left = max(2, num_left - num_cached)
    return Job(
        request.arrived_at,
        request.terms.targets,
        num_left if num_left > 1 else 0,
        request.num_output_tokens,
        num_output_left,
        request.num_tokens,
        first_token_at,
        1 if request.num_output_tokens else request.params.n,
    )


def slack_s(job: Job, now: float, cost: StepCost, step_s: float) -> float:
    """Seconds for which it can be left alone: for a decode, how far ahead of its reader it is;
    else how long until it must be begun. Negative is too late already."""
    slack = job.latest_start_at(cost, step_s) - now
    return slack if job.num_prefill_left > 0 else min(slack, job.next_due_at - now - step_s)


@dataclass(frozen=True, slots=True)
class Feasible:
    """The promise can be kept."""


@dataclass(frozen=True, slots=True)
class Infeasible:
    """It cannot, or only by breaking somebody else's."""

    message: str
    retry_after_s: float


class Lead(NamedTuple):
    """How far a tenant is ahead of its share."""

    excess: float
    """Service beyond what a promise may take ahead of its tenant's turn, over the weight; below
    zero there is some of that left."""
    weight: float
    others_weight: float
    """Of the tenant that is to catch up."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Where tenants stand that were promised something, while others wait for their turn."""

    leads: dict[str, Lead]

    def owed(self, tenant: str, num_ahead: float) -> float:
        """Service that others must have before a request of this tenant is next, if its tenant is
        to have so much before it, in weighted tokens."""
        lead = self.leads.get(tenant)
        if lead is None:
            return 0.0
        return max(0.0, lead.excess + num_ahead / lead.weight) * lead.others_weight


NO_SHARES = Shares({})


@dataclass(frozen=True, slots=True)
class Pace:
    """How the engine goes: what a step costs, how long one may take, and whose turn it is."""

    cost: StepCost
    step_s: float
    shares: Shares = NO_SHARES

    @property
    def speed(self) -> float:
        """Seconds of work done per second: each step has its constant part."""
        return max(0.05, 1.0 - self.cost.constant_s / max(self.step_s, 2 * self.cost.constant_s))


@dataclass(frozen=True, slots=True)
class Ahead:
    """What goes before a request, beside the promises made to others."""

    reserved: float = 0.0
    """The share of the time that requests with tighter promises, yet to come, will ask for."""
    owed_s: float = 0.0
    """Work of other tenants that is first because this one's had more than its share."""


NOTHING_AHEAD = Ahead()


def feasible(
    job: Job, others: Iterable[Job], pace: Pace, now: float, ahead: Ahead = NOTHING_AHEAD
) -> Feasible | Infeasible:
    """Can this request's promises be kept together with those made to the others?

    `others` are all requests in the engine, or on their way to it. Those without promises are
    served after the rest and do not count, but what is decoding stays in every step.
    """
    others = list(others)
    cost, speed = pace.cost, pace.speed * (1.0 - MARGIN)
    ttft_s = expected_ttft_s(job, others, pace, ahead.owed_s) / (1.0 - MARGIN)
    if now + ttft_s > job.next_due_at:
        return _infeasible("the first token", ttft_s, now + ttft_s - job.next_due_at)
    tpot_s = job.targets.tpot_s
    least_step_s = cost.constant_s + cost.decode_s(job.num_context)
    if tpot_s is not None and least_step_s > tpot_s:
        return Infeasible(
            f"a token takes {1000 * least_step_s:.0f} ms here even without other requests, "
            f"and {1000 * tpot_s:.0f} ms are asked for",
            MAX_RETRY_AFTER_S,
        )
    late_s = max(
        _lateness_s(job, others, cost, speed, now),
        _own_lateness_s(job, others, cost, speed - ahead.reserved, now),
    )
    if late_s > 0.0:
        due_at = job.last_due_at if job.last_due_at < inf else job.next_due_at
        what = "the last token" if job.last_due_at < inf else "the first token"
        return _infeasible(what, due_at - now + late_s, late_s)
    return Feasible()


def _infeasible(what: str, expected_s: float, late_s: float) -> Infeasible:
    retry_after_s = min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, late_s))
    if late_s == inf:
        text = "requests with tighter targets take all the time there is"
    else:
        text = f"{what} is expected in {expected_s:.1f} s, {late_s:.1f} s after it is due"
    return Infeasible(text, retry_after_s)


def expected_ttft_s(job: Job, others: Iterable[Job], pace: Pace, owed_s: float = 0.0) -> float:
    """Seconds from now to the first token, behind the prefills that are due before it and what
    other tenants are owed, and beside the decodes, which have their part of every step."""
    cost = pace.cost
    start_at = job.latest_start_at(cost, pace.step_s)
    work_s, decode_s, other_s = job.prefill_s(cost) + owed_s, 0.0, 0.0
    for other in others:
        prefill_s = other.prefill_s(cost)
        other_s += prefill_s
        if other.num_prefill_left == 0:
            decode_s += cost.decode_s(other.num_context)
        elif other.latest_start_at(cost, pace.step_s) <= start_at:
            work_s += prefill_s
    step_s = max(pace.step_s, 2 * cost.constant_s)
    # Decodes leave prefill a part of each step, however many they are.
    free = max(0.1, 1.0 - (cost.constant_s + decode_s) / step_s)
    # About half of the step that is running is still to come, if one is.
    running_s = min(step_s / 2, cost.constant_s + decode_s + other_s)
    return running_s + work_s / free


def _demands(job: Job, cost: StepCost) -> tuple[tuple[float, float], ...]:
    """Pairs of a due time and the seconds of work due by then."""
    prefill_s, decode_s = job.prefill_s(cost), job.decode_s(cost)
    next_due_at, last_due_at = job.next_due_at, job.last_due_at
    if next_due_at < last_due_at:
        return (next_due_at, prefill_s), (last_due_at, decode_s)
    return ((last_due_at, prefill_s + decode_s),)


def _lateness_s(job: Job, others: Iterable[Job], cost: StepCost, speed: float, now: float) -> float:
    """By how much work exceeds time at the worst due time from this request's first on."""
    demands = sorted(
        demand for one in (job, *others) for demand in _demands(one, cost) if demand[0] < inf
    )
    first_at = min(job.next_due_at, job.last_due_at)
    work_s, late_s = 0.0, 0.0
    for due_at, seconds in demands:
        work_s += seconds
        # One that is late already has no claim on the others; its work is still to be done.
        if due_at >= first_at and due_at > now:
            late_s = max(late_s, work_s / speed - (due_at - now))
    return late_s


def _own_lateness_s(
    job: Job, others: Iterable[Job], cost: StepCost, speed: float, now: float
) -> float:
    """The same for this request alone, at the speed that tighter ones to come will leave it."""
    due_at = job.last_due_at
    if due_at == inf:
        return 0.0
    work_s = sum(
        seconds for one in (job, *others) for at, seconds in _demands(one, cost) if at <= due_at
    )
    left_s = due_at - now
    return inf if speed <= 0.0 else max(0.0, work_s / speed - left_s)
