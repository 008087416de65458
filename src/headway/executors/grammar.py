"""Token masks of requests with a grammar, made while the model runs.

A mask depends only on the request's output so far, so its computation starts with the step and
overlaps the forward pass; the sampler waits for it. One thread owns all matchers of running
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np

_EVERY_TOKEN = -1


class Matcher(Protocol):
    """The state of one output in its grammar."""

    def consume(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the output; raise ValueError if the grammar does not allow them."""
        ...

    def write_mask(self, mask: np.ndarray) -> None:
        """Write which tokens may be next; raise ValueError if that takes too long."""
        ...


class Grammars(Protocol):
    """Compiled grammars."""

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher before the first token; raise ValueError if it cannot be compiled."""
        ...


class GrammarState:
    """The grammar of one request. After `add`, only the mask thread uses it until a step ends."""

    def __init__(self, grammar: str, vocab_size: int, grammars: Grammars | None) -> None:
        if grammars is None:
            raise ValueError("this engine has no grammars")
        self.mask = np.empty(-(-vocab_size // 32), dtype=np.int32)
        self.error = ""
        """Why the output cannot go on; empty if it can."""
        self._grammar = grammar
        self._grammars = grammars
        self._matcher: Matcher | None = None
        self._added: list[int] = []

    def add(self, token_ids: Sequence[int]) -> None:
        """Add tokens of the output."""
        self._added.extend(token_ids)

    def update_mask(self) -> None:
        """Write the mask of the next token; on an error allow every token and record the error."""
        try:
            if self._matcher is None:
                self._matcher = self._grammars.matcher(self._grammar)
            added, self._added = self._added, []
            if added:
                self._matcher.consume(added)
            self._matcher.write_mask(self.mask)
            if not self.mask.any():
                raise ValueError("no token can be next")
        except Exception as error:  # an error of one request must not fail the others
            self.error = str(error)
            self.mask.fill(_EVERY_TOKEN)


class MaskThread:
    """A thread that writes the masks of a step; started by the first request with a grammar."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def start(self, states: Sequence[GrammarState | None]) -> Future[None] | None:
        """Begin to write the masks of a step; None if there are none to write."""
        present = [state for state in states if state is not None]
        if not present:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "masks")
        return self._thread.submit(_update_masks, present)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()


def _update_masks(states: Sequence[GrammarState]) -> None:
    for state in states:
        state.update_mask()
