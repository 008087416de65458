"""A state machine that does to the engine core whatever a server could, in any order."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway.config import SchedulerConfig
from headway.core.executor import Capacity
from headway.core.terms import Terms
from tests.properties.rig import TARGETS, RequestSpec, Rig, terms_of

SPECS = st.builds(
    RequestSpec,
    stem=st.integers(0, 3),
    prompt_len=st.integers(1, 20),
    max_tokens=st.integers(1, 12),
    n=st.integers(1, 3),
    priority=st.integers(-1, 2),
    tenant=st.integers(0, 3),
    is_spot=st.sampled_from([False, False, True]),
    stop_at=st.integers(0, 6),
    min_tokens=st.integers(0, 3),
)
CAPACITIES = st.builds(
    Capacity,
    num_blocks=st.integers(4, 24),
    block_size=st.integers(1, 5),
    max_model_len=st.integers(16, 40),
    num_slots=st.sampled_from([0, 1, 3, 24]),
    block_copy_s=st.sampled_from([0.0, 0.0003, 1.0]),
)


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    """Tiny budgets, so that every limit is met within a few steps."""
    floor = draw(st.integers(1, 4))
    return SchedulerConfig(
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(floor + 1, 16)),
        scheduling_policy=draw(st.sampled_from(["fair", "fair", "fcfs", "priority", "deadline"])),
        prefill_floor=floor,
        prefill_cap=draw(st.none() | st.integers(floor, 8)),
        kv_watermark=draw(st.sampled_from([0.0, 0.1, 0.4])),
        max_preemptions=draw(st.integers(1, 3)),
        preemption_method=draw(st.sampled_from(["auto", "trim", "checkpoint", "recompute"])),
        max_wait_s=draw(st.sampled_from([0.0, 1.0, 100.0])),
    )


@st.composite
def all_terms(draw: st.DrawFn) -> tuple[Terms, ...]:
    """One for each tenant; some may hold only part of the blocks."""
    weights, shares = st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.3, 0.6, 1.0, 1.0])
    targets = st.sampled_from(TARGETS)
    return tuple(
        terms_of(tenant, draw(weights), draw(shares), draw(targets)) for tenant in range(4)
    )


class EngineMachine(RuleBasedStateMachine):
    """Adds, aborts, steps, half steps, failures and leaps in time."""

    rig: Rig

    @initialize(config=configs(), capacity=CAPACITIES, caching=st.booleans(), terms=all_terms())
    def build(
        self,
        config: SchedulerConfig,
        capacity: Capacity,
        caching: bool,
        terms: tuple[Terms, ...],
    ) -> None:
        self.rig = Rig(config, capacity, caching, terms)
        self.ids = ["never-seen"]

    def _remember(self, request_id: str, n: int) -> None:
        self.ids.append(request_id)
        self.ids.extend(f"{request_id}#{index}" for index in range(1, n))

    @rule(spec=SPECS)
    def add(self, spec: RequestSpec) -> None:
        self._remember(self.rig.add(spec), spec.n)

    @rule(spec=SPECS, pick=st.integers(0, 1000))
    def add_under_a_used_id(self, spec: RequestSpec, pick: int) -> None:
        request_id = self.ids[pick % len(self.ids)].partition("#")[0]
        names = {request_id, *(f"{request_id}#{index}" for index in range(1, spec.n))}
        if not names & self.rig.ledger.live.keys():
            self._remember(self.rig.add(spec, request_id), spec.n)

    @rule(extra=st.integers(1, 5))
    def add_one_that_never_fits(self, extra: int) -> None:
        capacity = self.rig.capacity
        room = min(capacity.max_model_len, capacity.num_blocks * capacity.block_size + 1)
        self.rig.add(RequestSpec(prompt_len=room, max_tokens=extra))
        self.rig.add(RequestSpec(n=self.rig.scheduler.config.max_num_seqs + extra))

    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        self.rig.abort(self.ids[pick % len(self.ids)])

    @rule(pick=st.integers(0, 1000))
    def abort_a_live_one(self, pick: int) -> None:
        live = sorted(self.rig.ledger.live)
        if live:
            self.rig.abort(live[pick % len(live)])

    @rule(pick=st.integers(0, 1000))
    def fail_a_live_one(self, pick: int) -> None:
        live = sorted(self.rig.ledger.live)
        if live:
            self.rig.executor.fail_next(live[pick % len(live)])

    @precondition(lambda self: not self.rig.is_in_flight)
    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()
            self.rig.check()

    @precondition(lambda self: not self.rig.is_in_flight)
    @rule()
    def begin_step(self) -> None:
        self.rig.begin()

    @precondition(lambda self: self.rig.is_in_flight)
    @rule()
    def end_step(self) -> None:
        self.rig.end()

    @rule(seconds=st.sampled_from([0.001, 0.5, 5.0, 1000.0]))
    def advance(self, seconds: float) -> None:
        self.rig.advance(seconds)

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.drain()
