"""Which tokens of a reply are those of its message: not of reasoning, nor of tool calls.

The answer follows from the tokens alone, so it is the same for a whole reply and for a stream,
however that was split.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from headway.server.api.generate.logprobs import ScoredToken
from headway.text import Detokenizer
from headway.text.reply import ReplyParser


@dataclass(slots=True)
class _Span:
    """Tokens that together made a piece of the reply."""

    tokens: list[ScoredToken]
    start: int
    end: int
    is_text: bool = False
    """Whether a part of the piece is text of the message."""


class TextTokens:
    """Takes all tokens of one reply, returns those of the message."""

    def __init__(self, parser: ReplyParser, detokenizer: Detokenizer) -> None:
        self._parser = parser
        self._detokenizer = detokenizer
        self._silent: list[ScoredToken] = []
        """Tokens since the last that completed a character."""
        self._waiting: deque[_Span] = deque()
        self._num_chars = 0
        self._is_text = True
        """Whether what came last is text of the message."""

    def push(self, tokens: Iterable[ScoredToken]) -> list[ScoredToken]:
        """Add tokens; return those of which it is known now that they are in the message."""
        found: list[ScoredToken] = []
        for token in tokens:
            self._silent.append(token)
            found += self._add(self._detokenizer.push((token[0],)))
        return found

    def finish(self) -> list[ScoredToken]:
        """Return the rest; tokens without text at the end belong to what comes before them."""
        found = self._add(self._detokenizer.finish())
        num_shown = len(self._parser.finish().text)
        found += self._judge(self._num_chars, num_shown)
        return found + self._silent if self._is_text else found

    def _add(self, text: str) -> list[ScoredToken]:
        if not text:
            return []
        start, self._num_chars = self._num_chars, self._num_chars + len(text)
        self._waiting.append(_Span(self._silent, start, self._num_chars))
        self._silent = []
        num_shown = len(self._parser.feed(text).text)
        return self._judge(self._num_chars - self._parser.num_held, num_shown)

    def _judge(self, end: int, num_shown: int) -> list[ScoredToken]:
        """Return the tokens of the message before `end`, where `num_shown` characters are text."""
        for span in self._waiting:
            if num_shown and span.start < end and span.end > end - num_shown:
                span.is_text = True
        found: list[ScoredToken] = []
        while self._waiting and self._waiting[0].end <= end:
            span = self._waiting.popleft()
            self._is_text = span.is_text
            if span.is_text:
                found += span.tokens
        return found
