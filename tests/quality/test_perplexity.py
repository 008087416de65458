"""The measure itself, on a model whose likelihoods are known by construction."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from benchmarks.live.perplexity import BLOCK_SIZE, CHUNK, NUM_BLOCKS, WINDOW, Quality, perplexity
from headway.executors.step_model import Span

VOCAB = 50
BOS = 49
MARGIN = 3.0
HIT = math.log(math.exp(MARGIN) + VOCAB - 1) - MARGIN
MISS = HIT + MARGIN
COUNTING = [at % 40 for at in range(3 * WINDOW + 100)]


class Counter:
    """Expects the next token to be one more than the last, by a margin of MARGIN nats.

    Keeps what it was given by block table, as a model keeps keys and values.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, factor: float = 1.0) -> None:
        self.contexts: list[list[int]] = []
        self._dtype = dtype
        self._factor = factor
        self._open: dict[Sequence[int], list[int]] = {}

    def logits(self, spans: Sequence[Span], places: Sequence[int]) -> np.ndarray:
        blocks = [block for span in spans for block in span.block_ids]
        assert len(set(blocks)) == len(blocks), "two spans share a block"
        assert all(0 <= block < NUM_BLOCKS for block in blocks)
        last: list[int] = []
        for span in spans:
            assert 0 < len(span.token_ids) <= CHUNK
            assert span.end <= len(span.block_ids) * BLOCK_SIZE
            if span.start == 0:
                self._open[span.block_ids] = []
                self.contexts.append(self._open[span.block_ids])
            context = self._open[span.block_ids]
            assert span.start == len(context), "a chunk is missing"
            context += span.token_ids
            last += span.token_ids
        logits = torch.zeros((len(last), VOCAB), dtype=self._dtype)
        logits[range(len(last)), [(token + 1) % VOCAB for token in last]] = MARGIN
        return (logits[list(places)] * self._factor).float().numpy()


def mean(num_hits: int, num_misses: int) -> float:
    return (num_hits * HIT + num_misses * MISS) / (num_hits + num_misses)


def test_every_token_but_the_first_is_scored_once() -> None:
    model = Counter()
    quality = perplexity(model, COUNTING)
    num_wraps = COUNTING[1:].count(0)
    assert quality.num_scored == len(COUNTING) - 1
    assert quality.nll == pytest.approx(mean(quality.num_scored - num_wraps, num_wraps), abs=1e-6)
    assert quality.perplexity == pytest.approx(math.exp(quality.nll))
    assert [token for context in model.contexts for token in context] == COUNTING[:-1]
    assert [len(context) for context in model.contexts] == [WINDOW, WINDOW, WINDOW, 99]


def test_a_bos_token_begins_every_window_and_the_first_token_is_scored_too() -> None:
    model = Counter()
    quality = perplexity(model, COUNTING, bos_token_id=BOS)
    # After BOS the counter expects token 0.
    firsts = [COUNTING[at] for at in range(0, len(COUNTING), WINDOW)]
    num_misses = COUNTING[1:].count(0) + sum(first != 0 for first in firsts)
    assert quality.num_scored == len(COUNTING)
    assert quality.nll == pytest.approx(mean(len(COUNTING) - num_misses, num_misses), abs=1e-6)
    assert [context[0] for context in model.contexts] == [BOS] * 4
    assert all(len(context) <= WINDOW for context in model.contexts)


@pytest.mark.parametrize("num_tokens", [2, CHUNK, CHUNK + 1, WINDOW, WINDOW + 1, WINDOW + 2])
def test_windows_and_chunks_may_end_anywhere(num_tokens: int) -> None:
    assert perplexity(Counter(), COUNTING[:num_tokens]).num_scored == num_tokens - 1


def test_bf16_logits_are_summed_in_more_than_bf16() -> None:
    assert perplexity(Counter(torch.bfloat16), [0, 1, 2]).nll == pytest.approx(HIT, abs=1e-6)


def test_greedy_tokens_are_compared_place_by_place() -> None:
    ours, theirs = Quality(1.0, (1, 2, 3, 4)), Quality(1.0 + math.log(2), (1, 2, 9, 4))
    assert ours.share_same_greedy(theirs) == 0.75
    assert theirs.ratio_to(ours) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="zip"):
        ours.share_same_greedy(Quality(1.0, (1,)))


def test_a_model_that_answers_nan_has_no_quality() -> None:
    with pytest.raises(ValueError, match="NaN"):
        perplexity(Counter(factor=math.nan), [0, 1, 2])
