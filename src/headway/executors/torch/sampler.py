"""Logits to tokens, for all requests of a step at once: the reference of the compiled sampler.

Plain greedy rows share one pass over the logits. Other rows are copied and changed in this order:
mask, min_tokens and bad_words, logit_bias, penalties, temperature, min_p, top_k, top_p. Each stage
works on the result of the stage before. Log-probabilities are those of the model before any change.

Probs are not normalized: exp((logit - best) / temperature) in fp64, the softmax before its
division, exactly 1 for the best token. So samplers whose exp differs by 1e-12 draw the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headway.core.params import SamplingParams
from headway.core.plan import Failure, Sample, TokenLogprobs
from headway.executors.sampling import SampleRow, ScoreRow

_USUAL_CUT = 1024
"""Filters rarely keep more tokens; a top-k of this size is far cheaper than a full sort."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Logits, with the best token and its logit of each row.

    `best` is not finite if any logit of its row is not.
    """

    best: Sequence[float]
    best_ids: Sequence[int]
    logits: torch.Tensor

    @staticmethod
    def of(logits: torch.Tensor) -> Scores:
        best, best_ids = logits.max(dim=-1)
        return Scores(best.tolist(), best_ids.tolist(), logits)

    def row(self, at: int) -> Scores:
        return Scores(self.best[at : at + 1], self.best_ids[at : at + 1], self.logits[at : at + 1])


def sample(scores: Scores, rows: Sequence[SampleRow]) -> list[Sample | Failure]:
    """Return one token per row; a row that cannot be sampled fails alone."""
    try:
        return _sample(scores, rows)
    except Exception as error:
        if len(rows) == 1:
            return [Failure(f"sampling failed: {error}")]
        # Sample each row alone to find the row that fails.
        return [sample(scores.row(at), [row])[0] for at, row in enumerate(rows)]


def _sample(found: Scores, rows: Sequence[SampleRow]) -> list[Sample | Failure]:
    outcomes: dict[int, Failure] = {}
    token_ids = [*found.best_ids]
    outcomes |= _failures(range(len(rows)), found.best)
    logits = found.logits
    special = [
        at
        for at, row in enumerate(rows)
        if at not in outcomes
        and (row.is_adjusted or row.mask is not None or not row.params.is_greedy)
    ]
    if special:
        scores = logits[special].float()
        for score, at in zip(scores, special, strict=True):
            _adjust(score, rows[at])
        outcomes |= _failures(special, scores.amax(dim=-1).tolist())
        kept = [row_index for row_index, at in enumerate(special) if at not in outcomes]
        chosen = _choose(scores[kept], [rows[special[row_index]] for row_index in kept])
        for row_index, token_id in zip(kept, chosen, strict=True):
            token_ids[special[row_index]] = token_id

    sampled = [at for at in range(len(rows)) if at not in outcomes]
    logprobs = _logprobs(logits, {at: rows[at] for at in sampled}, token_ids)
    return [
        outcomes.get(at) or Sample((token_id,), logprobs.get(at))
        for at, token_id in enumerate(token_ids)
    ]


def _failures(places: Iterable[int], best: Sequence[float]) -> dict[int, Failure]:
    # The maximum is NaN if any score is, and infinite if one is +inf or all are -inf.
    return {
        at: Failure(f"the model's scores are not finite ({value})")
        for at, value in zip(places, best, strict=True)
        if not math.isfinite(value)
    }


def _adjust(scores: torch.Tensor, row: SampleRow) -> None:
    """Apply in place all stages that can change the most likely token."""
    params, counts = row.params, row.counts
    if row.mask is not None:
        bits = np.unpackbits(row.mask.view(np.uint8), bitorder="little")[: len(scores)]
        scores[torch.from_numpy(bits == 0).to(scores.device)] = -torch.inf
    # An id outside the vocabulary cannot be sampled and needs no ban.
    scores[[token_id for token_id in row.banned_ids if token_id < len(scores)]] = -torch.inf
    if params.logit_bias:
        scores[list(params.logit_bias)] += scores.new_tensor(list(params.logit_bias.values()))
    if counts is not None:
        ids = torch.tensor(counts.ids, dtype=torch.int64, device=scores.device)
        output_counts = scores.new_tensor(counts.output_counts)
        seen, penalty = scores[ids], params.repetition_penalty
        seen = torch.where(seen > 0, seen / penalty, seen * penalty)
        seen -= params.frequency_penalty * output_counts
        scores[ids] = seen - params.presence_penalty * (output_counts > 0)


def _choose(scores: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    token_ids: list[int] = scores.argmax(dim=-1).tolist()
    drawing = [at for at, row in enumerate(rows) if not row.params.is_greedy]
    if drawing:
        drawn = _draw(scores[drawing], [rows[at] for at in drawing])
        for at, token_id in zip(drawing, drawn, strict=True):
            token_ids[at] = token_id
    return token_ids


def _draw(scores: torch.Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Return the token of each row by inverting its cumulative distribution."""
    scores = scores.double()
    temperature = scores.new_tensor([[row.params.temperature] for row in rows])
    probs = ((scores - scores.amax(dim=-1, keepdim=True)) / temperature).exp_()
    filtered = [at for at, row in enumerate(rows) if _has_filter(row.params)]
    if filtered:
        params = [rows[at].params for at in filtered]
        probs[filtered] = _keep_likeliest(probs[filtered], params)
    cumulative = probs.cumsum(dim=-1)
    targets = cumulative.new_tensor([[row.draw] for row in rows]) * cumulative[:, -1:]
    # right=True: a token of prob zero spans no interval and is never hit.
    drawn = torch.searchsorted(cumulative, targets, right=True).flatten()
    # A number just below 1 times the total may round up to the total itself.
    return drawn.clamp_(max=scores.shape[-1] - 1).tolist()


def _has_filter(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where to cut each row: `num_tied` of the tokens exactly at `threshold` stay.

    Rows with `is_known` false need a larger top-k.
    """

    threshold: torch.Tensor
    num_tied: torch.Tensor
    is_known: torch.Tensor


def _keep_likeliest(probs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Zero what min_p, top_k and top_p remove; ties keep the lower ids."""
    vocab_size = probs.shape[-1]
    # One more than top_k keeps, to see whether top_k cuts.
    width = 1 + max(min(p.top_k or _USUAL_CUT, _USUAL_CUT) for p in params)
    cut = _cut(probs, params, min(width, vocab_size))
    wide = [at for at, is_known in enumerate(cut.is_known.tolist()) if not is_known]
    if wide:
        whole = _cut(probs[wide], [params[at] for at in wide], vocab_size)
        cut.threshold[wide] = whole.threshold
        cut.num_tied[wide] = whole.num_tied
    is_tied = probs == cut.threshold
    keeps_tied = is_tied & (is_tied.cumsum(dim=-1, dtype=torch.int32) <= cut.num_tied)
    return probs.where((probs > cut.threshold) | keeps_tied, 0.0)


def _cut(probs: torch.Tensor, params: Sequence[SamplingParams], width: int) -> _Cut:
    """Return the cut of all filters together.

    Each filter keeps a prefix of the tokens in falling order, so all together keep a prefix.
    """
    vocab_size = probs.shape[-1]
    top = probs.topk(width).values
    top_k = torch.tensor([[p.top_k or vocab_size] for p in params], device=top.device)
    top_p = top.new_tensor([[p.top_p] for p in params])
    min_p = top.new_tensor([[p.min_p] for p in params])

    stays = (top >= min_p * top[:, :1]) & (torch.arange(width, device=top.device) < top_k)
    mass = (top * stays).cumsum(dim=-1)
    # If the first two filters cut nothing within `width`, they must cut nothing at all for the
    # total that top_p is a share of to be known: it is then that of all tokens.
    is_open = stays[:, -1:] & (width < vocab_size)
    total = torch.where(is_open, probs.sum(dim=-1, keepdim=True), mass[:, -1:])
    stays &= mass - top < torch.where(top_p < 1.0, top_p * total, torch.inf)
    cuts_nothing = (top_k >= vocab_size) & (min_p == 0)
    is_known = ~is_open | (cuts_nothing & ~stays[:, -1:])

    num_kept = stays.sum(dim=-1, keepdim=True).clamp_(min=1)
    threshold = top.gather(1, num_kept - 1)
    num_tied = num_kept - (top > threshold).sum(dim=-1, keepdim=True)
    return _Cut(threshold, num_tied, is_known.flatten())


def _logprobs(
    logits: torch.Tensor, rows: Mapping[int, SampleRow], token_ids: Sequence[int]
) -> dict[int, tuple[TokenLogprobs]]:
    asked = {at: row.params.logprobs for at, row in rows.items() if row.params.logprobs is not None}
    if not asked:
        return {}
    ids = [token_ids[at] for at in asked]
    found = _rate(logits[list(asked)], ids, list(asked.values()))
    return {at: (one,) for at, one in zip(asked, found, strict=True)}


def _rate(
    logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Return the log-probabilities of a token of each row, and of so many likeliest."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen_ids = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    chosen = logprobs.gather(1, chosen_ids)
    ranks = (logits > logits.gather(1, chosen_ids)).sum(dim=-1) + 1
    top = logprobs.topk(min(max(counts), logprobs.shape[-1]), dim=-1)
    columns = (chosen.flatten(), ranks, top.indices, top.values)
    return [
        TokenLogprobs(logprob, rank, tuple(ids[:count]), tuple(values[:count]))
        for count, logprob, rank, ids, values in zip(
            counts, *(column.tolist() for column in columns), strict=True
        )
    ]


def score(logits: torch.Tensor, rows: Sequence[ScoreRow]) -> list[TokenLogprobs | Failure]:
    """Return the log-probabilities of the next token of each row."""
    failures = _failures(range(len(rows)), logits.max(dim=-1).values.tolist())
    found = _rate(logits, [row.next_id for row in rows], [row.num_top for row in rows])
    return [failures.get(at) or one for at, one in enumerate(found)]
