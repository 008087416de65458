"""The three modes on one executor: the same tokens, and padding counted as it is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.bench.offline.modes import MODES, Bench, run_rounds, same_tokens, summarize
from headway.bench.offline.report import as_json, as_table, compare, draw, steal_line
from headway.bench.offline.static import StaticBatcher
from headway.bench.options import GREEDY
from headway.bench.steal import Steal
from headway.clock import SystemClock
from headway.config import SchedulerConfig
from headway.core.executor import Capacity, Ticket
from headway.core.plan import StepPlan
from headway.errors import ConfigError
from headway.executors.fake import FakeExecutor
from headway.workload import OfflineWorkload, WorkItem

CAPACITY = Capacity(num_blocks=64, block_size=4, max_model_len=64)
WORK = OfflineWorkload(
    "tiny",
    tuple(
        WorkItem(tuple(range(100 * number, 100 * number + length)), num_output)
        for number, (length, num_output) in enumerate([(3, 9), (8, 2), (5, 5), (1, 1), (7, 3)])
    ),
)


class Recording(FakeExecutor):
    """Keeps every plan it ran."""

    def __init__(self) -> None:
        super().__init__(CAPACITY)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> Ticket:
        self.plans.append(plan)
        return super().submit(plan)


def num_rows(plan: StepPlan) -> int:
    return sum(item.has_sample for item in plan.scheduled)


def make_bench(executor: FakeExecutor | None = None) -> Bench:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, prefill_floor=4)
    return Bench(executor or Recording(), config, SystemClock(), enable_prefix_caching=False)


def test_every_mode_makes_the_same_tokens():
    runs = [MODES[mode](make_bench(), WORK) for mode in MODES]
    assert same_tokens(runs) == 1.0
    for run in runs:
        lengths = [len(request.token_ids) for request in run.requests]
        assert lengths == [item.num_output_tokens for item in WORK.items]


def test_different_tokens_are_noticed():
    runs = [MODES["continuous"](make_bench(), WORK) for _ in range(2)]
    runs[1].requests[0].token_ids[0] += 1
    assert same_tokens(runs) == 0.8


def test_static_padding_is_really_computed():
    executor = Recording()
    run = make_bench(executor).run_static(WORK)
    # Batches of (3, 8), (5, 1) and (7) tokens, padded to their longest prompt; and decodes until
    # the longest output, whose rows are computed although their request has finished.
    padding = (8 - 3) + (5 - 1)
    finished = (9 - 2) + (5 - 1)
    assert sum(step.num_padding for step in run.steps) == padding + finished
    computed = sum(len(item.token_ids) for plan in executor.plans for item in plan.scheduled)
    assert computed == sum(step.num_tokens for step in run.steps)
    useful = WORK.num_prompt_tokens + WORK.num_output_tokens - len(WORK.items)
    assert computed == useful + padding + finished
    silent = [item for plan in executor.plans for item in plan.scheduled if not item.has_sample]
    assert sum(len(item.token_ids) for item in silent) == padding


def test_rows_and_their_padding_share_no_block():
    executor = Recording()
    make_bench(executor).run_static(WORK)
    for plan in executor.plans:
        taken = [block for item in plan.scheduled for block in item.block_ids]
        assert len(set(taken)) == len(taken)
    known = {item.request_id for plan in executor.plans for item in plan.scheduled if item.new}
    released = {request_id for plan in executor.plans for request_id in plan.released_ids}
    assert known - released == {"static-4"}  # of the last batch, which needs no padding


def test_continuous_computes_no_padding():
    executor = Recording()
    run = make_bench(executor).run_continuous(WORK)
    assert run.padding_waste == 0.0
    computed = sum(len(item.token_ids) for plan in executor.plans for item in plan.scheduled)
    assert computed == WORK.num_prompt_tokens + WORK.num_output_tokens - len(WORK.items)


def test_a_static_batch_ends_together():
    run = make_bench().run_static(WORK)
    ends = [request.finished_at for request in run.requests]
    assert ends[0] == ends[1]
    assert ends[2] == ends[3]
    assert ends[1] != ends[2]


def test_a_dynamic_batch_starts_without_those_still_to_come():
    late = replace(WORK.items[1], at=0.3)
    executor = Recording()
    StaticBatcher(executor, SystemClock(), 2, window_s=0.05).run([WORK.items[0], late])
    assert num_rows(executor.plans[0]) == 1
    executor = Recording()
    StaticBatcher(executor, SystemClock(), 2).run([WORK.items[0], late])
    assert num_rows(executor.plans[0]) == 2


def test_a_static_batch_larger_than_the_cache_is_refused():
    with pytest.raises(ConfigError, match="kv-cache-memory-bytes"):
        StaticBatcher(Recording(), SystemClock(), 64).run([WORK.items[0]] * 64)


def test_the_report(tmp_path):
    calls: list[tuple[int, int]] = []
    modes = list(MODES)
    runs = run_rounds(make_bench(), WORK, modes, 2, lambda *call: calls.append(call))
    assert calls == [(done, 7) for done in range(7)]
    results = [summarize(mode, runs[mode]) for mode in modes]
    assert as_table(WORK, GREEDY, results).row_count > 5
    assert len(compare(results)) == 2
    assert b'"continuous"' in as_json(WORK, results, {"rounds": 2})
    assert steal_line(results).startswith("steal ")
    marked = replace(results[0], steal=(Steal.of(0.051), None))
    assert steal_line([marked]) == "steal 5.1 %: repeat it"
    assert b'"is_high": true' in as_json(WORK, [marked], {})
    draw(tmp_path / "modes.png", WORK, results)
    assert (tmp_path / "modes.png").read_bytes().startswith(b"\x89PNG")
