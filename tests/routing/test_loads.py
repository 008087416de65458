"""Engines in order of their load."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from headway.core.slo.steptime import StepCost
from headway.core.waiting.accounts import Accounts
from headway.routing.engines import EngineLimits, RoutedEngine
from headway.routing.loads import EnginesByLoad

NUM_ENGINES = 6
LIMITS = EngineLimits(num_blocks=100, block_size=16, max_num_seqs=8)
CHANGES = st.lists(
    st.tuples(
        st.integers(0, NUM_ENGINES - 1),
        st.sampled_from([None, 0.0, 1.0, 1.5, 2.0]),
        st.booleans(),
    ),
    max_size=40,
)
"""Engine, its new load or None if it leaves, and whether the order is asked for."""


@given(CHANGES)
def test_engines_are_in_order_of_load_then_number(
    changes: Sequence[tuple[int, float | None, bool]],
):
    found = EnginesByLoad()
    engines = {
        number: RoutedEngine(number, str(number), LIMITS, StepCost(), Accounts(), found.change)
        for number in range(NUM_ENGINES)
    }
    for number, load_s, is_asked in changes:
        if load_s is None:
            if number in engines:
                found.remove(engines.pop(number))
        else:
            engine = engines.get(number)
            if engine is None:  # another engine with the number of one that left
                engine = engines[number] = RoutedEngine(
                    number, str(number), LIMITS, StepCost(), Accounts(), found.change
                )
            engine._is_stale, engine._load_s = False, load_s
            found.change(engine)
        if is_asked:
            expected = sorted(engines.values(), key=lambda one: (one.load_s, one.number))
            assert list(found) == expected
