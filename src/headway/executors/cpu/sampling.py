"""Sampling settings and log-probabilities in the structs of the kernels."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np

from headway.core.plan import Embedding, Failure, TokenLogprobs
from headway.executors.cpu import kernels
from headway.executors.sampling import SampleRow, ScoreRow


class Samplings:
    """Structs of sampled rows; keeps alive the arrays that they point to."""

    def __init__(self, rows: Sequence[SampleRow], vocab_size: int) -> None:
        self.structs = (kernels.Sampling * len(rows))()
        self.logprobs = (kernels.Logprobs * len(rows))()
        self._rows = rows
        self._vocab_size = vocab_size
        self._kept: list[array] = []
        for struct, row in zip(self.structs, rows, strict=True):
            self._fill(struct, row)

    def logprobs_of(self, at: int) -> tuple[TokenLogprobs] | None:
        """Return the log-probabilities of a row; None if its request wants none."""
        count = self._rows[at].params.logprobs
        if count is None:
            return None
        return (_read_logprobs(self.logprobs[at], min(count, self._vocab_size)),)

    def _fill(self, struct: kernels.Sampling, row: SampleRow) -> None:
        params, counts = row.params, row.counts
        struct.num_logprobs = -1 if params.logprobs is None else params.logprobs
        if not params.is_greedy:
            struct.draw, struct.temperature = row.draw, params.temperature
            struct.top_p, struct.min_p = params.top_p, params.min_p
            struct.top_k = min(params.top_k, self._vocab_size)
        if row.banned_ids:
            # An id outside the vocabulary cannot be sampled and needs no ban.
            ids = array("i", [one for one in row.banned_ids if one < self._vocab_size])
            struct.num_banned, struct.banned_ids = len(ids), self._keep(ids)
        if params.logit_bias:
            struct.num_biases = len(params.logit_bias)
            struct.bias_ids = self._keep(array("i", params.logit_bias))
            struct.biases = self._keep(array("f", params.logit_bias.values()))
        if counts is not None:
            struct.repetition_penalty = params.repetition_penalty
            struct.presence_penalty = params.presence_penalty
            struct.frequency_penalty = params.frequency_penalty
            struct.num_seen, struct.seen_ids = len(counts.ids), self._keep(counts.ids)
            struct.output_counts = self._keep(counts.output_counts)

    def mask_addresses(self, rows: Sequence[SampleRow]) -> int | None:
        """Return the address of the masks' addresses; None if no row has a mask."""
        if all(row.mask is None for row in rows):
            return None
        masks = [0 if row.mask is None else row.mask.ctypes.data for row in rows]
        return self._keep(array("q", masks))

    def _keep(self, numbers: array) -> int:
        self._kept.append(numbers)
        return numbers.buffer_info()[0]


class Scorings:
    """Structs of scored rows, and what the kernels have made of them."""

    def __init__(self, places: Sequence[int], rows: Sequence[ScoreRow], vocab_size: int) -> None:
        self.num_rows = len(rows)
        self.structs = (kernels.Scored * len(rows))(
            *[
                (place, row.next_id, min(row.num_top, vocab_size))
                for place, row in zip(places, rows, strict=True)
            ]
        )
        self.scores = (kernels.Logprobs * len(rows))()

    def outcomes(self) -> list[TokenLogprobs | Failure]:
        """Return the log-probabilities of each row."""
        return [
            Failure(f"the model's scores are not finite ({found.logprob})")
            if math.isnan(found.logprob)
            else _read_logprobs(found, struct.num_top)
            for struct, found in zip(self.structs, self.scores, strict=True)
        ]


class HiddenStates:
    """Hidden states of some tokens, after the final norm."""

    def __init__(self, places: Sequence[int], hidden_size: int) -> None:
        self.rows = array("i", places)
        self.values = np.empty((len(places), hidden_size), dtype=np.float32)

    def outcomes(self) -> list[Embedding | Failure]:
        """Return the embedding of each row."""
        return [
            Embedding(row.tobytes())
            if np.isfinite(row).all()
            else Failure("the model's hidden state is not finite")
            for row in self.values
        ]


def _read_logprobs(found: kernels.Logprobs, count: int) -> TokenLogprobs:
    ids, values = tuple(found.top_ids[:count]), tuple(found.top_logprobs[:count])
    return TokenLogprobs(found.logprob, found.rank, ids, values)
