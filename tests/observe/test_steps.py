"""The ring of steps: what it keeps, and what it says about what it lost."""

from __future__ import annotations

from headway.observe.requests import steps
from headway.observe.requests.steps import OTHER, RecentSteps
from headway.observe.trace.export import TraceStep
from tests.observe.test_metrics import step


def read(ring: RecentSteps, at: float) -> tuple[list[tuple[str, TraceStep]], bool]:
    found, is_complete = ring.since(at, 1000.0)
    return list(found), is_complete


def test_a_step_is_kept_as_it_was() -> None:
    ring = RecentSteps(4)
    ring.record("local", [step(5.0, step_id=7, elapsed_s=0.25, predicted_s=0.5, num_waiting=3)])
    assert read(ring, 0.0) == ([("local", TraceStep(7, 1005.0, 0.25, 0.5, 1, 16, 1, 3, 2))], True)


def test_the_oldest_make_room_and_that_is_said() -> None:
    ring = RecentSteps(4)
    for number in range(1, 7):
        ring.record("a" if number % 2 else "b", [step(float(number), step_id=number)])
    assert len(ring) == 4
    found, is_complete = read(ring, 0.0)
    assert [(engine, one.step_id) for engine, one in found] == [
        ("a", 3),
        ("b", 4),
        ("a", 5),
        ("b", 6),
    ]
    assert not is_complete
    found, is_complete = read(ring, 5.0)
    assert [one.step_id for _, one in found] == [5, 6]
    assert is_complete


def test_a_reader_gets_the_steps_of_when_it_came() -> None:
    ring = RecentSteps(2)
    ring.record("a", [step(1.0, step_id=1), step(2.0, step_id=2)])
    found, _ = ring.since(0.0, 0.0)
    ring.record("a", [step(3.0, step_id=3), step(4.0, step_id=4)])
    assert [one.step_id for _, one in found] == [1, 2]


def test_names_of_engines_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(steps, "MAX_ENGINES", 2)
    ring = RecentSteps(8)
    for name in ("a", "b", "c", "d", "a"):
        ring.record(name, [step(1.0)])
    assert [engine for engine, _ in read(ring, 0.0)[0]] == ["a", "b", OTHER, OTHER, "a"]
