"""Prompt tokens scored by the kernels: as by torch, and the same bits in any step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch

from headway.core.params import SamplingParams
from headway.core.plan import Embedding, Failure, TokenLogprobs
from headway.executors.sampling import HiddenRow, Row, SampleRow, ScoreRow
from headway.executors.step_model import RowOutcome, Span, StepModel
from headway.executors.torch.sampler import score
from tests.executors.cpu.test_compiled import ISAS, TABLE, TOKENS, case_of, poison, spec_of

every_isa = pytest.mark.parametrize("isa", ISAS)
VOCAB = 208
OTHER_TABLE = [7, 8, 9, 10, 11]
ROWS = [ScoreRow(next_id, at % 21) for at, next_id in enumerate(TOKENS[1:])]
"""For all tokens but the last: more rows than are scored at a time."""


def score_chunks(model: StepModel, sizes: Sequence[int]) -> list[RowOutcome]:
    """Return the scores of TOKENS, computed in chunks; the last size is repeated."""
    found: list[RowOutcome] = []
    start = 0
    while start < len(TOKENS):
        size, sizes = sizes[0], sizes[1:] or sizes
        rows = ROWS[start : start + size]
        span = Span(TOKENS[start : start + size], start, TABLE)
        found += model.sample([span], range(len(rows)), rows)
        start += size
    return found


@every_isa
def test_scores_are_those_of_the_logits(isa: str) -> None:
    case = case_of(spec_of(vocab_size=VOCAB))
    model = case.compiled(isa)
    span = Span(TOKENS, 0, TABLE)
    logits = torch.from_numpy(model.logits([span], range(len(ROWS))))
    expected = score(logits, ROWS)
    found = model.sample([span], range(len(ROWS)), ROWS)
    for one, wanted in zip(found, expected, strict=True):
        assert isinstance(one, TokenLogprobs) and isinstance(wanted, TokenLogprobs)
        assert (one.rank, one.top_ids) == (wanted.rank, wanted.top_ids)
        assert one.logprob == pytest.approx(wanted.logprob, abs=1e-5)
        assert one.top_logprobs == pytest.approx(wanted.top_logprobs, abs=1e-5)


@every_isa
def test_no_schedule_changes_a_score(isa: str) -> None:
    """In chunks, with other requests before and behind, and on other numbers of threads."""
    case = case_of(spec_of(vocab_size=VOCAB))
    expected = score_chunks(case.compiled(isa), [70])
    for num_threads, sizes in ((1, [1]), (2, [65, 2]), (3, [3, 31])):
        assert score_chunks(case.compiled(isa, num_threads=num_threads), sizes) == expected
    params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=3)
    spans = [Span(TOKENS[:33], 0, OTHER_TABLE), Span(TOKENS, 0, TABLE)]
    sampled = SampleRow(params, 7, 0, 33, 0)
    (alone,) = case.compiled(isa).sample(spans[:1], [32], [sampled])
    # Rows of several requests come in any order.
    rows: list[Row] = [*ROWS[40:], sampled, *ROWS[:40]]
    places = [*range(33 + 40, 33 + len(ROWS)), 32, *range(33, 33 + 40)]
    found = case.compiled(isa).sample(spans, places, rows)
    assert found[len(ROWS) - 40] == alone
    del found[len(ROWS) - 40]
    assert found == [*expected[40:], *expected[:40]]


@every_isa
def test_hidden_states_are_those_of_torch_in_any_step(isa: str) -> None:
    case = case_of(spec_of(vocab_size=VOCAB))
    span, row = Span(TOKENS, 0, TABLE), HiddenRow()
    (alone,) = case.compiled(isa).sample([span], [69], [row])
    (reference,) = case.load(None, "fp32").sample([span], [69], [row])
    assert isinstance(alone, Embedding) and isinstance(reference, Embedding)
    vectors = [torch.tensor(array("f", one.values)) for one in (alone, reference)]
    assert torch.cosine_similarity(*vectors, dim=0) > 0.999
    model = case.compiled(isa, num_threads=3)
    model.sample([Span(TOKENS[:33], 0, TABLE)], [], [])
    spans = [Span(TOKENS[:20], 0, OTHER_TABLE), Span(TOKENS[33:], 33, TABLE)]
    assert model.sample(spans, [19 + 37, 5, 3], [row, ROWS[5], row])[0] == alone


@every_isa
def test_a_row_that_is_not_finite_fails_alone(isa: str) -> None:
    model = case_of(spec_of(vocab_size=VOCAB)).compiled(isa)
    model.sample([Span(TOKENS[:9], 0, [0]), Span(TOKENS[:9], 0, [1])], [], [])
    spans = [Span([1], 9, [0]), Span([1], 9, [1])]
    healthy = model.sample(spans, range(2), [ROWS[3], ROWS[5]])
    poison(model, [0])
    sick, other = model.sample(spans, range(2), [ROWS[3], ROWS[5]])
    assert isinstance(sick, Failure) and other == healthy[1]
    sick, other = model.sample(spans, range(2), [HiddenRow(), HiddenRow()])
    assert isinstance(sick, Failure) and isinstance(other, Embedding)
