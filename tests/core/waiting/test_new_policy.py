"""A policy of somebody's own takes one short file, and has ageing and causes at once."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.core.causes import WaitCause
from headway.core.events import Admitted
from headway.core.waiting.policies import POLICIES
from tests.support.harness import Harness

EXAMPLE = Path(__file__).parents[3] / "examples" / "shortest_prompt_first.py"


@pytest.fixture
def policy() -> Iterator[None]:
    """The example, run as it stands; it makes itself known under a name."""
    before = dict(POLICIES)
    runpy.run_path(str(EXAMPLE))
    yield
    POLICIES.clear()
    POLICIES.update(before)


def test_it_has_at_most_40_lines():
    assert len(EXAMPLE.read_text().splitlines()) <= 40


def test_the_example_seats_the_long_one_last_but_within_its_bound(
    capsys: pytest.CaptureFixture[str], policy: None
):
    order = capsys.readouterr().out.split()
    assert order[:2] == ["short-0", "short-2"], "a short one that came later went first"
    assert "long" in order


def test_the_shortest_prompt_goes_first(policy: None):
    engine = Harness(max_num_seqs=1, scheduling_policy="shortest")
    engine.add("first", 4, max_tokens=3)
    engine.step()
    for request_id, length in (("long", 20), ("short", 2), ("middle", 9)):
        engine.add(request_id, length, max_tokens=2)
    engine.run()
    order = [event.request_id for event in engine.seen(Admitted)]
    assert order == ["first", "short", "middle", "long"]


def test_a_long_one_waits_no_longer_than_the_bound(policy: None):
    engine = Harness(max_num_seqs=1, scheduling_policy="shortest", max_wait_s=2.0)
    engine.add("first", 4, max_tokens=3)
    engine.add("long", 20, max_tokens=1)
    for at in range(60):
        engine.add(f"s{at}", 2, max_tokens=3)
        engine.step()
        engine.advance(0.1)
    (event,) = engine.seen(Admitted, "long")
    assert 2.0 <= event.waited_s < 2.5
    assert dict(event.causes) == {WaitCause.RUNNING_LIMIT: pytest.approx(event.waited_s)}
