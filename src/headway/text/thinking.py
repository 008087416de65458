"""Bounds the reasoning of a reply: after so many tokens, only its closing tag can follow.

All state follows from the tokens of the reply, as that of its grammar does. The bound is a note of
the grammar, so whoever continues a reply has it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from headway.text.grammar import read_note
from headway.text.reasoning import CLOSE_TAG, OPEN_TAG, ReasoningStart
from headway.text.tools.parser import MAX_LEADING_SPACE, SPACES

NOTE = "thinking"
_OPEN, _CLOSE = OPEN_TAG.encode(), CLOSE_TAG.encode()
_SPACES = SPACES.encode()


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Most tokens before the closing tag, and the tokens of that tag."""

    max_tokens: int
    close_ids: tuple[int, ...]
    start: ReasoningStart = ReasoningStart.OPEN

    def as_note(self) -> dict[str, Any]:
        return asdict(self)


def budget_of(grammar: str) -> ThinkingBudget | None:
    """Return the bound that a grammar has; None without one."""
    note = read_note(grammar, NOTE)
    if note is None:
        return None
    start = ReasoningStart(note["start"])
    return ThinkingBudget(note["max_tokens"], tuple(note["close_ids"]), start)


class GrammarMatcher(Protocol):
    """The state of one output in its grammar."""

    @property
    def is_accepting(self) -> bool: ...

    def consume(self, token_ids: Sequence[int]) -> None: ...

    def write_mask(self, mask: np.ndarray) -> None: ...


class BudgetedMatcher:
    """A matcher that allows only the closing tag once the budget is used up."""

    def __init__(
        self, matcher: GrammarMatcher, budget: ThinkingBudget, token_bytes: Callable[[int], bytes]
    ) -> None:
        self._matcher = matcher
        self._budget = budget
        self._token_bytes = token_bytes
        self._is_thinking = budget.start is ReasoningStart.OPEN
        self._is_over = budget.start is ReasoningStart.NEVER
        self._text = b""
        """The end of the text, as long as a tag may be within it."""
        self._num_tokens = 0
        self._num_closed = 0
        """Tokens of the closing tag so far, once the budget is used up."""

    @property
    def is_accepting(self) -> bool:
        return self._matcher.is_accepting

    def consume(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the output; raise ValueError if the grammar does not allow them."""
        self._matcher.consume(token_ids)
        for token_id in token_ids:
            if self._is_over:
                return
            self._add(token_id)

    def write_mask(self, mask: np.ndarray) -> None:
        """Write which tokens may be next; raise ValueError if a limit is reached."""
        self._matcher.write_mask(mask)
        if not self._is_due:
            return
        next_id = self._budget.close_ids[self._num_closed]
        words = mask.view(np.uint32)
        bit = np.uint32(1 << next_id % 32)
        # Not allowed within a character of several tokens; then the character comes first.
        if words[next_id // 32] & bit:
            words.fill(0)
            words[next_id // 32] = bit

    @property
    def _is_due(self) -> bool:
        is_used_up = self._num_tokens >= self._budget.max_tokens
        return self._is_thinking and not self._is_over and is_used_up

    def _add(self, token_id: int) -> None:
        if self._is_due:
            is_next = token_id == self._budget.close_ids[self._num_closed]
            self._num_closed = self._num_closed + 1 if is_next else 0
        self._num_tokens += 1
        self._text += self._token_bytes(token_id)
        if not self._is_thinking:
            self._find_start()
        elif _CLOSE in self._text:
            self._is_over = True
        else:
            self._text = self._text[-len(_CLOSE) :]

    def _find_start(self) -> None:
        """Decide whether the output begins with reasoning, once it shows."""
        body = self._text.lstrip(_SPACES)
        has_room = len(self._text) - len(body) <= MAX_LEADING_SPACE
        self._is_thinking = has_room and body.startswith(_OPEN)
        self._is_over = not self._is_thinking and not (has_room and _OPEN.startswith(body))
