"""Finds stop strings in text that arrives in pieces.

The match that ends first wins; of two that end together, the longer. The result does not depend on
how the text was split. Only text that may become a stop string is buffered. An Aho-Corasick
automaton looks at each character once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from headway.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that is safe to send, and the stop string that was found, if any."""

    text: str
    stop: str | None = None


class StopStrings:
    """Stop strings of one sample, and the state of the match."""

    def __init__(self, stops: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        self._begin(_build(stops), include_stop_str_in_output)

    def _begin(self, root: _Node, include_stop: bool) -> None:
        self._root = root
        self._state = root
        self._pending_text = _PendingText()
        self._include_stop = include_stop
        self._stop: str | None = None

    def fresh(self) -> StopStrings:
        """Return a matcher for another sample, which shares the automaton."""
        other = StopStrings.__new__(StopStrings)
        other._begin(self._root, self._include_stop)
        return other

    def feed(self, delta: str) -> TextDelta:
        """Return the text that is safe to send; after a match all text is dropped."""
        if self._stop is not None:
            return TextDelta("", self._stop)
        if not self._root.next:
            return TextDelta(delta)
        num_before = self._pending_text.size
        self._pending_text.append(delta)
        for position, character in enumerate(delta, start=num_before + 1):
            self._state = _advance(self._root, self._state, character)
            stop = self._state.stop
            if stop is not None:
                self._stop = stop
                end = position if self._include_stop else position - len(stop)
                return TextDelta(self._pending_text.take(end), stop)
        return TextDelta(self._pending_text.take(self._pending_text.size - self._state.depth))

    def finish(self) -> TextDelta:
        """Return the buffered text: no more text follows."""
        if self._stop is not None:
            return TextDelta("", self._stop)
        self._state = self._root
        return TextDelta(self._pending_text.take(self._pending_text.size))

    def check(self) -> None:
        """Check that the buffered text is the matched prefix of a stop string."""
        if self._stop is None and self._pending_text.size != self._state.depth:
            raise AssertionError(
                f"holds {self._pending_text.size} characters at {self._state.depth}"
            )
        self._pending_text.check()


@dataclass(slots=True, eq=False)
class _Node:
    depth: int
    stop: str | None = None
    next: dict[str, _Node] = field(default_factory=dict)
    fallback: _Node | None = None


def _build(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        if not stop:
            raise InvalidRequestError("a stop string must not be empty", param="stop")
        node = root
        for character in stop:
            node = node.next.setdefault(character, _Node(node.depth + 1))
        node.stop = stop
    # Breadth first: a node's fallback is shallower, so it is complete when the node needs it.
    pending = deque([root])
    while pending:
        node = pending.popleft()
        for character, child in node.next.items():
            child.fallback = root if node is root else _advance(root, node.fallback, character)
            # A node's own stop string is longer than the one its fallback ends with.
            child.stop = child.stop or child.fallback.stop
            pending.append(child)
    return root


def _advance(root: _Node, node: _Node | None, character: str) -> _Node:
    while node is not None:
        if character in node.next:
            return node.next[character]
        node = node.fallback
    return root


class _PendingText:
    """Queue of text pieces; taking few characters copies few."""

    def __init__(self) -> None:
        self._pieces: deque[str] = deque()
        self._offset = 0  # characters already taken from the first piece
        self.size = 0

    def append(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            self.size += len(text)

    def take(self, count: int) -> str:
        self.size -= count
        taken = []
        while count:
            piece = self._pieces[0]
            end = min(len(piece), self._offset + count)
            taken.append(piece[self._offset : end])
            count -= end - self._offset
            self._offset = end
            if end == len(piece):
                self._pieces.popleft()
                self._offset = 0
        return "".join(taken)

    def check(self) -> None:
        if self.size != sum(map(len, self._pieces)) - self._offset:
            raise AssertionError(f"miscounted: {self.size} characters buffered")
