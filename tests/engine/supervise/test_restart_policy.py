"""When an engine is taken for hung, how often it is replaced, and what is read of its last step."""

from __future__ import annotations

from math import inf, nan

import msgspec
import pytest

from headway.clock import VirtualClock
from headway.core.executor import Capacity
from headway.core.params import SamplingParams
from headway.core.plan import NewRequest, ScheduledRequest, StepPlan
from headway.engine.process.journal import (
    JournaledExecutor,
    StepJournal,
    journal_path,
    read_journal,
)
from headway.engine.process.messages import AddRequest, QuarantinedDigest
from headway.engine.supervise.quarantine import MAX_QUARANTINED, QUARANTINE_S, Quarantine
from headway.engine.supervise.restart_policy import HangDetector, RestartBudget, RestartLimits
from headway.errors import QuarantinedError
from headway.executors.fake import FakeExecutor


def advance(
    detector: HangDetector, start: float, end: float, has_work: bool = True, cpus: float = 0.0
) -> None:
    for tick in range(int(start * 5), int(end * 5) + 1):
        detector.advance(tick / 5, has_work, cpus * tick / 5)


def test_work_and_no_step_for_ten_seconds_is_a_hang() -> None:
    detector = HangDetector(0.0)
    advance(detector, 0, 9)
    assert not detector.is_hung
    advance(detector, 9, 10.5)
    assert detector.is_hung
    detector.record_step(0.1)
    assert not detector.is_hung


def test_an_idle_engine_is_not_hung() -> None:
    detector = HangDetector(0.0)
    advance(detector, 0, 100, has_work=False)
    assert not detector.is_hung
    advance(detector, 100, 105)
    assert not detector.is_hung


def test_slow_steps_are_given_twenty_times_their_usual_time() -> None:
    detector = HangDetector(0.0)
    for _ in range(200):
        detector.record_step(3.0)
    assert detector.limit_s == pytest.approx(60.0)
    advance(detector, 0, 59)
    assert not detector.is_hung
    advance(detector, 59, 61)
    assert detector.is_hung


@pytest.mark.parametrize("cpus", [0.1, 2.0])
def test_an_engine_that_computes_is_given_ten_times_as_long(cpus: float) -> None:
    """A long step, or a CPU that other processes use as well, is no hang."""
    detector = HangDetector(0.0)
    advance(detector, 0, 99, cpus=cpus)
    assert not detector.is_hung
    advance(detector, 99, 102, cpus=cpus)
    assert detector.is_hung


def test_an_engine_that_stops_computing_is_hung_ten_seconds_later() -> None:
    detector = HangDetector(0.0)
    advance(detector, 0, 30, cpus=1.0)
    for tick in range(30):
        detector.advance(30.2 + tick / 5, True, 30.0)
    assert not detector.is_hung
    for tick in range(10):
        detector.advance(36.2 + tick / 5, True, 30.0)
    assert detector.is_hung


def test_time_without_a_reading_does_not_count_as_a_stall() -> None:
    detector = HangDetector(0.0)
    detector.advance(500.0, True, 0.0)  # this process was stopped, not the engine
    assert not detector.is_hung


def test_restarts_are_counted_within_a_window() -> None:
    budget = RestartBudget(RestartLimits(max_restarts=2, window_s=10.0))
    assert [budget.spend(at) for at in (0.0, 1.0, 2.0)] == [True, True, False]
    assert budget.spend(10.5)
    assert not budget.spend(10.6)
    assert not RestartBudget(RestartLimits(max_restarts=0)).spend(0.0)


def plan(step_id: int, *ids: str) -> StepPlan:
    new = NewRequest(SamplingParams(), 1, 0, (1, 2), 2)
    items = tuple(
        ScheduledRequest(one, 0, (1, 2), (place,), True, new) for place, one in enumerate(ids)
    )
    return StepPlan(step_id, items, num_tokens=2 * len(ids))


def test_the_journal_names_those_in_the_step(tmp_path) -> None:
    path = journal_path(f"ipc://{tmp_path}/engine")
    assert read_journal(path) == frozenset()
    journal = StepJournal(path)
    executor = JournaledExecutor(FakeExecutor(Capacity(8, 4, 32)), journal)
    assert executor.capacity().num_blocks == 8
    ticket = executor.submit(plan(1, "a", "b", "c"))
    assert read_journal(path) == {"a", "b", "c"}
    executor.collect(ticket)
    # The result is still to be taken in and reported.
    assert read_journal(path) == {"a", "b", "c"}
    journal.end()
    assert read_journal(path) == frozenset()
    executor.submit(plan(2, "d"))  # shorter than the one before
    assert read_journal(path) == {"d"}
    executor.close()


TORN = b"\0\0\0\x05\x91\xa3\xff\xff\xff"
"""A list of one string that is not text."""


def test_an_unreadable_journal_names_no_request(tmp_path) -> None:
    path = tmp_path / "journal"
    for content in (b"", b"\0\0", b"\0\0\0\x05\xc1\xc1\xc1\xc1\xc1", b"\xff\xff\xff\xff", TORN):
        path.write_bytes(content)
        assert read_journal(path) == frozenset()


def command(token_id: int, seed: int = 0) -> AddRequest:
    return AddRequest("x", [token_id], SamplingParams(), seed, 0.0)


def test_the_quarantine_knows_a_request_by_what_it_asks() -> None:
    clock = VirtualClock()
    quarantine = Quarantine(clock)
    quarantine.check(command(1))
    quarantine.add(command(1))
    with pytest.raises(QuarantinedError):
        quarantine.check(command(1, seed=5))
    quarantine.check(command(2))
    for token_id in range(100, 100 + MAX_QUARANTINED):
        quarantine.add(command(token_id))
    quarantine.check(command(1))  # forgotten: memory is bounded
    with pytest.raises(QuarantinedError):
        quarantine.check(command(100))
    clock.advance_to(QUARANTINE_S)
    quarantine.check(command(100))
    assert not quarantine.entries


def test_a_quarantine_is_passed_on_once_and_checked() -> None:
    clock = VirtualClock()
    first, second = Quarantine(clock), Quarantine(clock)
    first.add(command(1))
    clock.advance_to(5.0)
    assert second.learn(first.entries) == first.entries
    assert [one.left_s for one in second.entries] == [QUARANTINE_S - 5.0]
    assert not second.learn(first.entries), "what is known is not passed on again"
    with pytest.raises(QuarantinedError):
        second.check(command(1))
    digest = bytes(32)
    wrong = [(digest[1:], 9.0), (digest, 0.0), (digest, -1.0), (digest, nan), (digest, inf)]
    assert not second.learn([QuarantinedDigest(*one) for one in wrong])
    (kept,) = second.learn([QuarantinedDigest(digest, 1e9)])
    assert second.entries[-1].left_s == QUARANTINE_S and kept.digest == digest


def test_a_continued_request_survives_the_wire() -> None:
    one = AddRequest("x#1", [1, 2, 3], SamplingParams(), 7, 1.5, index=1, num_prompt_tokens=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=AddRequest) == one


def test_after_a_hang_the_first_steps_get_twice_the_time() -> None:
    detector = HangDetector(0.0, after_hang=True)
    advance(detector, 0, 19)
    assert not detector.is_hung
    advance(detector, 19, 21)
    assert detector.is_hung
    for _ in range(8):
        assert detector.limit_s == 20.0
        detector.record_step(0.05)
    assert detector.limit_s == 10.0
