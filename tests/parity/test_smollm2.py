"""The real SmolLM2 weights, in fp32, against transformers: token for token, however the
requests are batched, chunked, preempted, cached or forked.

The oracle reads each prompt together with the tokens we made, once. If its most likely token
at every position is the one we chose, its own greedy generation is the same, by induction.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from headway.clock import SystemClock
from headway.config import SchedulerConfig
from headway.core.params import SamplingParams
from headway.executors.source import locate
from headway.executors.torch.eager import EagerModel
from headway.executors.torch.load import TorchExecutor, load_decoder, open_checkpoint
from headway.executors.torch.model import Decoder
from headway.text import Tokenizer
from tests.support.parity_runs import (
    Collected,
    Schedule,
    Tokens,
    preempt_everyone,
    run,
    run_one_by_one,
)

pytestmark = pytest.mark.model

NUM_PROMPTS = 32 if os.environ.get("CI") else 64
"""As many as one batch holds are enough for every run; `scripts/test tests/parity` takes all."""
TIE = 1e-4
"""Two logits of the oracle closer than this may be ordered either way."""

BATCHED = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512)


@dataclass(frozen=True)
class Workload:
    prompts: list[Tokens]
    params: list[SamplingParams]
    expected: list[Tokens]
    """What we make when each prompt runs alone; checked against the oracle."""


@pytest.fixture(scope="module")
def decoder(model_path: Path) -> Decoder:
    return load_decoder(open_checkpoint(locate(str(model_path))), "fp32")


@pytest.fixture(scope="module")
def executor(decoder: Decoder) -> Iterator[TorchExecutor]:
    executor = TorchExecutor(EagerModel(decoder, 2048, 16), 2048, SystemClock())
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def workload(executor: TorchExecutor, model_path: Path) -> Workload:
    """Stretches of English, 5 to 400 tokens long, each continued by 32 to 64 tokens."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    token_ids = Tokenizer.from_path(model_path).encode(text)
    draw = random.Random(7)
    # Spread evenly on a logarithmic scale: short prompts are as telling and cost less.
    lengths = [5, 400, *(int(5 * 80 ** draw.random()) for _ in range(NUM_PROMPTS - 2))]
    starts = [draw.randrange(len(token_ids) - length) for length in lengths]
    prompts = [token_ids[at : at + n] for at, n in zip(starts, lengths, strict=True)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=64 if index % 8 == 0 else 32)
        for index in range(NUM_PROMPTS)
    ]
    alone = run_one_by_one(executor, Schedule(BATCHED), prompts, params)
    return Workload(prompts, params, [alone.of(index) for index in range(NUM_PROMPTS)])


def test_alone_equals_transformers(workload: Workload, model_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(
        str(model_path.parent), gguf_file=model_path.name, dtype=torch.float32
    )
    num_tokens = num_ties = 0
    for prompt, made in zip(workload.prompts, workload.expected, strict=True):
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + made])).logits[0]
        rows = logits[len(prompt) - 1 : -1]
        best = rows.max(dim=-1).values
        chosen = rows.gather(1, torch.tensor(made)[:, None])[:, 0]
        assert torch.all(best - chosen <= TIE), "the oracle prefers another token"
        num_ties += int((best != chosen).sum())
        num_tokens += len(made)
    print(f"{num_tokens} tokens equal, of which {num_ties} by a tie within {TIE}")
    assert num_tokens >= 32 * NUM_PROMPTS
    assert num_ties <= num_tokens // 1000


def _assert_equal(collected: Collected, workload: Workload, samples: Sequence[int] = (0,)) -> None:
    for index, expected in enumerate(workload.expected):
        for sample in samples:
            assert collected.of(index, sample) == expected, f"prompt {index}, sample {sample}"


def test_batched_with_31_others(executor: TorchExecutor, workload: Workload) -> None:
    _assert_equal(run(executor, Schedule(BATCHED), workload.prompts, workload.params), workload)


def test_prefill_in_chunks_of_16(executor: TorchExecutor, workload: Workload) -> None:
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=32, prefill_floor=16)
    schedule = Schedule(replace(config, prefill_cap=16))
    _assert_equal(run(executor, schedule, workload.prompts, workload.params), workload)


def test_preempted_and_resumed(executor: TorchExecutor, workload: Workload) -> None:
    config = replace(BATCHED, scheduling_policy="priority", max_num_seqs=16, max_wait_s=1e6)
    for first in range(0, NUM_PROMPTS, 16):
        part = slice(first, first + 16)
        schedule = Schedule(config, interfere=preempt_everyone(at_step=24))
        collected = run(executor, schedule, workload.prompts[part], workload.params[part])
        for index, expected in enumerate(workload.expected[part]):
            assert collected.num_preemptions[str(index)] >= 1
            assert collected.of(index) == expected, f"prompt {first + index}"


def test_with_a_prefix_cache_hit(decoder: Decoder, workload: Workload) -> None:
    """Every prompt has been here before, and left its blocks."""
    # Blocks of 4 tokens, so that even a prompt of 5 can hit the prefix cache.
    executor = TorchExecutor(EagerModel(decoder, 8192, 4), 2048, SystemClock())
    schedule = Schedule(BATCHED, enable_prefix_caching=True, warm_up=workload.prompts)
    collected = run(executor, schedule, workload.prompts, workload.params)
    assert all(collected.num_cached[str(index)] > 0 for index in range(NUM_PROMPTS))
    _assert_equal(collected, workload)


def test_four_forked_samples(executor: TorchExecutor, workload: Workload) -> None:
    params = [replace(wish, n=4) for wish in workload.params]
    collected = run(executor, Schedule(BATCHED), workload.prompts, params)
    _assert_equal(collected, workload, samples=range(4))


def test_seeded_sampling_is_the_same_alone_batched_and_preempted(
    executor: TorchExecutor, workload: Workload
) -> None:
    prompts = workload.prompts[:16]
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, max_tokens=40, seed=100 + index)
        for index in range(len(prompts))
    ]
    config = replace(BATCHED, scheduling_policy="priority", max_num_seqs=16, max_wait_s=1e6)
    alone = run_one_by_one(executor, Schedule(config), prompts, params)
    batched = run(executor, Schedule(config), prompts, params)
    preempted = run(executor, Schedule(config, interfere=preempt_everyone(20)), prompts, params)
    greedy = run(executor, Schedule(config), prompts, [replace(p, temperature=0.0) for p in params])
    for index in range(len(prompts)):
        assert preempted.num_preemptions[str(index)] >= 1
        assert alone.of(index) == batched.of(index) == preempted.of(index)
    assert any(alone.of(index) != greedy.of(index) for index in range(len(prompts)))
