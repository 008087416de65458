"""Finds tool calls in a reply that arrives in pieces.

Relies on the grammar of the calls, so it has no error cases: text that follows no form stays text.
The result does not depend on how the reply was split. Nothing is evaluated, and every character is
looked at a bounded number of times.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Protocol

from headway.text.tools.deltas import CallDelta, ReplyDelta, join
from headway.text.tools.forms import NAME_CHARS, CallForm

SPACES = " \t\n\r"
MAX_LEADING_SPACE = 64
"""Whitespace before what may begin a reply (a call, reasoning); a reply with more is text."""


def find_marker(text: str, marker: str) -> tuple[str, str | None, str]:
    """Return the text before a marker, the text after it, and an end that may become the marker.

    The text after it is None if there is no marker.
    """
    before, found, after = text.partition(marker)
    if found:
        return before, after, ""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return text[:-size], None, text[-size:]
    return text, None, ""


class HeldSpace:
    """Holds back whitespace at the end of a text until more text follows."""

    def __init__(self) -> None:
        self._spaces: list[str] = []

    def __len__(self) -> int:
        return sum(map(len, self._spaces))

    def feed(self, text: str) -> str:
        """Return the text that is followed by no whitespace alone."""
        body = text.rstrip(SPACES)
        if not body:
            self._spaces.append(text)
            return ""
        released = "".join(self._spaces) + body
        self._spaces = [text[len(body) :]]
        return released

    def take(self) -> str:
        """Return the whitespace that is held back; it is held no longer."""
        released, self._spaces = "".join(self._spaces), []
        return released


class ArgumentsReader(Protocol):
    """Reads the arguments of one call."""

    @property
    def is_complete(self) -> bool: ...

    def feed(self, text: str) -> tuple[str, str]:
        """Return JSON text of the arguments, and what comes after them."""
        ...


class ArgumentsReaders(Protocol):
    """Makes readers of arguments."""

    def __call__(self, name: str) -> ArgumentsReader:
        """Return a reader for a call of the tool with this name."""
        ...


class JsonReader:
    """Reads one JSON object: it ends with the brace that closes its first one."""

    def __init__(self, name: str = "") -> None:
        del name
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self.is_complete = False

    def feed(self, text: str) -> tuple[str, str]:
        start = 0
        if not self._depth:
            start = len(text) - len(text.lstrip(SPACES))
        for at in range(start, len(text)):
            self._step(text[at])
            if self.is_complete:
                return text[start : at + 1], text[at + 1 :]
        return text[start:], ""

    def _step(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_in_string:
            self._is_escaped = character == "\\"
            self._is_in_string = character != '"'
        elif character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            self.is_complete = self._depth <= 0


class _State(Enum):
    START = auto()
    """Nothing but whitespace so far, in a form whose calls follow no text."""
    TEXT = auto()
    BEFORE_NAME = auto()
    NAME = auto()
    AFTER_NAME = auto()
    ARGUMENTS = auto()
    AFTER_ARGUMENTS = auto()
    AFTER_CALL = auto()
    PLAIN = auto()
    """Text to the end: the reply follows no form."""


class CallParser:
    """Splits one reply into text and tool calls."""

    def __init__(self, form: CallForm, read_arguments: ArgumentsReaders = JsonReader) -> None:
        self._form = form
        self._read_arguments = read_arguments
        self._state = _State.TEXT if form.follows_text else _State.START
        self._pending = ""
        """Text that may become a marker, or that belongs to a call without a name yet."""
        self._space = HeldSpace()
        self._expected = ""
        """What must come next, without whitespace."""
        self._name = ""
        self._arguments: ArgumentsReader | None = None
        self.num_calls = 0

    @property
    def is_in_call(self) -> bool:
        """Whether the last call is not complete."""
        return self.num_calls > 0 and self._state is not _State.AFTER_CALL

    @property
    def num_held(self) -> int:
        """Characters at the end of the text so far that may still become text of the reply."""
        return 0 if self.num_calls else len(self._space) + len(self._pending)

    def feed(self, text: str) -> ReplyDelta:
        deltas: list[ReplyDelta] = []
        while text:
            delta, text = self._step(text)
            deltas.append(delta)
        return join(deltas)

    def finish(self) -> ReplyDelta:
        """Return what was held back; no text may follow."""
        pending, self._pending = self._pending, ""
        return ReplyDelta(text=self._space.take() + pending if not self.num_calls else "")

    def _step(self, text: str) -> tuple[ReplyDelta, str]:
        """Return what a part of the text means, and the rest of the text."""
        match self._state:
            case _State.TEXT:
                return self._step_text(text)
            case _State.START:
                return self._step_start(text)
            case _State.NAME:
                return self._step_name(text)
            case _State.ARGUMENTS:
                return self._step_arguments(text)
            case _State.PLAIN:
                return ReplyDelta(text=text), ""
            case _:
                return self._step_expected(text)

    def _step_text(self, text: str) -> tuple[ReplyDelta, str]:
        marker = self._form.marker
        before, after, self._pending = find_marker(self._pending + text, marker)
        shown = self._space.feed(before) if before else ""
        if after is None:
            # Whitespace before what may be a marker is held back with it.
            return ReplyDelta(text=shown), ""
        self._pending = self._space.take() + marker
        self._expect(_State.BEFORE_NAME, self._form.start.removeprefix(marker))
        return ReplyDelta(text=shown), after

    def _step_start(self, text: str) -> tuple[ReplyDelta, str]:
        self._pending += text
        body = self._pending.lstrip(SPACES)
        has_room = len(self._pending) - len(body) <= MAX_LEADING_SPACE
        if not body and has_room:
            return ReplyDelta(), ""
        text, self._pending = self._pending, ""
        if not (has_room and body.startswith(self._form.marker)):
            self._state = _State.PLAIN
            return ReplyDelta(), text
        self._expect(_State.BEFORE_NAME, self._form.start)
        return ReplyDelta(), text

    def _step_expected(self, text: str) -> tuple[ReplyDelta, str]:
        for at, character in enumerate(text):
            if character in SPACES:
                continue
            if not self._expected:
                return self._next_state(text[at:])
            if self._state is _State.AFTER_CALL and character == self._form.closing:
                continue
            if character != self._expected[0]:
                return self._give_up(text[at:], text[:at])
            self._expected = self._expected[1:]
            if not self._expected:
                return self._next_state(text[at + 1 :], text[: at + 1])
        self._keep(text)
        return ReplyDelta(), ""

    def _next_state(self, rest: str, consumed: str = "") -> tuple[ReplyDelta, str]:
        """Go on after an expected text."""
        match self._state:
            case _State.BEFORE_NAME | _State.AFTER_CALL:
                self._keep(consumed)
                self._state, self._name = _State.NAME, ""
            case _State.AFTER_NAME:
                self._state = _State.ARGUMENTS
                self._arguments = self._read_arguments(self._name)
            case _:
                self._end_call()
        return ReplyDelta(), rest

    def _step_name(self, text: str) -> tuple[ReplyDelta, str]:
        size = next((at for at, one in enumerate(text) if one not in NAME_CHARS), len(text))
        self._name += text[:size]
        self._keep(text[:size])
        if size == len(text):
            return ReplyDelta(), ""
        call = CallDelta(self.num_calls, name=self._name)
        self.num_calls += 1
        self._pending = ""
        self._expect(_State.AFTER_NAME, self._form.after_name)
        return ReplyDelta(calls=(call,)), text[size:]

    def _step_arguments(self, text: str) -> tuple[ReplyDelta, str]:
        reader = self._arguments
        if reader is None:
            raise AssertionError("arguments without a call")
        arguments, rest = reader.feed(text)
        if reader.is_complete:
            self._arguments = None
            self._expect(_State.AFTER_ARGUMENTS, self._form.after_arguments)
            if not self._expected:
                self._end_call()
        part = (CallDelta(self.num_calls - 1, arguments),) if arguments else ()
        return ReplyDelta(calls=part), rest

    def _end_call(self) -> None:
        self._expect(_State.AFTER_CALL, self._form.separator + self._form.before_name)

    def _expect(self, state: _State, text: str) -> None:
        self._state, self._expected = state, "".join(text.split())

    def _keep(self, text: str) -> None:
        """Keep the text of a call that has no name yet, in case it is cut."""
        if not self.num_calls:
            self._pending += text

    def _give_up(self, rest: str, consumed: str) -> tuple[ReplyDelta, str]:
        """Take what was held back, and all that follows, as text."""
        self._keep(consumed)
        pending, self._pending = self._pending, ""
        self._state = _State.PLAIN
        return ReplyDelta(text=pending), rest
