"""The bound on the service of tenants that wait without a break, and fair among one tenant."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.plan import StepPlan
from headway.core.terms import Terms
from headway.core.waiting.accounts import BLOCK_S_COST, OUTPUT_COST, PROMPT_COST
from tests.support.harness import Harness, make_request

STEP_S = 0.02


@dataclass(frozen=True, slots=True)
class Habit:
    """What the requests of one tenant are like."""

    weight: float
    max_prompt: int
    max_tokens: int
    max_n: int = 1


class Backlog:
    """Tenants that always have requests waiting, and the service each was given, over time."""

    def __init__(self, habits: list[Habit], seed: int, **config: Any) -> None:
        self.engine = Harness(**config)
        self.habits = habits
        self._rng = random.Random(seed)
        self._num_added = 0
        self._lows = [[0.0] * len(habits) for _ in habits]
        self._highs = [[0.0] * len(habits) for _ in habits]

    def _fill(self) -> None:
        in_line: dict[str, int] = {}
        for request in self.engine.scheduler.waiting:
            in_line[request.terms.tenant] = in_line.get(request.terms.tenant, 0) + 1
        rng = self._rng
        for at, habit in enumerate(self.habits):
            # More than a step could admit, so that nobody is ever without a waiting request.
            for _ in range(12 - in_line.get(str(at), 0)):
                self._num_added += 1
                request = make_request(
                    f"r{self._num_added}",
                    [rng.randrange(1 << 30) for _ in range(rng.randint(1, habit.max_prompt))],
                    max_tokens=rng.randint(1, habit.max_tokens),
                    n=rng.randint(1, habit.max_n),
                    terms=Terms(str(at), weight=habit.weight, cache_group=str(at)),
                    arrived_at=self.engine.clock.now(),
                )
                self.engine.core.add(request)

    def services(self) -> list[float]:
        """Of each tenant, divided by its weight."""
        accounts = self.engine.scheduler.accounts
        found = [accounts.get(str(at)) for at in range(len(self.habits))]
        return [one.served / one.weight for one in found if one is not None]

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._fill()
            self.engine.core.step()
            self.engine.advance(STEP_S)
            services = self.services()
            for a, mine in enumerate(services):
                for b, others in enumerate(services):
                    self._lows[a][b] = min(self._lows[a][b], mine - others)
                    self._highs[a][b] = max(self._highs[a][b], mine - others)

    @property
    def gap(self) -> float:
        """The most by which the services of two tenants differ over any stretch of time."""
        pairs = zip(self._lows, self._highs, strict=True)
        return max(h - low for lows, highs in pairs for low, h in zip(lows, highs, strict=True))

    @property
    def bound(self) -> float:
        """2 max(w_p L, w_q M), and what holding blocks costs while it is put out."""
        longest = max(habit.max_prompt for habit in self.habits)
        capacity = self.engine.capacity
        # More than fits at once: blocks that one gives up, others of its tenant grow into.
        ends = [habit.max_prompt + habit.max_tokens for habit in self.habits]
        most = self.engine.scheduler.config.max_num_seqs * max(ends)
        run_s = STEP_S * max(ends)
        held = BLOCK_S_COST * capacity.num_blocks * run_s
        least_weight = min(habit.weight for habit in self.habits)
        return 2 * (max(PROMPT_COST * longest, OUTPUT_COST * most) + held) / least_weight


HABITS = st.lists(
    st.builds(
        Habit,
        weight=st.sampled_from([0.5, 1.0, 1.0, 4.0]),
        max_prompt=st.sampled_from([2, 8, 30]),
        max_tokens=st.sampled_from([1, 6, 30]),
        max_n=st.sampled_from([1, 1, 4]),
    ),
    min_size=2,
    max_size=5,
)
ENGINES: dict[str, dict[str, Any]] = {
    "roomy": {"num_blocks": 64, "max_num_seqs": 6, "max_wait_s": 0.0},
    "tight": {"num_blocks": 24, "max_num_seqs": 8, "max_wait_s": 0.0},
}


@pytest.mark.parametrize("kind", ENGINES)
@settings(max_examples=8, deadline=None)
@given(habits=HABITS, seed=st.integers(0, 1000))
def test_the_service_of_tenants_that_always_wait_differs_by_less_than_the_bound(
    kind: str, habits: list[Habit], seed: int
):
    backlog = Backlog(habits, seed, **ENGINES[kind], scheduling_policy="fair")
    backlog.run(300)
    assert backlog.gap <= backlog.bound


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_under_fcfs_the_same_load_leaves_the_bound(policy: str):
    habits = [Habit(1.0, 2, 2), Habit(1.0, 30, 30, max_n=4)]
    config = {"num_blocks": 24, "max_num_seqs": 8, "max_wait_s": 0.0}
    backlog = Backlog(habits, 1, **config, scheduling_policy=policy)
    backlog.run(1500)
    assert (backlog.gap <= backlog.bound) == (policy == "fair")


def plans(policy: str, seed: int) -> list[StepPlan]:
    """A crowded engine with one tenant, priorities all alike, arrivals, aborts and forks."""
    rng = random.Random(seed)
    engine = Harness(
        num_blocks=rng.randint(8, 30),
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.randint(4, 24),
        max_wait_s=rng.choice([0.05, 0.5, 1000.0]),
        scheduling_policy=policy,
    )
    made: list[StepPlan] = []
    for at in range(200):
        if rng.random() < 0.5:
            length, n = rng.randint(1, 16), rng.choice([1, 1, 2])
            engine.add(f"r{at}", length, max_tokens=rng.randint(1, 12), n=n)
        if rng.random() < 0.05 and engine.scheduler.requests:
            engine.abort(rng.choice(sorted(engine.scheduler.requests)))
        plan = engine.begin()
        if plan is not None:
            made.append(plan)
            engine.end()
        engine.advance(STEP_S)
    return made


@pytest.mark.parametrize("seed", range(8))
def test_with_one_tenant_and_no_priorities_fair_is_fcfs_to_the_last_plan(seed: int):
    assert plans("fair", seed) == plans("fcfs", seed)
