"""What a sampler must know of each row: parameters, random number, tokens so far, mask."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.core.params import SamplingParams
from headway.executors.rng import uniform


class TokenCounts:
    """Tokens of a request so far, each once, for penalties."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.ids = array("i")
        self.output_counts = array("f")
        """How often the output has each id."""
        self._places: dict[int, int] = {}

    def add(self, token_ids: Sequence[int], num_prompt: int) -> None:
        """Add tokens; the first `num_prompt` belong to the prompt."""
        for number, token_id in enumerate(token_ids):
            place = self._places.setdefault(token_id, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token_id)
                self.output_counts.append(0.0)
            if number >= num_prompt:
                self.output_counts[place] += 1.0
        self.num_tokens += len(token_ids)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits: its request and its sampling parameters.

    `position` is the number of tokens before the token to sample.
    """

    params: SamplingParams
    seed: int
    index: int
    position: int
    num_outputs: int
    counts: TokenCounts | None = None
    bad_ids: tuple[int, ...] = ()
    """Tokens that would complete a bad word."""
    mask: np.ndarray | None = None
    """Tokens that may be sampled: one bit per token in int32 words, lowest bit first."""

    @property
    def draw(self) -> float:
        """The random number of the row, in [0, 1)."""
        return uniform(self.seed, self.index, self.position)

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Tokens that must not be sampled now, by min_tokens and bad_words."""
        if self.num_outputs < self.params.min_tokens:
            return self.params.stop_token_ids + self.bad_ids
        return self.bad_ids

    @property
    def is_adjusted(self) -> bool:
        """Whether logits change one by one, apart from the mask."""
        return bool(self.banned_ids or self.params.logit_bias) or self.counts is not None

    @property
    def needs_logits(self) -> bool:
        """Whether the row needs more than its most likely token within its mask."""
        params = self.params
        return self.is_adjusted or not params.is_greedy or params.logprobs is not None


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One row of logits that scores the next token of a prompt."""

    next_id: int
    num_top: int
    """Likeliest tokens to list."""


@dataclass(frozen=True, slots=True)
class HiddenRow:
    """One row of hidden states, for an embedding."""


Row = SampleRow | ScoreRow | HiddenRow


class BadWords:
    """Token sequences that must not be sampled, compared with the end of the output."""

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        self._sequences = sequences
        self._num_kept = max(map(len, sequences)) - 1
        self._tail: tuple[int, ...] = ()

    def add(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the output."""
        tail = (*self._tail, *token_ids)
        self._tail = tail[len(tail) - self._num_kept :] if len(tail) > self._num_kept else tail

    @property
    def next_ids(self) -> tuple[int, ...]:
        """Tokens that would complete a sequence."""
        tail = self._tail
        return tuple(
            ids[-1]
            for ids in self._sequences
            if len(ids) == 1 or tail[-(len(ids) - 1) :] == ids[:-1]
        )


def make_mask(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """Return the mask that allows these tokens only."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def has_penalties(params: SamplingParams) -> bool:
    """Whether sampling depends on earlier tokens, so that counts are needed."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )
