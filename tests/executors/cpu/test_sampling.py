"""The compiled sampler chooses what the torch sampler chooses, whatever else is in the step."""

from __future__ import annotations

import math
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from threading import Timer
from typing import Any

import pytest
import torch

from headway.core.params import SamplingParams
from headway.core.plan import Failure, Sample
from headway.executors.cpu import kernels
from headway.executors.sampling import SampleRow, make_mask
from headway.executors.step_model import Span
from tests.executors.cpu.sampling_cases import (
    VOCABULARIES,
    SamplingCase,
    by_kernels,
    difference,
    make_case,
)
from tests.executors.cpu.test_compiled import ISAS, TOKENS, case_of, poison, spec_of

every_isa = pytest.mark.parametrize("isa", ISAS)
BEST = ISAS[-1]
VOCAB = 208


def row_of(number: int = 0, **fields: Any) -> SampleRow:
    return SampleRow(SamplingParams(max_tokens=99, **fields), 7, 0, number, 0)


@every_isa
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_both_samplers_choose_the_same(isa, vocab_size, is_full):
    count = 100 if vocab_size < 10_000 else 10
    for seed in range(count * 50 if is_full else count):
        found = difference(make_case(seed, vocab_size), isa)
        assert found is None, f"seed {seed}: {found}"


@pytest.mark.parametrize(
    "fields",
    [{}, {"top_p": 0.8, "temperature": 0.7}, {"min_p": 0.02, "top_k": 30, "temperature": 1.5}],
)
def test_draws_follow_the_distribution(fields, is_full):
    """A chi-square test: the statistic stays below what chance exceeds once in 30,000 times."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    params = SamplingParams(**fields)
    probs = (logits.double() / params.temperature).softmax(-1)
    kept = sorted(range(VOCAB), key=lambda at: -probs[at])
    kept = [at for at in kept if probs[at] >= params.min_p * probs[kept[0]]]
    kept = kept[: params.top_k or VOCAB]
    total, mass, nucleus = float(probs[kept].sum()), 0.0, []
    for at in kept:
        if mass < params.top_p * total:
            nucleus.append(at)
            mass += float(probs[at])

    num_draws = 100_000 if is_full else 5_000
    draws = (by_kernels(SamplingCase(logits, row_of(n, **fields)), BEST) for n in range(num_draws))
    counts = Counter(draw.token_ids[0] for draw in draws if isinstance(draw, Sample))
    assert counts.total() == num_draws and set(counts) <= set(nucleus)
    # Rare tokens are one cell, so that every cell expects enough draws.
    expected = {at: float(probs[at]) / mass * num_draws for at in nucleus}
    rare = {at for at, number in expected.items() if number < 10}
    cells = [(counts[at], expected[at]) for at in nucleus if at not in rare]
    if rare:
        cells.append((sum(counts[at] for at in rare), sum(expected[at] for at in rare)))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = len(cells) - 1
    # Wilson and Hilferty: the cube root of the statistic is nearly normal.
    spread = 2 / (9 * freedom)
    assert ((statistic / freedom) ** (1 / 3) - 1 + spread) / math.sqrt(spread) < 4.0


@every_isa
def test_company_changes_no_sample(isa):
    """Each row alone, all together, in other orders and on other numbers of threads."""
    tables = [[at] for at in range(12)]
    masked = replace(row_of(temperature=0.0), mask=make_mask(range(100, 200), VOCAB))
    rows = [make_case(seed, VOCAB).row for seed in range(10)] + [row_of(temperature=0.0), masked]
    spans = [Span(TOKENS[at : at + 9], 0, table) for at, table in enumerate(tables)]
    alone = case_of(spec_of(vocab_size=VOCAB)).compiled(isa)
    expected = [alone.sample([span], [8], [row])[0] for span, row in zip(spans, rows, strict=True)]
    for num_threads in (1, 2, 3):
        model = case_of(spec_of(vocab_size=VOCAB)).compiled(isa, num_threads=num_threads)
        for order in (range(12), range(11, -1, -1), [5, 11, 0, 2, 10, 1]):
            found = model.sample(
                [spans[at] for at in order],
                range(8, 9 * len(order), 9),
                [rows[at] for at in order],
            )
            assert found == [expected[at] for at in order]


def test_a_row_that_is_not_finite_fails_alone():
    model = case_of(spec_of(vocab_size=VOCAB)).compiled(BEST)
    fields = [{}, {"temperature": 0.0}, {"temperature": 0.0, "logprobs": 2}, {"top_p": 0.5}]
    rows = [row_of(**one) for one in fields]
    first = [Span(TOKENS[:9], 0, [at]) for at in range(4)]
    next_ones = [Span([1], 9, [at]) for at in range(4)]
    model.sample(first, [8, 17, 26, 35], rows)
    healthy = model.sample(next_ones, range(4), rows)
    for sick in range(4):
        model.sample(first, [8, 17, 26, 35], rows)
        poison(model, [sick])
        found = model.sample(next_ones, range(4), rows)
        assert isinstance(found[sick], Failure)
        assert [found[at] for at in range(4) if at != sick] == [
            healthy[at] for at in range(4) if at != sick
        ]


@every_isa
@pytest.mark.parametrize("draw_high", [False, True])
def test_impossible_tokens_are_never_drawn(isa, draw_high, monkeypatch):
    logits = torch.full((VOCAB,), -torch.inf)
    logits[[30, 101]] = 1.0
    monkeypatch.setattr(SampleRow, "draw", 1.0 - 2.0**-53 if draw_high else 0.0)
    for fields in ({}, {"top_p": 0.99}, {"top_k": 100}, {"min_p": 1e-9}):
        found = by_kernels(SamplingCase(logits, row_of(0, **fields)), isa)
        assert found == Sample((101 if draw_high else 30,))


def test_a_row_with_nothing_left_fails():
    logits = torch.full((16,), -torch.inf)
    logits[3] = 1.0
    params = SamplingParams(min_tokens=1, max_tokens=9, stop_token_ids=(3,))
    found = by_kernels(SamplingCase(logits, SampleRow(params, 0, 0, 0, 0)), BEST)
    assert found == Failure("the model's scores are not finite (-inf)")


def test_the_vocabulary_must_fit():
    library = kernels.load_kernels()
    assert library is not None
    none = [None] * 4
    assert library.hw_sample(0, None, None, None, 17, *none[:3]) == kernels.STATUSES["MISFIT"]


@every_isa
@pytest.mark.parametrize("vocab_size", [16, 48, 208])
def test_a_greedy_row_takes_its_best_allowed_token(isa, vocab_size):
    """In the head, without logits in memory; for every single token, and for all but the best."""
    model = case_of(spec_of(vocab_size=vocab_size)).compiled(isa)
    span = Span([token % vocab_size for token in TOKENS[:9]], 0, [0])
    greedy = row_of(temperature=0.0)
    logits = model.logits([span], [8])[0]
    order = sorted(range(vocab_size), key=lambda at: (-logits[at], at))
    masks = [make_mask([at], vocab_size) for at in range(vocab_size)]
    masks += [make_mask(order[at:], vocab_size) for at in range(vocab_size)]
    rows = [replace(greedy, mask=mask) for mask in masks]
    found = model.sample([span], [8] * len(rows), rows)
    assert found == [Sample((at,)) for at in (*range(vocab_size), *order)]


def test_a_row_with_nothing_allowed_fails_alone():
    model = case_of(spec_of(vocab_size=VOCAB)).compiled(BEST)
    span, nothing = Span(TOKENS[:9], 0, [0]), make_mask([], VOCAB)
    for row in (row_of(temperature=0.0), row_of(), row_of(temperature=0.0, logprobs=1)):
        (alone,) = model.sample([span], [8], [row])
        found = model.sample([span], [8, 8], [replace(row, mask=nothing), row])
        assert found == [Failure("the model's scores are not finite (-inf)"), alone]


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_the_sampler_waits_for_masks(delay_s):
    """Masks are written while the model runs, by another thread."""
    model = case_of(spec_of(vocab_size=VOCAB)).compiled(BEST)
    span, mask = Span(TOKENS[:9], 0, [0]), make_mask(range(VOCAB), VOCAB)
    rows = [replace(row_of(temperature=at), mask=mask) for at in (0.0, 1.0)]
    pending: Future[None] = Future()

    def write() -> None:
        mask[:] = make_mask([77], VOCAB)
        pending.set_result(None)

    timer = Timer(delay_s, write)
    timer.start()
    assert model.sample([span], [8, 8], rows, pending) == [Sample((77,)), Sample((77,))]
    timer.join()
