"""Splits reasoning between think tags from the rest of a reply."""

from __future__ import annotations

from enum import Enum, StrEnum, auto

from headway.text.tools.parser import MAX_LEADING_SPACE, SPACES, HeldSpace, find_marker

OPEN_TAG = "<think>"
CLOSE_TAG = "</think>"


class ReasoningStart(StrEnum):
    """Whether a reply begins with reasoning."""

    NEVER = "never"
    OPTIONAL = "optional"
    """If it begins with the opening tag."""
    OPEN = "open"
    """Always: the prompt ends with the opening tag."""


class _SplitState(Enum):
    BEFORE = auto()
    INSIDE = auto()
    BEHIND = auto()
    """After the closing tag, before the first text."""
    TEXT = auto()


class ReasoningSplitter:
    """Splits one reply; whitespace around the tags belongs to neither part."""

    def __init__(self, start: ReasoningStart) -> None:
        states = {
            ReasoningStart.NEVER: _SplitState.TEXT,
            ReasoningStart.OPTIONAL: _SplitState.BEFORE,
            ReasoningStart.OPEN: _SplitState.INSIDE,
        }
        self._state = states[start]
        self._pending = ""
        self._space = HeldSpace()
        self._has_reasoning = False

    @property
    def num_held(self) -> int:
        """Characters at the end of the reply so far that may still become its text."""
        return len(self._pending) if self._state is _SplitState.BEFORE else 0

    def feed(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the text that are safe to send."""
        reasoning = ""
        if self._state is _SplitState.BEFORE:
            text = self._find_start(text)
        if self._state is _SplitState.INSIDE:
            reasoning, text = self._split(text)
        if self._state is _SplitState.BEHIND:
            text = text.lstrip(SPACES)
            if text:
                self._state = _SplitState.TEXT
        return reasoning, text

    def finish(self) -> tuple[str, str]:
        """Return what was held back; no text may follow."""
        pending, self._pending = self._pending, ""
        if self._state is not _SplitState.INSIDE:
            return "", pending
        return (self._space.take() + pending) if self._has_reasoning else pending, ""

    def _find_start(self, text: str) -> str:
        """Return the text to go on with, once it shows whether there is reasoning."""
        text = self._pending + text
        body, self._pending = text.lstrip(SPACES), ""
        if len(text) - len(body) > MAX_LEADING_SPACE:
            self._state = _SplitState.TEXT
            return text
        if body.startswith(OPEN_TAG):
            self._state = _SplitState.INSIDE
            return body.removeprefix(OPEN_TAG)
        if OPEN_TAG.startswith(body):
            self._pending = text
            return ""
        self._state = _SplitState.TEXT
        return text

    def _split(self, text: str) -> tuple[str, str]:
        before, after, self._pending = find_marker(self._pending + text, CLOSE_TAG)
        if not self._has_reasoning:
            before = before.lstrip(SPACES)
        reasoning = self._space.feed(before) if before else ""
        self._has_reasoning = self._has_reasoning or bool(reasoning)
        if after is None:
            return reasoning, ""
        self._space.take()
        self._state = _SplitState.BEHIND
        return reasoning, after
