"""Real executors: a request preempted by whichever method makes the tokens it makes alone.

A pool with room for about half of what the requests come to need; every method; plain torch in fp32
and the compiled kernels, which compute every row by itself, with either form of the KV cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.support.parity_runs import Collected, Schedule, Tokens, run
from headway.clock import SystemClock
from headway.config import SchedulerConfig
from headway.core.params import SamplingParams
from headway.executors.cpu.kernels import best_isa
from headway.executors.load import ModelExecutor, load_model, open_checkpoint
from headway.executors.source import locate
from headway.executors.step_model import ModelOptions
from headway.executors.weights import Checkpoint
from headway.text import Tokenizer
from tests.executors.cpu.test_compiled import spec_of, weights_of
from tests.support.tiny import MemoryCheckpoint

METHODS = ["auto", "trim", "checkpoint", "recompute"]
FORMS = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16", "kernels": best_isa() or "plain"},
    "bf16, int8 KV": {"dtype": "bf16", "kv_dtype": "int8", "kernels": best_isa() or "plain"},
}
NUM_PROMPTS = 6
NUM_OUTPUTS = 32
AMPLE = 256
Make = Callable[[int, int], ModelExecutor]


def maker(checkpoint: Checkpoint, form: str) -> Make:
    def make(num_blocks: int, num_slots: int) -> ModelExecutor:
        sizes = {"num_blocks": num_blocks, "num_slots": num_slots, "block_size": 16}
        options = ModelOptions(max_model_len=256, **sizes, **FORMS[form])  # pyright: ignore
        return ModelExecutor(load_model(checkpoint, options), 256, SystemClock())

    return make


def run_all(executor: ModelExecutor, method: str, prompts: Sequence[Tokens]) -> Collected:
    config = SchedulerConfig(
        max_num_seqs=NUM_PROMPTS, max_num_batched_tokens=128, preemption_method=method
    )
    params = [SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS)] * len(prompts)
    return run(executor, Schedule(config), prompts, params)


def check_methods(make: Make, prompts: Sequence[Tokens]) -> None:
    """Against a run that nothing disturbs."""
    expected = run_all(make(AMPLE, 0), "auto", prompts)
    assert not expected.num_preemptions
    num_needed = sum(-(-(len(prompt) + NUM_OUTPUTS) // 16) for prompt in prompts)
    executor = make(num_needed // 2, num_needed // 8)
    for method in METHODS:
        collected = run_all(executor, method, prompts)
        assert collected.num_preemptions, method
        for index in range(len(prompts)):
            assert collected.of(index) == expected.of(index), (method, index)


@pytest.mark.parametrize("form", FORMS)
def test_a_tiny_model(form: str):
    spec = spec_of(vocab_size=64)
    draw = random.Random(3)
    prompts = [[draw.randrange(64) for _ in range(draw.randint(5, 90))] for _ in range(NUM_PROMPTS)]
    check_methods(maker(MemoryCheckpoint(spec, weights_of(spec)), form), prompts)


@pytest.mark.model
@pytest.mark.full  # tests/engine/test_llm.py preempts the real model in every run
@pytest.mark.parametrize("form", FORMS)
def test_the_real_model(model_path: Path, form: str):
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    token_ids = Tokenizer.from_path(model_path).encode(text)
    draw = random.Random(5)
    starts = [draw.randrange(len(token_ids) - 100) for _ in range(NUM_PROMPTS)]
    prompts = [token_ids[start : start + draw.randint(5, 90)] for start in starts]
    check_methods(maker(open_checkpoint(locate(str(model_path))), form), prompts)
