"""Log-probabilities in the two forms of the OpenAI API, and of prompts as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.core.params import SamplingParams
from headway.core.plan import TokenLogprobs
from headway.engine.client.outputs import PROMPT_TAIL
from headway.text import Detokenizer, Tokenizer

MIN_LOGPROB = -9999.0
"""JSON has no infinity; the OpenAI API has this value for an impossible token."""

ScoredToken = tuple[int, TokenLogprobs]


@dataclass(frozen=True, slots=True)
class TokenNames:
    """How tokens are named: by their text, or by their ids."""

    tokenizer: Tokenizer
    is_by_id: bool = False

    def text(self, token_id: int) -> str:
        """Return the name of a token; several parts of characters may have the same."""
        return f"token_id:{token_id}" if self.is_by_id else self.tokenizer.token_text(token_id)

    def key(self, token_id: int) -> str:
        """Return the name of a token as a key; for part of a character, its bytes spelled out.

        The names are keys of an object and must differ.
        """
        if self.is_by_id:
            return f"token_id:{token_id}"
        data = self.tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokens: Sequence[ScoredToken], names: TokenNames) -> dict[str, Any]:
    """Return one entry per output token, end-of-sequence included, as the usage counts them."""
    content = [
        {
            **_entry(token_id, scores.logprob, names),
            "top_logprobs": [
                _entry(top_id, logprob, names)
                for top_id, logprob in zip(scores.top_ids, scores.top_logprobs, strict=True)
            ],
        }
        for token_id, scores in tokens
    ]
    return {"content": content, "refusal": None}


def _entry(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.text(token_id),
        "logprob": max(logprob, MIN_LOGPROB),
        "bytes": list(names.tokenizer.token_bytes(token_id)),
    }


def prompt_logprobs(
    prompt: Sequence[int], scores: Sequence[TokenLogprobs], num_top: int, names: TokenNames
) -> list[dict[str, Any] | None]:
    """Return the tokens at each position of a prompt by id, as vLLM does; None for the first."""
    entries: list[dict[str, Any] | None] = [None]
    for token_id, one in zip(prompt[1:], scores, strict=True):
        at_position = {str(token_id): _ranked(token_id, one.logprob, one.rank, names)}
        likeliest = zip(one.top_ids[:num_top], one.top_logprobs, strict=False)
        for rank, (top_id, logprob) in enumerate(likeliest, 1):
            at_position.setdefault(str(top_id), _ranked(top_id, logprob, rank, names))
        entries.append(at_position)
    return entries


def _ranked(token_id: int, logprob: float, rank: int, names: TokenNames) -> dict[str, Any]:
    return {
        "logprob": max(logprob, MIN_LOGPROB),
        "rank": rank,
        "decoded_token": names.text(token_id),
    }


class CompletionLogprobsWriter:
    """Writes the log-probabilities of one choice; detokenizes to know the text offsets."""

    def __init__(
        self, tokenizer: Tokenizer, names: TokenNames, prompt: Sequence[int], params: SamplingParams
    ) -> None:
        skips = params.skip_special_tokens
        self._names = names
        self._prompt = prompt
        self._num_top = params.logprobs or 0
        self._before = tokenizer.detokenizer(skips)
        self._detokenizer = tokenizer.detokenizer(skips, after=prompt[-PROMPT_TAIL:])
        self._num_chars = 0

    def skip(self, token_ids: Sequence[int]) -> None:
        """Count the text of tokens that are not written."""
        self._num_chars += len(self._detokenizer.push(token_ids))

    def write_prompt(self, scores: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """Return the prompt's part of the four lists; its text comes before that of the output."""
        offsets = self._offsets(self._prompt, self._before)
        self._num_chars += len(self._before.finish())
        pairs = list(zip(self._prompt[1:], scores, strict=True))
        return {
            "tokens": [self._names.key(token_id) for token_id in self._prompt],
            "token_logprobs": [None, *(max(one.logprob, MIN_LOGPROB) for one in scores)],
            "top_logprobs": [None, *(self._top(token_id, one) for token_id, one in pairs)],
            "text_offset": offsets,
        }

    def write(self, tokens: Sequence[ScoredToken]) -> dict[str, list[Any]]:
        """Return the four lists for tokens of the output."""
        offsets = self._offsets([token_id for token_id, _ in tokens], self._detokenizer)
        return {
            "tokens": [self._names.key(token_id) for token_id, _ in tokens],
            "token_logprobs": [max(scores.logprob, MIN_LOGPROB) for _, scores in tokens],
            "top_logprobs": [self._top(token_id, scores) for token_id, scores in tokens],
            "text_offset": offsets,
        }

    def _offsets(self, token_ids: Sequence[int], detokenizer: Detokenizer) -> list[int]:
        offsets: list[int] = []
        for token_id in token_ids:
            offsets.append(self._num_chars)
            self._num_chars += len(detokenizer.push((token_id,)))
        return offsets

    def _top(self, token_id: int, scores: TokenLogprobs) -> dict[str, float]:
        """Return the most likely tokens and the chosen token."""
        pairs = dict(zip(scores.top_ids[: self._num_top], scores.top_logprobs, strict=False))
        pairs.setdefault(token_id, scores.logprob)
        return {self._names.key(one): max(logprob, MIN_LOGPROB) for one, logprob in pairs.items()}
