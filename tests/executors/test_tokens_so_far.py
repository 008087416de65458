"""What sampling knows of earlier tokens follows from the tokens, in whatever pieces they come."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headway.core.params import SamplingParams
from headway.core.plan import NewRequest
from headway.executors.sampling import BadWords, make_mask
from headway.executors.step_model import Span
from headway.executors.tokens_so_far import TokensSoFar

VOCAB = 80


def by_vllm(sequences: Sequence[tuple[int, ...]], outputs: Sequence[int]) -> list[int]:
    """The banned tokens by the rule of vLLM's bad_words processor."""
    banned = []
    for ids in sequences:
        if len(ids) > len(outputs) + 1:
            continue
        before = [*outputs[len(outputs) - len(ids) + 1 :]]
        if before == [*ids[:-1]]:
            banned.append(ids[-1])
    return banned


def test_bad_words_are_banned_as_in_vllm():
    draw = random.Random(5)
    for _ in range(300):
        sequences = [
            tuple(draw.randrange(4) for _ in range(draw.randrange(1, 5))) for _ in range(6)
        ]
        outputs = [draw.randrange(4) for _ in range(12)]
        words = BadWords(sequences)
        for at in range(len(outputs)):
            assert [*words.next_ids] == by_vllm(sequences, outputs[:at])
            words.add(outputs[at : at + 1])


@pytest.mark.parametrize("vocab_size", [16, 48, 80])
def test_a_mask_has_the_bits_of_its_tokens(vocab_size):
    draw = random.Random(vocab_size)
    ids = sorted(draw.sample(range(vocab_size), 7))
    bits = np.unpackbits(make_mask(ids, vocab_size).view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == ids


def state_of(params: SamplingParams, tokens: Sequence[int], num_prompt: int) -> TokensSoFar:
    return TokensSoFar(NewRequest(params, 1, 0, tuple(tokens), num_prompt), VOCAB, None)


def row_after(state: TokensSoFar, tokens: Sequence[int]) -> Any:
    row = state.row(len(tokens))
    counts = row.counts
    return row.banned_ids, counts and (counts.ids, counts.output_counts), row.num_outputs


def test_resumed_requests_know_what_they_knew():
    """A request sent as new with its output is where one is that got its tokens step by step."""
    params = SamplingParams(
        bad_words_token_ids=((3,), (1, 2), (2, 2, 4)), presence_penalty=0.5, min_tokens=2
    )
    tokens = [5, 6, 1, 2, 2, 1, 2]
    steps = state_of(params, tokens[:2], 2)
    for at in range(2, len(tokens)):
        assert row_after(steps, tokens[:at]) == row_after(
            state_of(params, tokens[:at], 2), tokens[:at]
        )
        steps.catch_up(Span(tokens[at : at + 1], at, [0]))
    # A prompt is no output, however it is chunked.
    chunked = state_of(params, tokens, len(tokens))
    chunked.catch_up(Span(tokens[:4], 0, [0]))
    chunked.catch_up(Span(tokens[4:], 4, [0]))
    assert chunked.row(len(tokens)).bad_ids == (3,)


def test_ids_outside_the_vocabulary_are_refused():
    bias = SamplingParams(logit_bias={VOCAB: 1.0})
    for params in (bias, SamplingParams(allowed_token_ids=(3, VOCAB))):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            state_of(params, [1], 1)


def test_a_request_with_a_grammar_needs_grammars():
    with pytest.raises(ValueError, match="no grammars"):
        state_of(SamplingParams(grammar='start: "a"'), [1], 1)
