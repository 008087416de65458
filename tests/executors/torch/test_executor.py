from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from headway.clock import SystemClock
from headway.core.executor import Capacity, Ticket
from headway.core.params import SamplingParams
from headway.core.plan import (
    BlockCopy,
    Failure,
    NewRequest,
    Sample,
    ScheduledRequest,
    StepPlan,
    StepResult,
)
from headway.executors.load import ModelExecutor
from headway.executors.torch.eager import EagerModel, load_decoder
from tests.support.tiny import MemoryCheckpoint, tiny_spec, tiny_weights

BLOCK = 4
GREEDY = SamplingParams(temperature=0, max_tokens=50)
PROMPT: tuple[int, ...] = (3, 14, 15, 9, 26, 5)


@pytest.fixture(name="executor")
def make_executor() -> ModelExecutor:
    spec = tiny_spec()
    decoder = load_decoder(MemoryCheckpoint(spec, tiny_weights(spec)), "fp32")
    model = EagerModel(decoder, 40, BLOCK)
    model._store._data.fill_(torch.nan)
    return ModelExecutor(model, 64, SystemClock())


def new(tokens=PROMPT, params=GREEDY, num_prompt=None, seed=0, index=0) -> NewRequest:
    return NewRequest(params, seed, index, tuple(tokens), num_prompt or len(tokens))


def first(request_id: str, tokens=PROMPT, blocks=(0, 1), **fields) -> ScheduledRequest:
    """The whole prompt in one step."""
    fields = {"has_sample": True, "new": new(tokens), **fields}
    return ScheduledRequest(request_id, 0, tuple(tokens), tuple(blocks), **fields)


def step(executor: ModelExecutor, *scheduled: ScheduledRequest, **fields) -> StepResult:
    return executor.collect(executor.submit(StepPlan(1, tuple(scheduled), **fields)))


def tokens_of(result: StepResult) -> list[int]:
    assert all(isinstance(outcome, Sample) for outcome in result.outcomes), result.outcomes
    return [o.token_ids[0] for o in result.outcomes if isinstance(o, Sample)]


def generate(executor, tokens, params, count, **key) -> list[int]:
    """Run one request alone, from scratch, with all the blocks it may need."""
    known = list(tokens)
    request = new(tokens, params, **key)
    scheduled = ScheduledRequest("solo", 0, tuple(known), tuple(range(12)), True, request)
    for _ in range(count):
        known += tokens_of(step(executor, scheduled))
        scheduled = ScheduledRequest("solo", len(known) - 1, (known[-1],), (), True)
    return known[len(tokens) :]


def test_capacity(executor):
    assert executor.capacity() == Capacity(40, BLOCK, 64)


def test_outcomes_align_with_the_plan(executor):
    result = step(
        executor,
        first("a", blocks=(0, 1)),
        first("b", PROMPT[:3], blocks=(2,), has_sample=False, new=new(PROMPT)),
        first("c", PROMPT[:2], blocks=(3,)),
    )
    a, b, c = result.outcomes
    assert isinstance(a, Sample) and b is None and isinstance(c, Sample)
    assert result.elapsed_s > 0
    # b's second chunk ends where a's only chunk ended, beside a decode of a.
    result = step(
        executor,
        ScheduledRequest("a", 6, a.token_ids, (), True),
        ScheduledRequest("b", 3, PROMPT[3:], (9,), True),
    )
    assert result.outcomes[1] == a


def test_alone_and_batched_agree(executor):
    alone = {n: generate(executor, PROMPT[:n], GREEDY, 8) for n in (2, 4, 6)}
    known: dict[int, list[int]] = {n: [*PROMPT[:n]] for n in alone}
    scheduled = [
        first(str(n), PROMPT[:n], range(12 + 4 * i, 16 + 4 * i)) for i, n in enumerate(alone)
    ]
    for _ in range(8):
        for n, token_id in zip(alone, tokens_of(step(executor, *scheduled)), strict=True):
            known[n].append(token_id)
        scheduled = [
            ScheduledRequest(str(n), len(known[n]) - 1, (known[n][-1],), (), True) for n in alone
        ]
    assert {n: known[n][n:] for n in alone} == alone


def test_a_resumed_request_draws_the_same_tokens(executor):
    params = SamplingParams(
        temperature=1.0, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.5, max_tokens=50
    )
    whole = generate(executor, PROMPT, params, 12, seed=5)
    head = generate(executor, PROMPT, params, 5, seed=5)
    tail = generate(executor, (*PROMPT, *head), params, 7, seed=5, num_prompt=len(PROMPT))
    assert head + tail == whole
    assert generate(executor, PROMPT, params, 12, seed=5, index=1) != whole


def test_penalties_see_tokens_of_later_steps(executor):
    params = SamplingParams(temperature=0, presence_penalty=2.0, max_tokens=50)
    harsh = replace(params, logit_bias={7: 99.0, 8: 99.0, 9: 99.0})
    assert sorted(generate(executor, PROMPT, harsh, 3)) == [7, 8, 9]


def test_min_tokens_counts_outputs(executor):
    token_id = generate(executor, PROMPT, GREEDY, 1)[0]
    params = SamplingParams(
        temperature=0, min_tokens=2, max_tokens=9, stop_token_ids=(token_id,), logit_bias={9: 50.0}
    )
    biased = replace(params, logit_bias={token_id: 50.0})
    outputs = generate(executor, PROMPT, biased, 3)
    assert token_id not in outputs[:2] and outputs[2] == token_id


def test_forked_request_continues_from_a_copied_block(executor):
    (token_id,) = tokens_of(step(executor, first("a", blocks=(0, 1))))
    fork = ScheduledRequest("a#1", 6, (token_id,), (0, 5), True, new((*PROMPT, token_id), GREEDY))
    original = ScheduledRequest("a", 6, (token_id,), (), True)
    result = step(executor, original, fork, copies=(BlockCopy(1, 5),))
    assert result.outcomes[0] == result.outcomes[1]


def test_released_state_is_forgotten_before_new_state_arrives(executor):
    step(executor, first("a"), first("b", blocks=(2, 3)))
    result = step(executor, first("a", blocks=(4, 5)), released_ids=("a", "b", "unknown"))
    assert isinstance(result.outcomes[0], Sample)
    assert list(executor._requests["a"].block_ids) == [4, 5]
    assert "b" not in executor._requests


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (ScheduledRequest("ghost", 4, (1,), (9,), True), "ghost: the request was never sent"),
        (first("x", (1, 2, 999), (9,)), "vocabulary"),
        (first("x", (1, -2), (9,)), "vocabulary"),
        (first("x", range(5), (9,)), "do not fit"),
        (first("x", [1] * 60 + [2] * 8, range(20)), "hold 64"),
        (first("x", (1, 2), (400,)), "KV store"),
        (first("x", (), (9,)), "0 tokens"),
        (first("x", (1,), (9,), new=new((1,), replace(GREEDY, logit_bias={999: 1.0}))), "bias"),
    ],
)
def test_a_request_that_is_wrong_fails_alone(executor, bad, words):
    expected = step(executor, first("alone", blocks=(10, 11))).outcomes[0]
    outcomes = step(executor, first("a"), bad, first("b", blocks=(2, 3))).outcomes
    assert outcomes[0] == outcomes[2] == expected
    failure = outcomes[1]
    assert isinstance(failure, Failure) and words in failure.message


def test_what_a_poisoned_request_leaves_behind_reaches_nobody(executor):
    expected = step(executor, first("a", blocks=(0, 1))).outcomes
    executor._model._store._data.fill_(torch.nan)
    outcome = step(executor, ScheduledRequest("p", 6, (1,), (0, 1), True, new())).outcomes[0]
    assert isinstance(outcome, Failure) and "not finite" in outcome.message
    assert step(executor, first("b", blocks=(0, 1)), released_ids=("a", "p")).outcomes == expected


def test_logprobs_of_a_decode(executor):
    params = replace(GREEDY, logprobs=3)
    (outcome,) = step(executor, first("a", new=new(PROMPT, params))).outcomes
    assert isinstance(outcome, Sample) and outcome.logprobs
    assert outcome.logprobs[0].rank == 1
    assert outcome.logprobs[0].top_ids[0] == outcome.token_ids[0]


def test_one_step_in_flight(executor):
    ticket = executor.submit(StepPlan(1, (first("a"),)))
    with pytest.raises(RuntimeError, match="not been collected"):
        executor.submit(StepPlan(2, ()))
    with pytest.raises(RuntimeError, match="not in flight"):
        executor.collect(Ticket(2))
    assert executor.collect(ticket).step_id == 1
    with pytest.raises(RuntimeError, match="not in flight"):
        executor.collect(ticket)


def test_an_empty_plan_is_a_step(executor):
    assert step(executor).outcomes == ()
    executor.close()


def test_bf16_runs():
    spec = tiny_spec(has_qk_norm=True, windows=(5, None))
    decoder = load_decoder(MemoryCheckpoint(spec, tiny_weights(spec)), "bf16")
    executor = ModelExecutor(EagerModel(decoder, 16, BLOCK), 64, SystemClock())
    assert len(generate(executor, PROMPT, GREEDY, 6)) == 6


def test_importing_executors_does_not_import_torch():
    code = "import sys, headway.executors, headway.executors.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
