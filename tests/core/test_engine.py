"""EngineCore: whole steps, half steps, and saying so when nothing moves."""

from __future__ import annotations

import pytest

from headway.core.engine import MAX_IDLE_STEPS
from headway.core.events import Admitted, Stepped
from headway.core.executor import Capacity
from headway.core.request import FinishReason, Request
from headway.core.waiting.keyed import KeyedQueue
from headway.core.waiting.policies import fcfs
from headway.errors import EngineError, EngineStalledError
from headway.executors.fake import FakeExecutor
from tests.support.harness import Harness


class StuckQueue(KeyedQueue):
    """A waiting line that never lets anyone go."""

    def __init__(self) -> None:
        super().__init__(fcfs)

    def pop(self) -> Request | None:
        return None


def stuck_engine() -> Harness:
    engine = Harness()
    engine.scheduler.waiting._queue = StuckQueue()
    return engine


def test_an_idle_step_says_there_was_nothing_to_do():
    engine = Harness()
    assert not engine.core.has_work
    assert engine.core.step() is False
    assert engine.events == []


def test_a_whole_step_says_that_there_was_something_to_do():
    engine = Harness()
    engine.add("a", 4, max_tokens=1)
    assert engine.core.step() is True
    assert engine.core.step() is False


def test_a_caller_that_saw_a_stop_string_ends_a_request_with_stop():
    engine = Harness()
    engine.add("a", 4)
    engine.step()
    assert engine.core.abort("a", FinishReason.STOP)
    assert engine.finish("a").reason is FinishReason.STOP
    engine.run()


def test_an_idle_engine_is_not_a_stalled_one():
    engine = Harness()
    for _ in range(3 * MAX_IDLE_STEPS):
        assert engine.core.step() is False


def test_work_without_progress_is_said_aloud():
    engine = stuck_engine()
    engine.add("a")
    for _ in range(MAX_IDLE_STEPS):
        assert engine.core.step() is False
    with pytest.raises(EngineStalledError, match="0 running and 1 waiting") as stall:
        engine.core.step()
    assert isinstance(stall.value, EngineError)


def test_progress_starts_the_count_of_idle_steps_anew():
    engine = stuck_engine()
    engine.add("a")
    for _ in range(MAX_IDLE_STEPS):
        engine.core.step()
    engine.abort("a")
    engine.core.step()
    engine.add("b")
    for _ in range(MAX_IDLE_STEPS):
        assert engine.core.step() is False


def test_only_one_step_is_in_flight():
    engine = Harness()
    engine.add("a")
    engine.begin()
    with pytest.raises(RuntimeError, match="already in flight"):
        engine.core.begin_step()
    engine.end()
    with pytest.raises(RuntimeError, match="no step is in flight"):
        engine.core.end_step()


def test_a_request_added_while_a_step_is_in_flight_joins_the_next():
    engine = Harness()
    engine.add("a")
    engine.begin()
    engine.add("b")
    engine.end()
    assert list(engine.step()) == ["a", "b"]


def test_everything_may_be_aborted_while_a_step_is_in_flight():
    engine = Harness()
    engine.add("a")
    engine.begin()
    engine.abort("a")
    assert not engine.core.has_work
    engine.end()
    assert engine.output("a") == []
    engine.run()


def test_events_carry_the_times_of_both_halves_of_a_step():
    engine = Harness()
    engine.add("a", 4, max_tokens=1)
    engine.advance(1.0)
    engine.begin()
    engine.advance(0.5)
    engine.end()
    assert engine.seen(Admitted)[0].at == 1.0
    assert engine.finish("a").at == 1.5


def test_a_step_reports_the_state_after_it():
    engine = Harness(num_blocks=16, block_size=4, max_num_batched_tokens=10, max_num_seqs=2)
    for request_id in "abc":
        engine.add(request_id, 4)
    engine.step()
    (stepped,) = engine.seen(Stepped)
    assert (stepped.num_tokens, stepped.token_budget) == (8, 10)
    assert (stepped.num_running, stepped.num_waiting, stepped.num_scheduled) == (2, 1, 2)
    assert (stepped.num_blocks_used, stepped.num_blocks, stepped.max_num_seqs) == (2, 16, 2)
    assert stepped.elapsed_s == 0.001


def test_closing_closes_the_executor():
    class Closing(FakeExecutor):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    executor = Closing(Capacity(4, 4, 16))
    Harness(executor=executor).core.close()
    assert executor.is_closed
