"""The slice of benchmarks.sim.preemption that every run affords."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.sim.preemption import (
    CHAT,
    METHODS,
    SCENARIOS,
    Scenario,
    failures_in,
    row_of,
    simulate,
)

SMALL = [replace(scenario, max_num_seqs=16) for scenario in (CHAT, *SCENARIOS)]
NUM_IN_CI = 2
CASES = [
    pytest.param(scenario, id=scenario.name, marks=[pytest.mark.full] if at >= NUM_IN_CI else [])
    for at, scenario in enumerate(SMALL)
]


@pytest.mark.parametrize("scenario", CASES)
def test_every_method_ends_exactly_and_the_cheapest_computes_little_again(scenario: Scenario):
    items = scenario.items(80)
    without_priorities = replace(scenario, has_priorities=False)
    expected = simulate(without_priorities, items, "recompute", is_ample=True)
    rows = []
    for method in METHODS:
        outcome = simulate(scenario, items, method, is_ample=False)
        rows.append(row_of(scenario, method, scenario.capacity(items), outcome, expected))
        assert rows[-1].num_preemptions > 0
        assert rows[-1].num_requests == 80
    # So few requests end a little sooner or later by the order of things alone.
    assert not failures_in(rows, noise=0.05)
