"""The scheduler: which requests run in a step, how many of their tokens, in which KV blocks.

    schedule(now)                  -> StepPlan
        1. preempt for waiting     a waiting request of smaller rank may preempt running requests
        2. grow tables             running requests get the blocks that their new tokens need, by
                                   preemption where no block is free
        3. decodes                 requests with one token to compute, within the token budget
        4. prefill, admission      chunks of running prompts, then requests from the waiting queue,
                                   in what the token budget leaves
        5. spot requests           beside ordinary ones, for a small share of the time
    update(plan, result, now)      append tokens, publish full blocks, finish requests, charge
                                   service to tenants

Why is request R not running? `_try_admit` below answers Admit or Wait(cause) for the request that
the waiting queue offers next:

    core/waiting/queue.py      which request is next: the policy, aging, tenants at their KV quota
    core/running/admission.py  whether it fits: samples, KV blocks, KV quota
    core/slo/pacer.py          the limits of this step: tokens, running requests, deferred decodes
    core/running/victim.py     which running request may be preempted for it
    core/running/spot_time.py  how much spot work a step with ordinary requests has

The scheduler reads no clock, draws no random number and touches no tensor. What happened is in the
events that `take_events` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import inf

from headway.config import SchedulerConfig
from headway.core import events
from headway.core.causes import WaitCause
from headway.core.draft import PlanDraft
from headway.core.executor import Capacity
from headway.core.kv.cache import KVCache
from headway.core.kv.offload import Offload
from headway.core.plan import (
    Failure,
    PromptScores,
    Sample,
    ScheduledRequest,
    StepPlan,
    StepResult,
    make_tuple,
)
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
from headway.core.running.spot_time import SpotTime
from headway.core.running.victim import VictimRules, find_preemptible
from headway.core.slo.admission import SloAdmission
from headway.core.slo.feasibility import Infeasible
from headway.core.slo.forecast import Forecast
from headway.core.slo.pacer import Pacer
from headway.core.slo.steptime import StepShape, shape_of_items
from headway.core.waiting.accounts import Accounts
from headway.core.waiting.policies import PolicyContext, make_queue
from headway.core.waiting.queue import WaitingQueue

RUNNING = RequestState.RUNNING
MAX_SKIPS = 4
"""Requests that do not fit after which a pass ends; bounds its work."""


class Scheduler:
    """Turns requests into step plans and step results into events."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: Capacity,
        enable_prefix_caching: bool = True,
        kv: KVCache | None = None,
    ) -> None:
        """Start without requests; a replay brings a cache that knows hashes instead of tokens."""
        self.config = config
        self.capacity = capacity
        num_blocks, block_size = capacity.num_blocks, capacity.block_size
        self.kv = kv or KVCache(num_blocks, block_size, enable_prefix_caching)
        self.accounts = Accounts()
        context = PolicyContext(self.accounts, self.kv.has_cached_prefix)
        queue = make_queue(config.scheduling_policy, context)
        self.waiting = WaitingQueue(queue, self.accounts, config.max_wait_s)
        self.offload = Offload(
            self.kv, capacity, config.preemption_method, lambda: self.pacer.model.slow_cost
        )
        self._running_set = RunningSet(self.kv, self.offload, self.waiting, self.accounts)
        self._headroom = Headroom(int(capacity.num_blocks * config.kv_watermark))
        waiting = self.waiting
        rules = VictimRules(waiting.eviction_key, config.max_preemptions, waiting.is_spot)
        self._preemption = Preemption(self.kv, self._running_set, rules, self._headroom)
        self._spot_time = SpotTime()
        self.pacer = Pacer(config, self.accounts)
        self.slo_admission = SloAdmission(
            config, self.accounts, self.pacer, lambda one: self.kv.match(one).num_tokens
        )
        self._num_seqs_before = 0
        """Running samples when the pass began."""
        self._decode_turns: dict[str, int] = {}
        """Order of the next decodes, while the token budget is too small for all of them."""
        self._arrival_orders, self._step_ids = count(1), count(1)
        self._resent_orders = count(-(2**62))
        """Before every request that came here first: resent requests waited or ran elsewhere."""

    @property
    def has_work(self) -> bool:
        return bool(self._running_set.requests)

    @property
    def running(self) -> list[Request]:
        """Running requests by effective sort key, smallest first."""
        return self._running_set.running

    @property
    def requests(self) -> dict[str, Request]:
        """Every live request by id, waiting or running."""
        return self._running_set.requests

    @property
    def num_seqs(self) -> int:
        """Running samples, and samples that running prompts have yet to fork."""
        return self.accounts.num_running

    def forecast(self, now: float) -> Forecast:
        """Return what other processes need to judge SLO targets."""
        if not self.has_work:
            self.slo_admission.become_idle()
        return self.slo_admission.forecast(self.running, self.waiting.shares, now)

    def take_events(self) -> list[events.Event]:
        """Return the events since the last call."""
        taken, self._running_set.events = self._running_set.events, []
        return taken

    def add(self, request: Request, now: float, is_resent: bool = False) -> None:
        """Add a request to the waiting queue, or refuse it.

        Refused: a request that can never fit, and one whose SLO targets cannot be met.
        """
        if not self.requests.keys().isdisjoint(request.sample_ids):
            raise ValueError(f"request id {request.id} is in use")
        emit = self._running_set.events.append
        refusal = refuse_if_never_fits(demand_of(request), self.capacity, self.config.max_num_seqs)
        if refusal is not None:
            emit(events.Refused(request.id, now, "never_fits", refusal.message))
            return
        shares = self.waiting.shares
        verdict = self.slo_admission.add(request, self.running, shares, now, is_resent)
        if isinstance(verdict, Infeasible):
            message, retry_after_s = verdict.message, verdict.retry_after_s
            emit(events.Refused(request.id, now, "deadline", message, retry_after_s))
            return
        orders = self._resent_orders if is_resent else self._arrival_orders
        request.arrival_order = next(orders)
        self._running_set.wait(request)
        if is_resent and request.num_output_tokens:
            # The engine that computed the first token has charged the prompt.
            self.accounts.mark_charged(request, request.num_prompt_tokens)
        emit(
            events.Arrived(
                request.id,
                request.arrived_at,
                request.num_prompt_tokens,
                request.terms,
                request.params.max_tokens or 0,
                request.params.n,
                request.priority,
            )
        )

    def abort(self, request_id: str, now: float, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request in any state; return False if it is unknown or has ended."""
        if (request := self.requests.get(request_id)) is not None:
            self._running_set.abort(request, reason, now)
            self.pacer.open_requests.leave(request)
        return request is not None

    # ---------------------------------------------------------------- schedule

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step; the plan is empty if no request can run."""
        self._num_seqs_before = self.num_seqs
        self._preemption.begin_pass()
        if not self.waiting.is_quiet:
            self.waiting.begin_pass(now)
            self._preempt_for_waiting(now)
        self._preemption.grow_tables(now)
        ordinary, spot = self._running_set.divide()
        active = self.pacer.begin(ordinary, self.waiting.num_ready, now)
        draft = PlanDraft()
        cause = self._fill(draft, active, now)
        if not draft.scheduled and len(active) < len(self.running):
            # No active request has blocks for its tokens: none need be left out for them.
            draft.prefilling.clear()
            cause = self._fill(draft, self.running, now)
        elif spot or cause is WaitCause.TIER_ORDER:
            self._add_spot(draft, spot, now)
        if not self.waiting.is_quiet:
            self.waiting.end_pass(cause, lambda: self._running_set.largest_holder(cause), now)
        return self._build_plan(draft)

    def _fill(self, draft: PlanDraft, active: list[Request], now: float) -> WaitCause:
        """Schedule the active requests, admit waiting ones; return what ended the admission."""
        budget = self.pacer.limits.budget
        if self._decode_turns:
            active = self._in_turn(active)
        deferred = self._schedule_decodes(draft, active, budget.for_decode(has_prefill=True))
        num_decodes = draft.num_tokens
        limit = num_decodes + budget.for_prefill(num_decodes)
        for request in self.waiting.order_prefill(draft.prefilling, now):
            if self.pacer.has_slo_requests and not self._preemption.cause:
                self._admit_waiting(draft, limit, now, request)
            if draft.num_tokens < limit:
                draft.add(request, self.kv.tables[request.id], limit)
        # What a preemption freed belongs to the request that caused it: admit no other.
        cause = self._preemption.cause or self._admit_waiting(draft, limit, now)
        if self.pacer.step_tenant is not None:
            num_cut = self.pacer.free_limits.budget.for_prefill(num_decodes) + num_decodes - limit
            self.pacer.add_cut(self._find_cut(draft, num_cut if draft.num_tokens >= limit else 0))
        # Decodes beyond their part of the budget use what prefill leaves.
        if deferred:
            limit = budget.for_decode(has_prefill=False)
            deferred = self._schedule_decodes(draft, deferred, limit)
        if deferred or self._decode_turns:
            self._set_decode_turns(draft, deferred)
        return cause

    def _add_spot(self, draft: PlanDraft, spot: list[Request], now: float) -> None:
        """Add spot work to a step of ordinary decodes, for the time saved up for it.

        Running spot requests go first; then the next waiting one may be admitted. There is none
        while an ordinary request waits or is in prefill: its first token would come later.
        """
        head, is_spot = self.waiting.peek(), self.waiting.is_spot
        if draft.has_prefill or (head is not None and not is_spot(head)):
            return
        cost, num_before, tables = self.pacer.cost, len(draft.scheduled), self.kv.tables
        limit = draft.num_tokens + self._spot_time.num_tokens(cost)
        limit = min(limit, self.pacer.limits.max_num_batched_tokens)
        for request in spot:
            num_slots = len(tables[request.id].block_ids) * self.kv.block_size
            if draft.num_tokens < limit and request.num_tokens <= num_slots:
                draft.add(request, tables[request.id], limit)
        if draft.num_tokens < limit and head is not None and not self._preemption.cause:
            outcome = self._try_admit(head)
            if isinstance(outcome, Admit):
                self.waiting.take(head)
                self._running_set.admit(head, outcome, now)
                draft.add(head, tables[head.id], limit)
        self._spot_time.spend(shape_of_items(draft.scheduled[num_before:]), cost)

    def _num_free_seqs(self) -> int:
        """Return how many more samples may run.

        The step's limit applies while a request runs. A sample slot in use when the pass began may
        be reused, so that a preemption is not in vain when the limit has come down.
        """
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
        """Schedule the requests with one token to compute; return those beyond the limit.

        Requests with more tokens to compute go to `draft.prefilling`. A request without blocks for
        its tokens is left out of this step.
        """
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
            else:  # no new block: the common case, without the work of draft.add
                token = (token_ids[-1],)
                has_sample = request.params.max_tokens != 0
                fields = (request.id, num_tokens - 1, token, (), has_sample, None)
                draft.scheduled.append(make_tuple(ScheduledRequest, fields))
                draft.num_tokens += 1
        return deferred

    def _set_decode_turns(self, draft: PlanDraft, deferred: list[Request]) -> None:
        """Have the decodes that were left out go first in the next step, if there are any."""
        ids = [request.id for request in deferred]
        if deferred:
            ids += [item.request_id for item in draft.scheduled if len(item.token_ids) == 1]
        self._decode_turns = {request_id: turn for turn, request_id in enumerate(ids)}

    def _in_turn(self, requests: list[Request]) -> list[Request]:
        """Return requests by rank, then by turn: one without a turn keeps its place, after them.

        By rank alone, the requests that are last would get no tokens for as long as others decode.
        """
        turns, effective_key = self._decode_turns, self.waiting.effective_key
        last = len(turns)
        return sorted(requests, key=lambda one: (effective_key(one).rank, turns.get(one.id, last)))

    def _find_cut(self, draft: PlanDraft, num_cut: int) -> StepShape:
        """Return the work of other tenants that the step target keeps out of this step.

        That is prompt tokens beyond the prefill cap, at most `num_cut`, and decodes beyond a
        lowered running limit.
        """
        num_others = 0
        if num_cut:
            ends = {item.request_id: item.start + len(item.token_ids) for item in draft.scheduled}
            for request in self.running:
                num_left = request.num_tokens - ends.get(request.id, request.num_computed)
                num_left = min(num_cut, num_left) if num_left > 1 else 0
                num_cut -= num_left
                num_others += num_left * self.pacer.is_cut_for(request)
        head = self.waiting.peek()
        if head is None or self._preemption.cause or not self.pacer.is_cut_for(head):
            return StepShape(0, num_others)
        if self._num_free_seqs() == 0:
            return StepShape(self._num_like(head), num_others)
        num_waiting = min(num_cut, self._num_like(head) * head.num_tokens) if num_cut else 0
        return StepShape(0, num_others + num_waiting)

    def _num_like(self, request: Request) -> int:
        """Return how many waiting requests like this one fit without the step target."""
        num_free_seqs = self.pacer.free_limits.max_num_seqs - self.num_seqs
        if num_free_seqs <= 0:
            return 0
        outcome = self._try_admit_as_is(request, None, num_free_seqs)
        if isinstance(outcome, Wait):
            return 0
        num_free = self.kv.pool.num_free - self._headroom.num_blocks(len(self.running), None)
        num_blocks = max(1, self.kv.num_blocks_needed(outcome.match, outcome.num_tokens))
        return max(1, min(self.waiting.num_ready, num_free_seqs, num_free // num_blocks))

    # --------------------------------------------------------------- admission

    def _try_admit(
        self, request: Request, growing: Sequence[Request] | None = None
    ) -> Admit | Wait:
        """Return whether a waiting request fits now; free kept blocks of preempted requests for it.

        Blocks are left free for running requests to grow into; with `growing`, only for what these
        requests need now.
        """
        outcome = self._try_admit_as_is(request, growing)
        if isinstance(outcome, Wait) and self._preemption.free_kept_blocks_for(request, outcome):
            outcome = self._try_admit_as_is(request, growing)
        return outcome

    def _try_admit_as_is(
        self,
        request: Request,
        growing: Sequence[Request] | None,
        num_free_seqs: int | None = None,
    ) -> Admit | Wait:
        tenant = request.terms.tenant
        headroom = self._headroom.num_blocks(len(self.running), growing)
        room = Room(
            self._num_free_seqs() if num_free_seqs is None else num_free_seqs,
            self.kv.pool.num_free - headroom,
            sum([other.terms.tenant == tenant for other in growing or ()]),
        )
        is_immune = request.num_preemptions >= self.config.max_preemptions
        return try_admit(request, self.offload.match(request), self.kv, room, is_immune)

    def _admit_waiting(
        self, draft: PlanDraft, limit: int, now: float, before: Request | None = None
    ) -> WaitCause:
        """Admit waiting requests while samples and tokens are left; return what ended the pass.

        With `before`, only SLO requests that may go before the chunk of this running prefill. A
        request that does not fit is passed over, until it ages; then the pass ends at it. A tenant
        at its KV quota is suspended, and does not hold up others.
        """
        waiting = self.waiting
        if not len(waiting):
            return WaitCause.TOKEN_BUDGET  # of nobody
        skipped: list[Request] = []
        cause: WaitCause | None = None
        while len(skipped) < MAX_SKIPS and not any(request.is_aged for request in skipped):
            cause = self._limit_reached(draft, limit)
            request = waiting.pop() if cause is None else None
            if request is None:
                break
            if before is not None and not waiting.goes_before(request, before, now):
                waiting.put_back(request)
                break
            if waiting.is_spot(request) and self._running_set.has_ordinary:
                waiting.put_back(request)
                cause = WaitCause.TIER_ORDER
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
        """Admit waiting requests that may preempt running ones, where a preemption makes them fit.

        First the head of the waiting queue, by rank; then the first requests of tenants that run
        requests of lower priority. None overtakes an aged head, unless the head is spot and the
        request is not.
        """
        waiting = self.waiting
        while (head := waiting.peek()) is not None and self._admit_by_preemption(head, now):
            pass
        max_rank = waiting.sort_key(head).rank if head is not None and head.is_aged else inf
        for request in waiting.urgent():
            if waiting.sort_key(request).rank >= max_rank:
                continue
            # A request that fits without a preemption waits for its tenant's turn.
            if isinstance(self._try_admit_as_is(request, ()), Wait):
                self._admit_by_preemption(request, now)

    def _admit_by_preemption(self, request: Request, now: float) -> bool:
        """Admit a waiting request in place of running ones; return False if it stays waiting."""
        key, waiting = self.waiting.sort_key(request), self.waiting
        if not waiting.may_preempt(request, key, self.running):
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
        """Apply the result of a step."""
        self.offload.observe(plan, result)
        has_finished = False
        requests, block_size = self.requests, self.kv.block_size
        emit, scores = self._running_set.events.append, result.prompt_scores
        sampled: list[str] = []
        spot_sampled: list[str] = []
        for item, outcome in zip(plan.scheduled, result.outcomes, strict=True):
            request = requests.get(item.request_id)
            if request is None or request.state is not RUNNING:  # aborted while in flight
                continue
            if not isinstance(outcome, Failure):
                num_tokens = len(item.token_ids)
                request.num_computed += num_tokens
                if num_tokens > 1 or request.num_computed % block_size == 0:
                    self._running_set.publish(request)
                    self._preemption.track_growth(request)
                if scores:
                    self._emit_scores(request, scores.get(request.id))
            if isinstance(outcome, Sample):
                token_ids, logprobs = outcome.token_ids, outcome.logprobs
                terms = request.terms
                tenants = spot_sampled if terms.is_spot else sampled
                tenants.append(terms.tenant)
                if request.params.n > 1:
                    samples = self._running_set.fork(request, now)
                    self.pacer.open_requests.add_forked(request, samples)
                if len(token_ids) == 1:
                    reason = request.append(token_ids[0])
                else:
                    reason, token_ids = request.extend(token_ids)
                    logprobs = logprobs[: len(token_ids)] if logprobs is not None else None
                    tenants += [terms.tenant] * (len(token_ids) - 1)
                    self._preemption.track_growth(request)
                emit(make_tuple(events.TokensEmitted, (request.id, token_ids, logprobs)))
                if reason is not None:
                    self._running_set.leave(request, reason, now)
                    has_finished = True
            elif self._end_unsampled(request, item, outcome, result, now):
                has_finished = True
        self._spot_time.earn(result.elapsed_s, len(sampled))
        self.accounts.charge_output(sampled)
        self.accounts.charge_output(spot_sampled, is_spot=True)
        self.pacer.end(plan, result.elapsed_s - result.copy_s, now)
        if has_finished:
            self._running_set.running = [it for it in self.running if it.state is RUNNING]

    def _end_unsampled(
        self,
        request: Request,
        item: ScheduledRequest,
        outcome: Failure | None,
        result: StepResult,
        now: float,
    ) -> bool:
        """End a request that failed, or whose prompt was all; return whether it ended."""
        if outcome is not None or item.has_sample:
            failure = outcome or Failure("the executor sampled nothing")
            self._running_set.leave(request, FinishReason.ERROR, now, failure)
            return True
        if request.num_computed < len(request.token_ids):
            return False
        if request.params.is_embedding:
            embedding = result.embeddings[request.id]
            self._running_set.events.append(events.Embedded(request.id, embedding.values))
        self._running_set.leave(request, FinishReason.LENGTH, now)
        return True

    def _emit_scores(self, request: Request, scores: PromptScores | None) -> None:
        if scores is None:
            return
        start = scores.start
        if start != request.num_scored:
            raise RuntimeError(f"{request.id}: scores from {start}, not {request.num_scored}")
        request.num_scored += len(scores.logprobs)
        self._running_set.events.append(events.PromptScored(request.id, start, scores.logprobs))
