"""Bodies that are nearly right. `run_bad_inputs` sends many more of them."""

from __future__ import annotations

from benchmarks.faults.cases import Target
from benchmarks.faults.client import Poster
from benchmarks.faults.mutate import mutants, problems_of_mutant

NUM_BODIES = 1000
SEED = 1


def test_a_mutant_can_be_made_again() -> None:
    first, second = ([*mutants(50, SEED)] for _ in range(2))
    assert first == second
    assert len({mutant.body for mutant in first}) > 45


def test_mutated_bodies_are_answered_properly(target: Target) -> None:
    found, outcomes = [], set()
    with Poster(target) as poster:
        for mutant in mutants(NUM_BODIES, SEED):
            answer = poster.post(mutant.path, mutant.body)
            outcomes.add(answer.outcome)
            found += [(mutant, problem) for problem in problems_of_mutant(answer)]
    assert not found
    assert {200, 400} <= outcomes
