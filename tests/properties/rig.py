"""An engine with its books: every action goes through here, and is checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from headway.clock import VirtualClock
from headway.config import SchedulerConfig
from headway.core import invariants
from headway.core.causes import WaitCause
from headway.core.engine import EngineCore
from headway.core.executor import Capacity
from headway.core.plan import StepPlan
from headway.core.request import Request, RequestState
from headway.core.scheduler import Scheduler
from headway.core.terms import NO_TARGETS, Targets, Terms
from headway.core.waiting.aging import MAX_AGED_PER_STEP
from tests.properties.ledger import Ledger, WatchedExecutor, require
from tests.support.harness import expected_output, make_request


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """Parameters of a request, in small numbers that shrink well."""

    stem: int = 0
    prompt_len: int = 1
    max_tokens: int = 1
    n: int = 1
    priority: int = 0
    tenant: int = 0
    is_spot: bool = False
    stop_at: int = 0
    """The output position, counted from 1, whose token is made a stop token; 0: none."""
    min_tokens: int = 0

    def prompt(self) -> list[int]:
        """Prompts of one stem start alike; odd stems leave stem - 1 after six tokens."""
        return [self.stem - self.stem % 2 if at < 6 else self.stem for at in range(self.prompt_len)]

    def request(self, request_id: str, terms: Terms, now: float) -> Request:
        stop_ids = expected_output(self.prompt(), self.stop_at, seed=self.stem)[-1:]
        return make_request(
            request_id,
            self.prompt(),
            max_tokens=self.max_tokens,
            n=self.n,
            min_tokens=min(self.min_tokens, self.max_tokens),
            stop_token_ids=tuple(stop_ids) if self.stop_at else (),
            priority=self.priority,
            terms=terms,
            seed=self.stem,
            arrived_at=now,
        )


TARGETS = (
    NO_TARGETS,
    NO_TARGETS,
    Targets(tpot_s=0.002),
    Targets(ttft_s=0.5, tpot_s=0.0015),
    Targets(deadline_s=3.0),
)
"""Steps take a millisecond: some of these can be kept."""


def terms_of(
    tenant: int, weight: float = 1.0, max_kv_share: float = 1.0, targets: Targets = NO_TARGETS
) -> Terms:
    """Tenants 0 and 1 share cached prefixes; the others have their own."""
    group = "together" if tenant < 2 else f"tenant-{tenant}"
    return Terms(
        f"tenant-{tenant}",
        weight=weight,
        max_kv_share=max_kv_share,
        cache_group=group,
        targets=targets,
    )


ALIKE = tuple(terms_of(tenant) for tenant in range(4))


class Rig:
    """EngineCore, WatchedExecutor, VirtualClock and Ledger, wired together."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: Capacity,
        enable_prefix_caching: bool,
        terms: tuple[Terms, ...] = ALIKE,
    ) -> None:
        self.capacity = capacity
        self.terms = terms
        self.clock = VirtualClock()
        self.scheduler = Scheduler(config, capacity, enable_prefix_caching)
        self.ledger = Ledger(config.scheduling_policy, self.scheduler.requests.__getitem__)
        self.executor = WatchedExecutor(capacity)
        self.core = self.make_core()
        self.is_in_flight = False
        self.num_steps = 0
        self._num_added = 0

    def make_core(self) -> EngineCore:
        return EngineCore(self.scheduler, self.executor, self.clock, self.ledger)

    def fits(self, spec: RequestSpec) -> bool:
        total = spec.prompt_len + spec.max_tokens
        num_blocks = self.capacity.num_blocks
        share = self.terms[spec.tenant].max_kv_share
        return (
            total <= self.capacity.max_model_len
            and total - 1 <= max(1, int(share * num_blocks)) * self.capacity.block_size
            and spec.n <= self.scheduler.config.max_num_seqs
        )

    def add(self, spec: RequestSpec, request_id: str | None = None) -> str:
        self._num_added += 1
        terms = replace(self.terms[spec.tenant], is_spot=spec.is_spot)
        request = spec.request(request_id or f"r{self._num_added}", terms, self.clock.now())
        num_refused = self.ledger.counts["Refused"]
        self.ledger.offer(request)
        self.core.add(request)
        self.ledger.answered()
        was_refused = self.ledger.counts["Refused"] > num_refused
        has_targets = self.terms[spec.tenant].targets != NO_TARGETS
        is_expected = was_refused != self.fits(spec) or (was_refused and has_targets)
        require(is_expected, f"{spec}: refused is {was_refused}")
        return request.id

    def abort(self, request_id: str) -> None:
        was_live = request_id in self.ledger.live
        require(self.core.abort(request_id) == was_live, f"abort of {request_id}")
        require(request_id not in self.ledger.live, f"{request_id} outlived its abort")

    def begin(self) -> StepPlan | None:
        had_work = self.core.has_work
        old, young = self._waiting_by_age()
        plan = self.core.begin_step()
        self._nobody_overtook(old, young)
        require((plan is not None) == had_work, "work is present and no step runs, or none and one")
        if plan is not None:
            self.is_in_flight = True
            invariants.check_plan(self.scheduler, plan)
        return plan

    def _waiting_by_age(self) -> tuple[list[Request], list[Request]]:
        """Those that have waited too long, and those that have not."""
        old: list[Request] = []
        young: list[Request] = []
        max_wait_s = self.scheduler.config.max_wait_s
        for request in self.scheduler.waiting:
            ages_at = request.state_since + max_wait_s
            if request.start_by < inf:
                ages_at = max(ages_at, request.start_by)
            is_due = self.clock.now() >= ages_at
            (old if request.is_aged or is_due else young).append(request)
        return old, young

    def _nobody_overtook(self, old: list[Request], young: list[Request]) -> None:
        """No young request was admitted while an aged one waited.

        Under fair, of the same tenant and both of them spot or neither; under fcfs, one that came
        later. Nobody waits for an aged request whose tenant is at its KV quota.
        """
        waiting = self.scheduler.waiting
        admitted = [request for request in young if request.state is RequestState.RUNNING]
        policy = self.scheduler.config.scheduling_policy
        is_fair = policy == "fair"
        # Where many are due at once, some age in a later pass.
        late = [request for request in old if not request.is_aged]
        require(not late or len(old) - len(late) >= MAX_AGED_PER_STEP, f"{len(late)} did not age")
        for request in old if admitted else ():
            if request.state is RequestState.RUNNING or not request.is_aged:
                continue
            if waiting.cause_of(request) is WaitCause.KV_QUOTA:
                continue
            for other in admitted:
                if policy == "fcfs" and (other.arrival_order, other.index) < (
                    request.arrival_order,
                    request.index,
                ):
                    continue
                same_rank = other.terms.is_spot == request.terms.is_spot
                is_own = other.terms.tenant == request.terms.tenant and same_rank
                require(is_fair and not is_own, f"{other.id} overtook {request.id}, which is old")

    def end(self) -> None:
        self.is_in_flight = False
        self.core.end_step()
        self.num_steps += 1

    def step(self) -> None:
        if self.begin() is not None:
            self.end()

    def advance(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now() + seconds)

    def check_books(self) -> None:
        """Cheap: the engine's requests are the ledger's."""
        require(self.scheduler.requests.keys() == self.ledger.live.keys(), "the books disagree")
        finished = self.ledger.counts["Finished"]
        require(self.ledger.num_accepted == finished + len(self.ledger.live), "a request is lost")

    def check(self) -> None:
        invariants.check(self.scheduler)
        self.check_books()
        for entry_id, entry in self.ledger.live.items():
            known = self.scheduler.requests[entry_id].token_ids
            require(tuple(known) == (*entry.prompt, *entry.output), f"{entry_id}: tokens differ")

    def drain(self) -> None:
        """Run to the end within a generous bound; then nothing may be left anywhere."""
        if self.is_in_flight:
            self.end()
        live = self.scheduler.requests.values()
        work = sum(request.max_num_tokens * request.params.n for request in live)
        bound = 64 + work * (2 + self.scheduler.config.max_preemptions)
        while self.core.has_work:
            self.step()
            self.check()
            bound -= 1
            require(bound > 0, "the engine does not come to an end")
        invariants.check_drained(self.scheduler)
        # With the plan of one more request the executor releases all the others.
        last = self.add(RequestSpec())
        self.begin()
        require(self.executor.known_ids == {last}, "the executor still holds finished requests")
        slots = self.scheduler.offload.slots
        require(slots.num_free == slots.num_slots, "slots are not free after a plan")
        self.end()
        invariants.check_drained(self.scheduler)
