"""What sampling must know of the earlier tokens of one request.

All of it follows from the request's tokens, so that a request resumed after preemption, forked, or
sent to another engine samples as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.plan import Failure, NewRequest
from headway.core.request import FailureCause
from headway.executors.grammar import Grammars, GrammarState
from headway.executors.sampling import BadWords, SampleRow, TokenCounts, has_penalties, make_mask
from headway.executors.step_model import Span


class TokensSoFar:
    """Counts, bad words, mask and grammar of one request; each only if its params need it."""

    def __init__(self, new: NewRequest, vocab_size: int, grammars: Grammars | None) -> None:
        params = new.params
        _check_ids("logit_bias", params.logit_bias, vocab_size)
        _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
        self._new = new
        self._num_tokens = 0
        self._counts = TokenCounts() if has_penalties(params) else None
        bad_words = params.bad_words_token_ids
        self._bad_words = BadWords(bad_words) if bad_words else None
        allowed = params.allowed_token_ids
        self._mask = None if allowed is None else make_mask(allowed, vocab_size)
        self.grammar: GrammarState | None = None
        if params.grammar is not None:
            self.grammar = GrammarState(params.grammar, vocab_size, grammars)
            self._mask = self.grammar.mask
        self._follows_tokens = bool(self._counts or self._bad_words or self.grammar)
        self._add(new.token_ids)

    def catch_up(self, span: Span) -> None:
        """Add the tokens that a plan brings for the first time."""
        if self._follows_tokens:
            self._add(span.token_ids[max(0, self._num_tokens - span.start) :])

    def row(self, position: int) -> SampleRow:
        """Return how to sample the token at a position, which all tokens so far precede."""
        new = self._new
        return SampleRow(
            new.params,
            new.seed,
            new.index,
            position,
            position - new.num_prompt_tokens,
            self._counts,
            () if self._bad_words is None else self._bad_words.next_ids,
            self._mask,
        )

    @property
    def failure(self) -> Failure | None:
        """Why the request cannot go on; None if it can."""
        if self.grammar is None or not self.grammar.error:
            return None
        message = f"the grammar cannot go on: {self.grammar.error}"
        return Failure(message, FailureCause.GRAMMAR)

    def _add(self, token_ids: Sequence[int]) -> None:
        if not self._follows_tokens or not token_ids:
            return
        num_prompt = max(0, self._new.num_prompt_tokens - self._num_tokens)
        self._num_tokens += len(token_ids)
        if self._counts is not None:
            self._counts.add(token_ids, num_prompt)
        output_ids = token_ids[num_prompt:]
        if output_ids and self._bad_words is not None:
            self._bad_words.add(output_ids)
        if output_ids and self.grammar is not None:
            self.grammar.add(output_ids)


def _check_ids(name: str, token_ids: Sequence[int] | dict[int, float], vocab_size: int) -> None:
    if max(token_ids, default=0) >= vocab_size:
        raise ValueError(f"a token id of {name} is outside the vocabulary")
