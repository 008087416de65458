"""Log-probabilities in the two forms of the OpenAI API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.core.plan import TokenLogprobs
from headway.text import Detokenizer, Tokenizer

MIN_LOGPROB = -9999.0
"""JSON has no infinity; the OpenAI API has this value for an impossible token."""

ScoredToken = tuple[int, TokenLogprobs]


def chat_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return one entry per output token, end-of-sequence included, as the usage counts them."""
    content = [
        {
            **_entry(token_id, scores.logprob, tokenizer),
            "top_logprobs": [
                _entry(top_id, logprob, tokenizer)
                for top_id, logprob in zip(scores.top_ids, scores.top_logprobs, strict=True)
            ],
        }
        for token_id, scores in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": max(logprob, MIN_LOGPROB),
        "bytes": list(data),
    }


class CompletionLogprobsWriter:
    """Writes the log-probabilities of one choice; detokenizes to know the text offsets."""

    def __init__(self, tokenizer: Tokenizer, detokenizer: Detokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._num_chars = 0

    def skip(self, token_ids: Sequence[int]) -> None:
        """Count the text of tokens that are not written."""
        self._num_chars += len(self._detokenizer.push(token_ids))

    def write(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        offsets: list[int] = []
        for token_id, _ in tokens:
            offsets.append(self._num_chars)
            self._num_chars += len(self._detokenizer.push((token_id,)))
        return {
            "tokens": [self._name(token_id) for token_id, _ in tokens],
            "token_logprobs": [max(scores.logprob, MIN_LOGPROB) for _, scores in tokens],
            "top_logprobs": [self._top(token_id, scores) for token_id, scores in tokens],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, scores: TokenLogprobs) -> dict[str, float]:
        """Return the most likely tokens and the chosen token."""
        pairs = dict(zip(scores.top_ids, scores.top_logprobs, strict=True))
        pairs.setdefault(token_id, scores.logprob)
        return {self._name(name): max(logprob, MIN_LOGPROB) for name, logprob in pairs.items()}

    def _name(self, token_id: int) -> str:
        """Return the token's text; for part of a character, its bytes spelled out.

        The names are keys of an object here and must differ.
        """
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
