"""The scheduler: at every step, who runs, how many of their tokens, and in which blocks.

Owns the running requests, the waiting line and the KV cache. A step goes:

    schedule   1. a waiting request of strictly stronger claim may take the place of running ones
               2. running requests whose tokens have outgrown their blocks get one more; where
                  there is none, the weakest gives way
               3. decodes, strongest first
               4. prefill chunks of running requests, then admissions, in what the budget leaves
    update     tokens are appended, full blocks are published, finished requests leave

It reads no clock, draws no random number and touches no tensor. What happened is told by
events, taken with `take_events`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from headway.config import SchedulerConfig
from headway.core import events
from headway.core.causes import WaitCause
from headway.core.draft import PlanDraft
from headway.core.executor import Capacity
from headway.core.kv.cache import KVCache
from headway.core.kv.offload import Offload
from headway.core.plan import Failure, Sample, ScheduledRequest, StepPlan, StepResult
from headway.core.request import FinishReason, Request, RequestState
from headway.core.running.admission import (
    Admit,
    Room,
    Wait,
    demand_of,
    refuse_if_never_fits,
    try_admit,
)
from headway.core.running.headroom import Headroom
from headway.core.running.preemption import Preemption
from headway.core.running.running_set import RunningSet
from headway.core.running.victim import VictimRules, find_preemptible
from headway.core.slo.feasibility import Infeasible
from headway.core.slo.forecast import Forecast
from headway.core.slo.pacer import Pacer
from headway.core.waiting.accounts import Accounts
from headway.core.waiting.policies import PolicyContext, make_queue
from headway.core.waiting.queue import WaitingQueue

RUNNING = RequestState.RUNNING
new_tuple = tuple[object, ...].__new__
"""Makes a NamedTuple of all its fields in half the time of a call of its class; used where every
request passes in every step."""
MAX_SKIPS = 4
"""Requests that do not fit and are passed over in one step; bounds the work of a pass."""


class Scheduler:
    """Turns requests into step plans and step results into events."""

    def __init__(
        self, config: SchedulerConfig, capacity: Capacity, enable_prefix_caching: bool = True
    ) -> None:
        self.config = config
        self.capacity = capacity
        self.kv = KVCache(capacity.num_blocks, capacity.block_size, enable_prefix_caching)
        self.accounts = Accounts()
        context = PolicyContext(self.accounts, self.kv.has_cached_prefix)
        queue = make_queue(config.scheduling_policy, context)
        self.waiting = WaitingQueue(queue, self.accounts, config.max_wait_s)
        self.offload = Offload(
            self.kv, capacity, config.preemption_method, lambda: self.pacer.model.slow_cost
        )
        self._running_set = RunningSet(self.kv, self.offload, self.waiting, self.accounts)
        self._headroom = Headroom(int(capacity.num_blocks * config.kv_watermark))
        rules = VictimRules(self.waiting.eviction_key, config.max_preemptions)
        self._preemption = Preemption(self.kv, self._running_set, rules, self._headroom)
        self.pacer = Pacer(config, self.accounts, lambda one: self.kv.match(one).num_tokens)
        self._num_seqs_before = 0
        self._arrival_orders, self._step_ids = count(1), count(1)

    @property
    def has_work(self) -> bool:
        return bool(self._running_set.requests)

    @property
    def running(self) -> list[Request]:
        """Sorted by standing, strongest first."""
        return self._running_set.running

    @property
    def requests(self) -> dict[str, Request]:
        """Every live request by id, waiting or running."""
        return self._running_set.requests

    @property
    def num_seqs(self) -> int:
        """Running requests, and the seats kept for samples that have yet to fork."""
        return self.accounts.num_running

    def forecast(self, now: float) -> Forecast:
        """The state by which other processes judge whether targets can be met."""
        return self.pacer.forecast(self.running, self.waiting.shares, now)

    def take_events(self) -> list[events.Event]:
        taken, self._running_set.events = self._running_set.events, []
        return taken

    def add(self, request: Request, now: float, is_resent: bool = False) -> None:
        """Put it into the waiting line; refuse what never fits, or asks for too much too soon."""
        if not self.requests.keys().isdisjoint(request.sample_ids):
            raise ValueError(f"request id {request.id} is in use")
        event_list = self._running_set.events
        refusal = refuse_if_never_fits(demand_of(request), self.capacity, self.config.max_num_seqs)
        if refusal is not None:
            event_list.append(events.Refused(request.id, now, "never_fits", refusal.message))
            return
        shares = self.waiting.shares
        verdict = self.pacer.add(request, self.running, shares, now, is_resent)
        if isinstance(verdict, Infeasible):
            retry_after_s = verdict.retry_after_s
            event_list.append(
                events.Refused(request.id, now, "deadline", verdict.message, retry_after_s)
            )
            return
        request.arrival_order = next(self._arrival_orders)
        self._running_set.wait(request)
        event_list.append(
            events.Arrived(request.id, request.arrived_at, request.num_prompt_tokens, request.terms)
        )

    def abort(self, request_id: str, now: float, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request in whatever state it is. False if it is not here (any more)."""
        if (request := self.requests.get(request_id)) is not None:
            self._running_set.abort(request, reason, now)
            self.pacer.leave(request)
        return request is not None

    # ---------------------------------------------------------------- schedule

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step. The plan may be empty if there is nothing to do."""
        self._num_seqs_before = self.num_seqs
        self._preemption.begin_pass()
        self.waiting.begin_pass(now)
        self._preempt_for_waiting(now)
        self._preemption.grow_tables(now)
        active = self.pacer.begin(self.running, len(self.waiting), now)
        budget = self.pacer.limits.budget
        draft = PlanDraft()
        deferred = self._schedule_decodes(draft, active, budget.for_decode(has_prefill=True))
        if len(active) < len(self.running) and not draft.num_tokens and not draft.prefilling:
            # Nobody it was for found a block: then there is nobody to give way to.
            deferred = self._schedule_decodes(draft, self.running, budget.for_decode(True))
        limit = draft.num_tokens + budget.for_prefill(draft.num_tokens)
        for request in self.pacer.by_urgency(draft.prefilling):
            if self.pacer.has_slo_requests and not self._preemption.cause:
                self._admit_waiting(draft, limit, now, request.start_by)
            if draft.num_tokens < limit:
                draft.add(request, self.kv.tables[request.id], limit)
        # What a preemption freed is for the running: nobody is admitted in such a step.
        cause = self._preemption.cause or self._admit_waiting(draft, limit, now)
        # What is left of prefill's part is for decodes beyond theirs.
        self._schedule_decodes(draft, deferred, budget.for_decode(has_prefill=False))
        self.waiting.end_pass(cause, lambda: self._running_set.largest_holder(cause), now)
        return self._build_plan(draft)

    def _num_free_seqs(self) -> int:
        """Controlled while anybody runs, but a seat that was taken when the pass began may be
        taken over; an empty engine has all the seats there are."""
        limit = max(self.pacer.limits.max_num_seqs, self._num_seqs_before)
        return max(0, (limit if self.running else self.config.max_num_seqs) - self.num_seqs)

    def _build_plan(self, draft: PlanDraft) -> StepPlan:
        step_id = next(self._step_ids)
        if not draft.scheduled:
            return StepPlan(step_id, ())
        copies, moves = self.kv.take_copies(), self.offload.take_moves()
        return draft.build_plan(step_id, copies, moves, self._running_set.take_released())

    def _schedule_decodes(
        self, draft: PlanDraft, requests: list[Request], limit: int
    ) -> list[Request]:
        """Those with one token to compute, strongest first. Prompts are set aside in the draft;
        those beyond the limit are returned; those that found no block sit out."""
        deferred: list[Request] = []
        tables, block_size = self.kv.tables, self.kv.block_size
        for request in requests:
            table, token_ids = tables[request.id], request.token_ids
            num_tokens, num_blocks = len(token_ids), len(table.block_ids)
            if num_tokens > num_blocks * block_size:
                continue
            if num_tokens - request.num_computed != 1:
                draft.prefilling.append(request)
            elif draft.num_tokens >= limit:
                deferred.append(request)
            elif table.num_sent != num_blocks:
                draft.add(request, table, limit)
            else:  # the usual case, spelled out: nearly every request meets it in every step
                fields = (request.id, num_tokens - 1, (token_ids[-1],), (), True, None)
                draft.scheduled.append(new_tuple(ScheduledRequest, fields))
                draft.num_tokens += 1
        return deferred

    # --------------------------------------------------------------- admission

    def _try_admit(
        self, request: Request, growing: Sequence[Request] | None = None
    ) -> Admit | Wait:
        """Does it fit, leaving room for running requests to grow, or for what these need now? If
        need be, with kept blocks of weaker preempted requests."""
        outcome = self._try_admit_as_is(request, growing)
        if isinstance(outcome, Wait) and self._preemption.free_kept_blocks_for(request, outcome):
            outcome = self._try_admit_as_is(request, growing)
        return outcome

    def _try_admit_as_is(self, request: Request, growing: Sequence[Request] | None) -> Admit | Wait:
        tenant = request.terms.tenant
        headroom = self._headroom.num_blocks(len(self.running), growing)
        room = Room(
            self._num_free_seqs(),
            self.kv.pool.num_free - headroom,
            sum([other.terms.tenant == tenant for other in growing or ()]),
        )
        is_immune = request.num_preemptions >= self.config.max_preemptions
        return try_admit(request, self.offload.match(request), self.kv, room, is_immune)

    def _admit_waiting(
        self, draft: PlanDraft, limit: int, now: float, due_before: float | None = None
    ) -> WaitCause:
        """Admit waiting requests while samples and tokens are left; return what ended it.

        With `due_before`, only requests whose latest start is before it. A request that does not
        fit is passed over, until it ages; then the pass ends at it. A tenant at its KV quota is
        suspended, and does not hold up others.
        """
        waiting, skipped = self.waiting, list[Request]()
        cause: WaitCause | None = None
        while len(skipped) <= MAX_SKIPS and not any(request.is_aged for request in skipped):
            cause = self._limit_reached(draft, limit)
            request = waiting.pop() if cause is None else None
            if request is None:
                break
            if due_before is not None and request.start_by >= due_before:
                waiting.put_back(request)
                break
            outcome = self._try_admit(request)
            if isinstance(outcome, Admit):
                self._running_set.admit(request, outcome, now)
                draft.add(request, self.kv.tables[request.id], limit)
            elif outcome.cause is WaitCause.KV_QUOTA:
                waiting.suspend(request, now)
            else:
                waiting.block(request, outcome.cause, now)
                skipped.append(request)
        for request in skipped:
            waiting.put_back(request)
        head_cause = waiting.cause_of(skipped[0]) if skipped else None
        return head_cause or cause or WaitCause.TOKEN_BUDGET

    def _limit_reached(self, draft: PlanDraft, limit: int) -> WaitCause | None:
        if self._num_free_seqs() == 0:
            return WaitCause.RUNNING_LIMIT
        if draft.num_tokens < limit:
            return None
        is_capped = limit < self.pacer.limits.max_num_batched_tokens
        return WaitCause.PREFILL_CAP if is_capped else WaitCause.TOKEN_BUDGET

    def _preempt_for_waiting(self, now: float) -> None:
        """Let waiting requests of strictly stronger claim take the place of running ones, where
        those leaving make them fit: the head of the line, and then those with a claim on weaker
        requests of their own tenant. Nobody overtakes one that has aged."""
        while (request := self.waiting.peek()) is not None:
            if not self._admit_by_preemption(request, now):
                if request.is_aged:
                    return
                break
        for request in self.waiting.urgent():
            # One that needs nobody's place waits for its tenant's turn.
            if isinstance(self._try_admit_as_is(request, ()), Wait):
                self._admit_by_preemption(request, now)

    def _admit_by_preemption(self, request: Request, now: float) -> bool:
        key, waiting = self.waiting.sort_key(request), self.waiting
        if not waiting.may_preempt(request, key, self.running) or waiting.is_behind_own(request):
            return False
        waiting.take(request)
        # Running requests that this one may not preempt grow later in this step: leave them room.
        growing = self._preemption.find_growing()
        outcome = self._try_admit(request, growing)
        if isinstance(outcome, Wait):
            preemptible = find_preemptible(key, self.running, waiting.effective_key)
            growing = [one for one in growing if one not in preemptible]
            outcome, preempt_for = self._try_admit(request, growing), self._preemption.preempt_for
            if isinstance(outcome, Wait) and preempt_for(request, outcome, preemptible, now):
                outcome = self._try_admit(request, growing)
        if isinstance(outcome, Wait):
            waiting.put_back(request)
            return False
        self._running_set.admit(request, outcome, now)
        return True

    # ------------------------------------------------------------------ update

    def update(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Take in what a step computed."""
        self.offload.observe(plan, result)
        has_left = False
        requests, block_size, event_list = (
            self.requests,
            self.kv.block_size,
            self._running_set.events,
        )
        sampled: list[str] = []
        for item, outcome in zip(plan.scheduled, result.outcomes, strict=True):
            request = requests.get(item.request_id)
            if request is None or request.state is not RUNNING:  # aborted while in flight
                continue
            if not isinstance(outcome, Failure):
                num_tokens = len(item.token_ids)
                request.num_computed += num_tokens
                if num_tokens > 1 or request.num_computed % block_size == 0:
                    self.kv.publish(request)
                    self._preemption.track_growth(request)
            if isinstance(outcome, Sample):
                token_ids, logprobs = outcome.token_ids, outcome.logprobs
                sampled.append(request.terms.tenant)
                if request.params.n > 1:
                    self.pacer.add_forked(request, self._running_set.fork(request, now))
                if len(token_ids) == 1:
                    reason = request.append(token_ids[0])
                else:
                    reason, token_ids = request.extend(token_ids)
                    logprobs = logprobs[: len(token_ids)] if logprobs is not None else None
                    sampled += [request.terms.tenant] * (len(token_ids) - 1)
                    self._preemption.track_growth(request)
                event_list.append(
                    new_tuple(events.TokensEmitted, (request.id, token_ids, logprobs))
                )
                if reason is not None:
                    self._running_set.leave(request, reason, now)
                    has_left = True
            elif outcome is not None or item.has_sample:
                message = "the executor sampled nothing" if outcome is None else outcome.message
                self._running_set.leave(request, FinishReason.ERROR, now, message)
                has_left = True
        self.accounts.charge_output(sampled)
        self.pacer.end(plan, result.elapsed_s - result.copy_s, now)
        if has_left:
            self._running_set.running = [it for it in self.running if it.state is RUNNING]
