"""What a sampler must know of each row: parameters, random number, tokens so far."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

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

    @property
    def draw(self) -> float:
        """The random number of the row, in [0, 1)."""
        return uniform(self.seed, self.index, self.position)

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Tokens that must not be sampled yet, by min_tokens."""
        return self.params.stop_token_ids if self.num_outputs < self.params.min_tokens else ()

    @property
    def is_adjusted(self) -> bool:
        return bool(self.banned_ids or self.params.logit_bias) or self.counts is not None

    @property
    def needs_logits(self) -> bool:
        """Whether the row needs more than its most likely token."""
        params = self.params
        return self.is_adjusted or not params.is_greedy or params.logprobs is not None


def has_penalties(params: SamplingParams) -> bool:
    """Whether sampling depends on earlier tokens, so that counts are needed."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )
