"""The scheduler: at every step, who runs, how many of their tokens, and in which blocks.

Owns the running requests, the waiting line and the KV cache. A step goes:

    schedule   1. a waiting request of strictly stronger rank may take the place of running ones
               2. decodes, strongest claim first; one that needs a block and finds none may
                  preempt a weaker request
               3. prefill chunks of running requests, then admissions, in what the budget leaves
    update     tokens are appended, full blocks are published, finished requests leave

It reads no clock, draws no random number and touches no tensor. What happened is told by
events, taken with `take_events`.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace
from itertools import count

from headway.config import SchedulerConfig
from headway.core import events
from headway.core.admission import Admit, Room, Wait, demand_of, refuse_if_never_fits, try_admit
from headway.core.budget import TokenBudget
from headway.core.draft import PlanDraft
from headway.core.executor import Capacity
from headway.core.kv import BlockTable, KVCache
from headway.core.orders import make_queue
from headway.core.plan import Failure, Sample, StepPlan, StepResult
from headway.core.request import FinishReason, Request, RequestState
from headway.core.victim import choose_victim, choose_victims, weaker_than

RUNNING = RequestState.RUNNING


class Scheduler:
    """Turns requests into step plans and step results into events."""

    def __init__(
        self, config: SchedulerConfig, capacity: Capacity, enable_prefix_caching: bool = True
    ) -> None:
        self.config = config
        self.capacity = capacity
        self.kv = KVCache(capacity.num_blocks, capacity.block_size, enable_prefix_caching)
        self.waiting = make_queue(config.scheduling_policy)
        self.running: list[Request] = []
        """Sorted by claim, strongest first."""
        self.requests: dict[str, Request] = {}
        """Every live request by id, waiting or running."""
        self._budget = TokenBudget(
            config.max_num_batched_tokens,
            config.prefill_floor,
            config.prefill_cap or config.max_num_batched_tokens,
        )
        self._watermark = int(capacity.num_blocks * config.kv_watermark)
        self._places = count(1)
        self._step_ids = count(1)
        self._released_ids: list[str] = []
        self._events: list[events.Event] = []
        self._has_preempted = False

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def num_seats_used(self) -> int:
        """Running requests, and the seats kept for samples that have yet to fork."""
        return sum([request.params.n for request in self.running])

    def take_events(self) -> list[events.Event]:
        taken, self._events = self._events, []
        return taken

    def add(self, request: Request, now: float) -> None:
        """Accept a request into the waiting line, or refuse one that can never fit."""
        if not self.requests.keys().isdisjoint(request.sample_ids):
            raise ValueError(f"request id {request.id} is in use")
        refusal = refuse_if_never_fits(demand_of(request), self.capacity, self.config.max_num_seqs)
        if refusal is not None:
            self._events.append(events.Refused(request.id, now, "never_fits", refusal.message))
            return
        request.place = next(self._places)
        self.requests[request.id] = request
        self.waiting.push(request)
        self._events.append(
            events.Arrived(request.id, request.arrived_at, request.num_prompt_tokens, request.terms)
        )

    def abort(self, request_id: str, now: float, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request in whatever state it is. False if it is not here (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        if request.state is RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._leave(request, reason, now)
        return True

    # ---------------------------------------------------------------- schedule

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step. The plan may be empty if there is nothing to do."""
        self._has_preempted = False
        self._seat_stronger_claims(now)
        draft = PlanDraft()
        limit = self._budget.for_decode(has_prefill=True)
        late = self._schedule_decodes(draft, self.running[:], limit, now)
        if late and not draft.prefilling and not self._may_admit():
            self._schedule_decodes(draft, late, self._budget.for_decode(has_prefill=False), now)
        limit = draft.num_tokens + self._budget.for_prefill(draft.num_tokens)
        for request in draft.prefilling:
            if draft.num_tokens < limit and request.state is RUNNING:
                draft.add(request, self.kv.tables[request.id], limit)
        # What a preemption freed is for the running: nobody is admitted in such a step.
        if not self._has_preempted:
            self._admit_waiting(draft, limit, now)
        return self._seal(draft)

    def _may_admit(self) -> bool:
        return len(self.waiting) > 0 and self.num_seats_used < self.config.max_num_seqs

    def _seal(self, draft: PlanDraft) -> StepPlan:
        step_id = next(self._step_ids)
        if not draft.scheduled:
            return StepPlan(step_id, ())
        released_ids = tuple(self._released_ids)
        self._released_ids.clear()
        copies = self.kv.take_copies()
        return StepPlan(step_id, tuple(draft.scheduled), copies, released_ids, draft.num_tokens)

    def _schedule_decodes(
        self, draft: PlanDraft, requests: list[Request], limit: int, now: float
    ) -> list[Request]:
        """Those with one token to compute, or with tokens that may need new blocks; strongest
        first, so that a victim is never already in the plan. Prompts are set aside in the draft;
        those beyond the limit are returned."""
        late: list[Request] = []
        block_size = self.kv.block_size
        for request in requests:
            if request.state is not RUNNING:  # preempted by a stronger one a moment ago
                continue
            table = self.kv.tables[request.id]
            num_tokens, block_ids = len(request.token_ids), table.block_ids
            is_short = num_tokens > len(block_ids) * block_size
            has_one = num_tokens - request.num_computed == 1
            if not has_one and not is_short:
                draft.prefilling.append(request)
                continue
            if draft.num_tokens >= limit:
                late.append(request)
                continue
            if is_short and not self._grow(request, table, now):
                continue
            if has_one and table.num_sent == len(block_ids):
                draft.add_last(request)
            else:
                draft.add(request, table, limit)
        return late

    # --------------------------------------------------------------- admission

    def _room(self, reserve: int) -> Room:
        # An empty engine ignores the watermark: whatever can ever fit must fit then.
        margin = self._watermark + reserve if self.running else 0
        seats = self.config.max_num_seqs - self.num_seats_used
        return Room(seats, self.kv.pool.num_free - margin)

    def _try(self, request: Request, reserve: int = 0) -> Admit | Wait:
        is_immune = request.num_preemptions >= self.config.max_preemptions
        return try_admit(request, self.kv, self._room(reserve), is_immune)

    def _admit_waiting(self, draft: PlanDraft, limit: int, now: float) -> None:
        """Fill free seats from the waiting line while tokens are left.

        One that does not fit may be passed over by those behind it, a bounded number of times
        and for a bounded time; then the pass ends at it until it fits.
        """
        passed_over: list[Request] = []
        while draft.num_tokens < limit and self.num_seats_used < self.config.max_num_seqs:
            if len(passed_over) > self.config.max_skips or any(
                self._is_bypassed_enough(request, now) for request in passed_over
            ):
                break
            request = self.waiting.pop()
            if request is None:
                break
            outcome = self._try(request)
            if isinstance(outcome, Wait):
                request.blocked_at = now if request.blocked_at is None else request.blocked_at
                passed_over.append(request)
                continue
            for other in passed_over:
                other.num_bypasses += 1
            self._seat(request, outcome, now)
            draft.add(request, self.kv.tables[request.id], limit)
        for request in passed_over:
            self.waiting.push(request)

    def _is_bypassed_enough(self, request: Request, now: float) -> bool:
        blocked_s = 0.0 if request.blocked_at is None else now - request.blocked_at
        return (
            request.num_bypasses >= self.config.max_bypasses
            or blocked_s >= self.config.max_bypass_s
        )

    def _seat_stronger_claims(self, now: float) -> None:
        """Let waiting requests of strictly stronger rank take the place of running ones, where
        those leaving make them fit."""
        while (request := self.waiting.pop()) is not None:
            weaker = weaker_than(request, self.running, self.waiting.claim)
            # Stronger decodes grow later in this step: they must not need the place just taken.
            reserve = self.kv.num_full(self.running[: -len(weaker)]) if weaker else 0
            outcome = self._try(request, reserve) if weaker else None
            if isinstance(outcome, Wait):
                for victim in choose_victims(outcome, weaker, self.kv, self.config.max_preemptions):
                    self._preempt(victim, request, now)
                outcome = self._try(request, reserve)
            if not isinstance(outcome, Admit):
                self.waiting.push(request)
                return
            self._seat(request, outcome, now)

    def _seat(self, request: Request, admit: Admit, now: float) -> None:
        self.kv.allocate(request, admit.match, admit.num_tokens)
        is_resumed = request.state is RequestState.PREEMPTED
        waited_s = now - request.changed_at
        request.to(RUNNING, now)
        request.num_computed = admit.match.num_tokens
        request.blocked_at = None
        request.num_bypasses = 0
        insort(self.running, request, key=self.waiting.claim)
        self._events.append(
            events.Admitted(
                request.id, now, waited_s, admit.match.num_tokens, request.num_tokens, is_resumed
            )
        )

    # -------------------------------------------------------------- preemption

    def _grow(self, request: Request, table: BlockTable, now: float) -> bool:
        """Blocks for a running request's new tokens, by preempting if it must. False if it has
        to sit this step out, or was itself the one to go."""
        while len(table.block_ids) * self.kv.block_size < len(request.token_ids):
            if self.kv.pool.num_free > 0:
                self.kv.extend(table)
                continue
            victim = choose_victim(request, self.running, self.kv, self.config.max_preemptions)
            if victim is None:
                return False
            self._preempt(victim, request, now)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, by: Request, now: float) -> None:
        """Take seat and blocks from a running request; it keeps its place in line."""
        self._has_preempted = True
        self.running.remove(victim)
        self.kv.free(victim.id)
        self._released_ids.append(victim.id)
        self._events.append(events.Preempted(victim.id, now, by.id, victim.num_computed))
        victim.num_computed = 0
        victim.num_preemptions += 1
        victim.to(RequestState.PREEMPTED, now)
        self.waiting.push(victim)

    # ------------------------------------------------------------------ update

    def update(self, plan: StepPlan, result: StepResult, now: float) -> None:
        """Take in what a step computed."""
        num_left = 0
        block_size = self.kv.block_size
        for item, outcome in zip(plan.scheduled, result.outcomes, strict=True):
            request = self.requests.get(item.request_id)
            if request is None or request.state is not RUNNING:  # aborted while in flight
                continue
            num_tokens = len(item.token_ids)
            if not isinstance(outcome, Failure):
                request.num_computed += num_tokens
                if num_tokens > 1 or request.num_computed % block_size == 0:
                    self.kv.publish(request)
            if (outcome or item.has_sample) and self._take_in(request, outcome, now):
                num_left += 1
        if num_left:
            self.running = [request for request in self.running if request.state is RUNNING]

    def _take_in(self, request: Request, outcome: Sample | Failure | None, now: float) -> bool:
        """Add sampled tokens up to the one that ends the request; True if it has ended."""
        if not isinstance(outcome, Sample):
            message = "the executor sampled nothing" if outcome is None else outcome.message
            self._leave(request, FinishReason.ERROR, now, message)
            return True
        if request.params.n > 1:
            self._fork(request, now)
        token_ids, logprobs = outcome.token_ids, outcome.logprobs
        reason = request.append(token_ids[0])
        if len(token_ids) > 1:
            num_accepted = 1
            while reason is None and num_accepted < len(token_ids):
                reason = request.append(token_ids[num_accepted])
                num_accepted += 1
            token_ids = token_ids[:num_accepted]
            logprobs = logprobs[:num_accepted] if logprobs is not None else None
        self._events.append(events.TokensEmitted(request.id, token_ids, logprobs))
        if reason is not None:
            self._leave(request, reason, now)
        return reason is not None

    def _fork(self, parent: Request, now: float) -> None:
        """The prompt is computed: its other samples begin, sharing the prompt's blocks.

        Each starts at the prompt's last token, so that it samples from logits of its own. One
        for which no block is free joins the waiting line instead, at its parent's place.
        """
        num_samples = parent.params.n
        parent.params = replace(parent.params, n=1)
        for index in range(1, num_samples):
            child = parent.fork(index, now)
            self.requests[child.id] = child
            self._events.append(events.Forked(child.id, now, parent.id))
            if self.kv.pool.num_free == 0:
                self.waiting.push(child)
                continue
            self.kv.fork(parent, child)
            child.to(RUNNING, now)
            insort(self.running, child, key=self.waiting.claim)

    def _leave(self, request: Request, reason: FinishReason, now: float, message: str = "") -> None:
        if request.state is RUNNING:
            self.kv.free(request.id)
            self._released_ids.append(request.id)
        del self.requests[request.id]
        request.finish_reason = reason
        request.to(RequestState.FINISHED, now)
        self._events.append(
            events.Finished(request.id, now, reason, request.num_output_tokens, message)
        )
