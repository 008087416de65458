"""The real SmolLM2 weights, in fp32, against transformers: token for token, batched and alone.

What else a schedule may do to a request is in test_schedules.py, which runs on these weights with
--full, and on a tiny model always.

The oracle reads each prompt together with the tokens we made, once. If its most likely token
at every position is the one we chose, its own greedy generation is the same, by induction.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.live.loading import FP32, Form, load
from benchmarks.support.parity_runs import Schedule, run, run_one_by_one
from headway.core.params import SamplingParams
from headway.core.plan import Embedding
from headway.executors.load import ModelExecutor
from headway.executors.sampling import HiddenRow
from headway.executors.step_model import Span
from tests.support.oracle import quick_gguf
from tests.support.parity_workloads import (
    BATCHED,
    Workload,
    check_equal,
    make_executor,
    smollm2_decoder,
    smollm2_requests,
)

pytestmark = pytest.mark.model

DATA = Path(__file__).parents[1] / "server" / "data" / "loglikelihoods.json"
CASES = json.loads(DATA.read_text())
TIE = 1e-4
"""Two logits of the oracle closer than this may be ordered either way."""


@pytest.fixture(scope="module")
def executor(model_path: Path) -> Iterator[ModelExecutor]:
    executor = make_executor(smollm2_decoder(model_path))
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def workload(executor: ModelExecutor, model_path: Path, is_full: bool) -> Workload:
    """Prompts, and what the model makes of them in one batch."""
    prompts, params = smollm2_requests(model_path, num_prompts=64 if is_full else 12)
    made = run(executor, Schedule(BATCHED), prompts, params)
    return Workload(prompts, params, [made.of(index) for index in range(len(prompts))])


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with quick_gguf():
        return AutoModelForCausalLM.from_pretrained(
            str(model_path.parent), gguf_file=model_path.name, dtype=torch.float32
        )


def test_batched_equals_transformers(workload: Workload, oracle: Any) -> None:
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
    assert num_tokens >= 32 * len(workload.prompts)
    assert num_ties <= num_tokens // 1000


def test_prompt_scores_equal_transformers(
    executor: ModelExecutor, oracle: Any, is_full: bool
) -> None:
    """In chunks, and at every position; the sums are what tests/server/test_scoring.py expects."""
    cases = CASES if is_full else CASES[:9]  # the last is long
    prompts = [case["token_ids"] for case in cases]
    params = [SamplingParams(max_tokens=0, prompt_logprobs=3) for _ in prompts]
    made = run(executor, Schedule(replace(BATCHED, max_num_batched_tokens=100)), prompts, params)
    for index, (case, prompt) in enumerate(zip(cases, prompts, strict=True)):
        with torch.inference_mode():
            logprobs = oracle(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
        own = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        top = logprobs[:-1].topk(3).values
        scores = made.scores[str(index)]
        found = torch.tensor([one.logprob for one in scores])
        assert torch.allclose(found, own, rtol=0.0, atol=1e-3)
        likeliest = torch.tensor([one.top_logprobs for one in scores])
        assert torch.allclose(likeliest, top, rtol=0.0, atol=1e-3)
        total = float(own[case["num_context"] - 1 :].sum())
        assert total == pytest.approx(case["logprob"], abs=1e-3)


@pytest.mark.parametrize(
    ("form", "least"),
    [
        (Form("int4", activation_dtype="bf16"), 0.9999),
        (Form("int4", activation_dtype="int8"), 0.998),
        pytest.param(FP32, 0.999999, marks=pytest.mark.full),
    ],
)
def test_embeddings_point_where_those_of_transformers_do(
    oracle: Any, model_path: Path, form: Form, least: float, is_full: bool
) -> None:
    model = load(model_path, form)
    for case in CASES if is_full else CASES[:9]:
        prompt = case["token_ids"]
        num_blocks = -(-len(prompt) // model.block_size)
        span = Span(prompt, 0, range(num_blocks))
        (found,) = model.sample([span], [len(prompt) - 1], [HiddenRow()])
        assert isinstance(found, Embedding)
        values = torch.tensor(array("f", found.values))
        with torch.inference_mode():
            hidden = oracle(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        cosine = torch.cosine_similarity(values, hidden[-1][0, -1], dim=0)
        print(f"{form}: {float(cosine):.6f} for {len(prompt)} tokens")
        assert cosine >= least


def test_alone_equals_batched(executor: ModelExecutor, workload: Workload, is_full: bool) -> None:
    every = slice(None, None, 1 if is_full else 5)
    prompts, params = workload.prompts[every], workload.params[every]
    alone = run_one_by_one(executor, Schedule(BATCHED), prompts, params)
    check_equal(alone, Workload(prompts, params, workload.expected[every]))
