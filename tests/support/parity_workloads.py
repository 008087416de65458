"""Prompts, and what a model makes of each of them alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.live.agreement import english_prompts
from benchmarks.support.parity_runs import Collected, Schedule, Tokens, run_one_by_one
from headway.clock import SystemClock
from headway.config import SchedulerConfig
from headway.core.params import SamplingParams
from headway.executors.load import ModelExecutor, open_checkpoint
from headway.executors.source import locate
from headway.executors.torch.eager import EagerModel, load_decoder
from headway.executors.torch.model import Decoder
from headway.executors.weights.names import EMBEDDING, model_shapes
from headway.text import Tokenizer
from tests.support.tiny import MemoryCheckpoint, tiny_spec

ROOT = Path(__file__).parents[2]
BATCHED = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512)


@dataclass(frozen=True)
class Workload:
    prompts: list[Tokens]
    params: list[SamplingParams]
    expected: list[Tokens]
    """What the model makes of each prompt."""


def make_executor(decoder: Decoder, num_blocks: int = 2048, block_size: int = 16) -> ModelExecutor:
    max_model_len = min(2048, decoder.spec.max_model_len)
    return ModelExecutor(EagerModel(decoder, num_blocks, block_size), max_model_len, SystemClock())


def smollm2_decoder(model_path: Path) -> Decoder:
    return load_decoder(open_checkpoint(locate(str(model_path))), "fp32")


def smollm2_requests(
    model_path: Path, num_prompts: int
) -> tuple[list[Tokens], list[SamplingParams]]:
    """Stretches of English, 5 to 400 tokens long, each to be continued by 32 to 64 tokens."""
    token_ids = Tokenizer.from_path(model_path).encode((ROOT / "LICENSE").read_text())
    prompts = [prompt for prompt, _ in english_prompts(token_ids, num_prompts)]
    return prompts, _params(prompts)


def smollm2_workload(executor: ModelExecutor, model_path: Path, num_prompts: int) -> Workload:
    return _run_alone(executor, smollm2_requests(model_path, num_prompts)[0])


def tiny_decoder() -> Decoder:
    """Random weights, wide enough that no token hangs on the last bit of a sum."""
    spec = tiny_spec(max_model_len=512, windows=(20, None))
    generator = torch.Generator().manual_seed(11)
    weights = {}
    for name, shape in model_shapes(spec).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1.0 + 0.3 * values
        else:
            weights[name] = values if name == EMBEDDING else 0.3 * values
    return load_decoder(MemoryCheckpoint(spec, weights), "fp32")


def tiny_workload(executor: ModelExecutor, num_prompts: int = 32) -> Workload:
    draw = random.Random(7)
    lengths = [5, 200, *(int(5 * 40 ** draw.random()) for _ in range(num_prompts - 2))]
    return _run_alone(executor, [[draw.randrange(61) for _ in range(n)] for n in lengths])


def _run_alone(executor: ModelExecutor, prompts: list[Tokens]) -> Workload:
    params = _params(prompts)
    alone = run_one_by_one(executor, Schedule(BATCHED), prompts, params)
    return Workload(prompts, params, [alone.of(index) for index in range(len(prompts))])


def _params(prompts: list[Tokens]) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.0, max_tokens=64 if index % 8 == 0 else 32)
        for index in range(len(prompts))
    ]


def check_equal(collected: Collected, workload: Workload, samples: Sequence[int] = (0,)) -> None:
    for index, expected in enumerate(workload.expected):
        for sample in samples:
            assert collected.of(index, sample) == expected, f"prompt {index}, sample {sample}"
