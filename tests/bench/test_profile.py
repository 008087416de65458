from __future__ import annotations

import pytest

from headway.bench.offline.modes import Bench
from headway.bench.offline.profile import OUTSIDE, profile_table, run_profile
from headway.clock import SystemClock
from headway.config import SchedulerConfig
from headway.core.executor import Capacity
from headway.executors.executor import MODEL, PREPARE, ModelExecutor
from headway.executors.fake import FakeExecutor
from headway.executors.torch.eager import EagerModel, load_decoder
from headway.workload import OfflineWorkload, WorkItem
from tests.support.tiny import MemoryCheckpoint, tiny_spec, tiny_weights

WORK = OfflineWorkload("small", tuple(WorkItem((3, 14, 15), count) for count in (2, 5, 9)))


def make_bench() -> Bench:
    spec = tiny_spec()
    decoder = load_decoder(MemoryCheckpoint(spec, tiny_weights(spec)), "fp32")
    executor = ModelExecutor(EagerModel(decoder, 40, 4), 64, SystemClock())
    return Bench(executor, SchedulerConfig(), SystemClock(), False)


def test_the_parts_add_up_to_the_wall_time():
    profile = run_profile(make_bench(), WORK)
    assert profile.num_steps == 9
    assert sum(profile.seconds.values()) == pytest.approx(profile.elapsed_s)
    assert {PREPARE, MODEL, OUTSIDE} <= set(profile.seconds)
    assert all(seconds > 0 for seconds in profile.seconds.values())
    # Computing is most of it, even on a model this small.
    assert profile.seconds[MODEL] == max(profile.seconds.values())


def test_what_was_spent_before_does_not_count():
    bench = make_bench()
    run_profile(bench, WORK)
    bench.run_continuous(WORK)
    again = run_profile(bench, WORK)
    assert sum(again.seconds.values()) == pytest.approx(again.elapsed_s)


def test_every_part_is_a_row_of_the_table():
    profile = run_profile(make_bench(), WORK)
    assert profile_table(profile).row_count == len(profile.seconds) + 1


def test_an_executor_that_cannot_tell_is_refused():
    bench = Bench(FakeExecutor(Capacity(8, 4, 32)), SchedulerConfig(), SystemClock(), False)
    with pytest.raises(TypeError, match="has no profile"):
        run_profile(bench, WORK)
