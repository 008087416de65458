from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from headway.core.params import SamplingParams
from headway.core.plan import Failure, Sample
from headway.executors.rng import uniform
from headway.executors.sampling import SampleRow, TokenCounts, has_penalties
from headway.executors.torch import sampler
from headway.executors.torch.sampler import Scores

VOCAB = 50
WIDE = 4000
"""Wider than what filters usually look at."""


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]):
    return sampler.sample(Scores.of(logits), rows)


def row(seed: int = 0, index: int = 0, position: int = 5, prompt=(), outputs=(), **fields: Any):
    params = SamplingParams(**{"max_tokens": 99, "temperature": 0.0, **fields})
    counts = None
    if has_penalties(params):
        counts = TokenCounts()
        counts.add([*prompt, *outputs], len(prompt))
    return SampleRow(params, seed, index, position, len(outputs), counts)


def logits(num_rows: int = 1, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * 3


def token(outcome: object) -> int:
    assert isinstance(outcome, Sample)
    return outcome.token_ids[0]


def one(scores: torch.Tensor, sample_row: SampleRow) -> int:
    return token(sample(scores.view(1, -1), [sample_row])[0])


def survivors(scores: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """The slow way: sort everything, drop token by token, renormalize after each filter."""
    weights = (scores.double() / params.temperature).softmax(-1).tolist()
    kept = sorted(enumerate(weights), key=lambda pair: (-pair[1], pair[0]))
    kept = [pair for pair in kept if pair[1] >= params.min_p * kept[0][1]]
    kept = kept[: params.top_k] if params.top_k else kept
    total = sum(weight for _, weight in kept)
    nucleus, mass = [], 0.0
    for pair in kept:
        if mass >= params.top_p * total:
            break
        nucleus.append(pair)
        mass += pair[1]
    return {token_id: weight / mass for token_id, weight in nucleus}


def test_greedy_rows_take_the_best():
    scores = logits(6)
    outcomes = sample(scores, [row() for _ in range(6)])
    assert [token(outcome) for outcome in outcomes] == scores.argmax(-1).tolist()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.7},
        {"min_p": 0.02, "top_k": 9, "top_p": 0.9},
        {"temperature": 0.3, "top_p": 0.95},
    ],
)
def test_draws_follow_the_filtered_distribution(fields):
    fields = {"temperature": 1.0, **fields}
    scores = logits()[0]
    expected = survivors(scores, SamplingParams(**fields))
    num_draws = 4000
    rows = [row(seed=9, position=position, **fields) for position in range(num_draws)]
    outcomes = sample(scores.expand(num_draws, -1), rows)
    counts = Counter(token(outcome) for outcome in outcomes)
    assert set(counts) <= set(expected)
    for token_id, probability in expected.items():
        spread = math.sqrt(num_draws * probability * (1 - probability)) + 1
        assert abs(counts[token_id] - num_draws * probability) < 5 * spread


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 3000},
        {"top_p": 0.999},
        {"min_p": 1e-6},
        {"min_p": 1e-5, "top_p": 0.9},
        {"top_k": 2000, "top_p": 0.5},
        {"top_k": WIDE + 1},
    ],
)
def test_filters_that_keep_very_many_tokens(fields):
    fields = {"temperature": 2.0, **fields}
    scores = logits(vocab=WIDE)[0]
    expected = survivors(scores, SamplingParams(**fields))
    ordered = sorted(expected)
    cumulative = torch.tensor([expected[token_id] for token_id in ordered]).double().cumsum(0)
    for position in range(40):
        drawn = one(scores, row(seed=3, position=position, **fields))
        place = int(torch.searchsorted(cumulative, uniform(3, 0, position), right=True))
        near = ordered[max(0, place - 1) : place + 2]  # fp32 against fp64 at interval borders
        assert drawn in near


def test_a_draw_does_not_depend_on_its_neighbours():
    scores = logits(8, WIDE)
    rows = [
        row(seed=1, temperature=1.0),
        row(),
        row(seed=2, temperature=0.7, top_p=0.9),
        row(seed=3, temperature=3.0, top_p=0.999),
        row(seed=4, temperature=1.0, top_k=5),
        row(seed=4, index=1, temperature=1.0, top_k=5),
        row(seed=5, temperature=1.5, min_p=0.05, logprobs=3),
        row(seed=6, temperature=1.0, logit_bias={7: 4.0}),
    ]
    together = sample(scores, rows)
    alone = [sample(scores[at : at + 1], rows[at : at + 1])[0] for at in range(8)]
    assert together == alone
    assert sample(scores.flip(0), rows[::-1]) == together[::-1]


def test_top_k_of_one_is_greedy_even_with_ties():
    scores = torch.zeros(VOCAB)
    scores[[11, 23]] = 5.0
    rows = [row(seed=seed, temperature=1.0, top_k=1) for seed in range(30)]
    outcomes = sample(scores.expand(30, -1), rows)
    assert {token(outcome) for outcome in outcomes} == {11}


def test_ties_at_the_cut_stay_in_token_order():
    scores = torch.zeros(VOCAB)
    rows = [row(seed=seed, temperature=1.0, top_k=3) for seed in range(200)]
    outcomes = sample(scores.expand(200, -1), rows)
    assert {token(outcome) for outcome in outcomes} == {0, 1, 2}


def test_the_smallest_nucleus_still_has_a_token():
    scores = logits()[0]
    assert one(scores, row(temperature=1.0, top_p=1e-9)) == scores.argmax()
    assert one(scores, row(temperature=1.0, min_p=1.0)) == scores.argmax()


@pytest.mark.parametrize("temperature", [1e-4, 1e-30])
def test_a_tiny_temperature_is_greedy(temperature):
    scores = logits()[0] * 100
    assert one(scores, row(temperature=temperature)) == scores.argmax()


def test_impossible_tokens_are_never_drawn():
    scores = torch.full((VOCAB,), -torch.inf)
    scores[20] = 1.0
    outcomes = sample(
        scores.expand(100, -1), [row(seed=seed, temperature=5.0) for seed in range(100)]
    )
    assert {token(outcome) for outcome in outcomes} == {20}


def test_repetition_penalty_covers_prompt_and_output():
    scores = torch.full((VOCAB,), -3.0)
    scores[4], scores[5], scores[6] = 4.0, 3.9, 3.8
    assert one(scores, row(repetition_penalty=1.2, prompt=[4], outputs=[5])) == 6
    scores = torch.full((VOCAB,), -3.0)
    scores[4], scores[5] = -1.0, -1.1
    assert one(scores, row(repetition_penalty=1.2, prompt=[4])) == 5


def test_presence_and_frequency_penalties_cover_output_only():
    scores = torch.zeros(VOCAB)
    scores[4], scores[5] = 2.0, 1.2
    assert one(scores, row(presence_penalty=1.0, prompt=[4])) == 4
    assert one(scores, row(presence_penalty=1.0, outputs=[4])) == 5
    assert one(scores, row(frequency_penalty=0.3, outputs=[4, 4])) == 4
    assert one(scores, row(frequency_penalty=0.3, outputs=[4, 4, 4])) == 5


def test_penalties_against_a_reference():
    scores = logits()[0]
    prompt, outputs = [1, 2, 2, 3], [3, 3, 8, 9]
    expected = scores.tolist()
    for token_id in set(prompt + outputs):
        value = expected[token_id]
        expected[token_id] = value / 1.3 if value > 0 else value * 1.3
    for token_id, count in Counter(outputs).items():
        expected[token_id] -= 0.4 * count + 0.7
    fields: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.7,
    }
    for position in range(50):
        penalized = row(
            position=position, temperature=1.0, prompt=prompt, outputs=outputs, **fields
        )
        plain = row(position=position, temperature=1.0)
        assert one(scores, penalized) == one(torch.tensor(expected), plain)


def test_logit_bias():
    scores = logits()[0]
    assert one(scores, row(logit_bias={17: 100.0})) == 17
    best = int(scores.argmax())
    assert one(scores, row(logit_bias={best: -100.0})) == int(scores.topk(2).indices[1])


def test_min_tokens_forbids_stop_ids_until_reached():
    scores = logits()[0]
    first, second = scores.topk(2).indices.tolist()
    stops = (first, VOCAB + 5)
    assert one(scores, row(min_tokens=2, outputs=[0], stop_token_ids=stops)) == second
    assert one(scores, row(min_tokens=2, outputs=[0, 0], stop_token_ids=stops)) == first
    assert one(scores, row(min_tokens=2, outputs=[0])) == first


def test_logprobs_are_those_of_the_model():
    scores = logits(3)
    rows = [
        row(logprobs=4),
        row(temperature=2.0, logprobs=0, logit_bias={13: 50.0}),
        row(temperature=1.0),
    ]
    outcomes = sample(scores, rows)
    reference = scores.log_softmax(-1)
    for at, num_top in ((0, 4), (1, 0)):
        outcome = outcomes[at]
        assert isinstance(outcome, Sample) and outcome.logprobs
        (logprobs,) = outcome.logprobs
        chosen = reference[at, outcome.token_ids[0]]
        assert logprobs.logprob == pytest.approx(chosen.item(), abs=1e-5)
        assert logprobs.rank == 1 + int((reference[at] > chosen).sum())
        top = reference[at].topk(num_top)
        assert logprobs.top_ids == tuple(top.indices.tolist())
        assert logprobs.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)
    assert token(outcomes[1]) == 13
    plain = outcomes[2]
    assert isinstance(plain, Sample) and plain.logprobs is None


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 2}])
def test_a_row_that_is_not_finite_fails_alone(bad, fields):
    scores = logits(3)
    scores[1, 3] = bad
    outcomes = sample(scores, [row(**fields)] * 3)
    assert [isinstance(outcome, Failure) for outcome in outcomes] == [False, True, False]
    assert outcomes[0] == sample(scores[:1], [row(**fields)])[0]


def test_a_row_with_an_impossible_bias_fails_alone():
    outcomes = sample(logits(2), [row(logit_bias={VOCAB: 1.0}), row()])
    assert [isinstance(outcome, Failure) for outcome in outcomes] == [True, False]


def test_a_row_whose_sampling_raises_fails_alone(monkeypatch):
    rows = [row(seed=seed, temperature=1.0, logprobs=1) for seed in range(4)]
    scores = logits(4)
    expected = sample(scores, rows)

    def faulty(seed: int, index: int, position: int) -> float:
        if seed == 2:
            raise ZeroDivisionError("a fault")
        return uniform(seed, index, position)

    monkeypatch.setattr("headway.executors.sampling.uniform", faulty)
    outcomes = sample(scores, rows)
    assert isinstance(outcomes[2], Failure)
    for at in (0, 1, 3):
        assert token(outcomes[at]) == token(expected[at])


def test_a_row_with_nothing_left_to_choose_fails():
    rows = [row(min_tokens=1, stop_token_ids=tuple(range(VOCAB)), temperature=1.0)]
    assert isinstance(sample(logits(), rows)[0], Failure)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-50, logprobs=1),
        SamplingParams(temperature=1e-50, top_k=5),
        SamplingParams(temperature=1e-4, top_p=1e-6, min_p=1.0, top_k=1, logprobs=20),
        SamplingParams(temperature=100.0, top_p=5e-324, top_k=1),
        SamplingParams(min_tokens=1, max_tokens=2, stop_token_ids=tuple(range(64)), logprobs=1),
        SamplingParams(repetition_penalty=100.0, frequency_penalty=2.0, presence_penalty=-2.0),
        SamplingParams(logit_bias=dict.fromkeys(range(64), -100.0), logprobs=5),
    ],
)
def test_extreme_params_harm_nobody(params):
    """Whatever is legal gives a token of the vocabulary, or a failure of that row alone."""
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)) * 30
    neighbour = SamplingParams(temperature=0.0, logprobs=1)
    rows = [SampleRow(params, 1, 0, 5, 0), SampleRow(neighbour, 1, 0, 5, 0)]
    strange, fine = sample(logits, rows)
    assert isinstance(fine, Sample)
    assert fine.token_ids == (int(logits[1].argmax()),)
    if isinstance(strange, Sample):
        assert 0 <= strange.token_ids[0] < 64
