"""A request makes the same tokens however it is batched, chunked, preempted, cached or forked.

On a tiny model with random weights; with --full also on the real SmolLM2, in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from benchmarks.support.parity_runs import Schedule, preempt_all, run, run_one_by_one
from headway.config import SchedulerConfig
from headway.core.params import SamplingParams
from headway.executors.load import ModelExecutor
from headway.executors.torch.model import Decoder
from tests.support.parity_workloads import (
    BATCHED,
    Workload,
    check_equal,
    make_executor,
    smollm2_decoder,
    smollm2_workload,
    tiny_decoder,
    tiny_workload,
)

PREEMPTED = replace(BATCHED, scheduling_policy="priority", max_num_seqs=16, max_wait_s=1e6)


@dataclass(frozen=True)
class Subject:
    decoder: Decoder
    executor: ModelExecutor
    workload: Workload


@pytest.fixture(
    scope="module",
    params=["tiny", pytest.param("smollm2", marks=[pytest.mark.full, pytest.mark.model])],
)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    if request.param == "tiny":
        decoder = tiny_decoder()
        executor = make_executor(decoder)
        workload = tiny_workload(executor)
    else:
        model_path = request.getfixturevalue("model_path")
        decoder = smollm2_decoder(model_path)
        executor = make_executor(decoder)
        workload = smollm2_workload(executor, model_path, num_prompts=64)
    yield Subject(decoder, executor, workload)
    executor.close()


def test_the_tokens_are_not_all_the_same(subject: Subject) -> None:
    """Else the tests below would say nothing."""
    assert all(len(set(made)) > 4 for made in subject.workload.expected)
    assert len({tuple(made) for made in subject.workload.expected}) > 10


def test_batched_with_31_others(subject: Subject) -> None:
    workload = subject.workload
    schedule = Schedule(BATCHED)
    check_equal(run(subject.executor, schedule, workload.prompts, workload.params), workload)


def test_prefill_in_chunks_of_16(subject: Subject) -> None:
    workload = subject.workload
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=32, prefill_floor=16)
    schedule = Schedule(replace(config, prefill_cap=16))
    check_equal(run(subject.executor, schedule, workload.prompts, workload.params), workload)


def test_preempted_and_resumed(subject: Subject) -> None:
    workload = subject.workload
    for first in range(0, len(workload.prompts), 16):
        part = slice(first, first + 16)
        schedule = Schedule(PREEMPTED, interfere=preempt_all(at_step=24))
        collected = run(subject.executor, schedule, workload.prompts[part], workload.params[part])
        for index, expected in enumerate(workload.expected[part]):
            assert collected.num_preemptions[str(index)] >= 1
            assert collected.of(index) == expected, f"prompt {first + index}"


def test_with_a_prefix_cache_hit(subject: Subject) -> None:
    """Every prompt has been here before, and left its blocks."""
    workload = subject.workload
    # Blocks of 4 tokens, so that even a prompt of 5 can hit the prefix cache.
    executor = make_executor(subject.decoder, num_blocks=8192, block_size=4)
    schedule = Schedule(BATCHED, enable_prefix_caching=True, warm_up=workload.prompts)
    collected = run(executor, schedule, workload.prompts, workload.params)
    assert all(collected.num_cached[str(index)] > 0 for index in range(len(workload.prompts)))
    check_equal(collected, workload)


def test_four_forked_samples(subject: Subject) -> None:
    workload = subject.workload
    params = [replace(one, n=4) for one in workload.params]
    collected = run(subject.executor, Schedule(BATCHED), workload.prompts, params)
    check_equal(collected, workload, samples=range(4))


def test_seeded_sampling_is_the_same_alone_batched_and_preempted(subject: Subject) -> None:
    executor, prompts = subject.executor, subject.workload.prompts[:16]
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, max_tokens=40, seed=100 + index)
        for index in range(len(prompts))
    ]
    preempting = Schedule(PREEMPTED, interfere=preempt_all(20))
    alone = run_one_by_one(executor, Schedule(PREEMPTED), prompts, params)
    batched = run(executor, Schedule(PREEMPTED), prompts, params)
    preempted = run(executor, preempting, prompts, params)
    plain = [replace(one, temperature=0.0) for one in params]
    greedy = run(executor, Schedule(PREEMPTED), prompts, plain)
    for index in range(len(prompts)):
        assert preempted.num_preemptions[str(index)] >= 1
        assert alone.of(index) == batched.of(index) == preempted.of(index)
    assert any(alone.of(index) != greedy.of(index) for index in range(len(prompts)))
