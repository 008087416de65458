"""Every named bad input against the real server over the fake engine."""

from __future__ import annotations

import pytest

from benchmarks.faults.bad_inputs import corpus
from benchmarks.faults.cases import Case, Target
from benchmarks.faults.exchange import exchange, problems_of

CASES = corpus()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_input_is_answered_rightly(case: Case, target: Target) -> None:
    answer = exchange(case, target)
    assert not problems_of(case, answer)
