"""A reply as its client reads it: reasoning, text and tool calls, from text in pieces.

All state follows from the text so far, so a reply can be read again from its start and continued
anywhere: after a crash, on another replica, by a client that comes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from headway.text.grammar import read_note
from headway.text.reasoning import ReasoningSplitter, ReasoningStart
from headway.text.tools.deltas import ReplyDelta, join
from headway.text.tools.forms import FORMS, CallForm
from headway.text.tools.parser import CallParser
from headway.text.tools.xml import NOTE, XmlReader


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """What a reply may contain beside text; plain values, to be sent to another frontend."""

    calls: str = ""
    """Name of the form of tool calls; empty for none."""
    reasoning: ReasoningStart = ReasoningStart.NEVER

    @property
    def is_known(self) -> bool:
        return not self.calls or self.calls in FORMS


TEXT_ONLY = ReplyForm()


class ReplyParser:
    """Reads one reply."""

    def __init__(self, form: ReplyForm, grammar: str | None = None) -> None:
        self._splitter = ReasoningSplitter(form.reasoning)
        self._calls = _call_parser(FORMS[form.calls], grammar) if form.calls else None

    @property
    def ends_with_calls(self) -> bool:
        """Whether the reply so far has tool calls, all complete."""
        calls = self._calls
        return calls is not None and calls.num_calls > 0 and not calls.is_in_call

    @property
    def num_held(self) -> int:
        """Characters at the end of the reply so far that may still become its text."""
        return self._splitter.num_held + (0 if self._calls is None else self._calls.num_held)

    def feed(self, text: str) -> ReplyDelta:
        """Return what is safe to send."""
        reasoning, text = self._splitter.feed(text)
        if self._calls is None:
            return ReplyDelta(reasoning, text)
        return join((ReplyDelta(reasoning), self._calls.feed(text)))

    def finish(self) -> ReplyDelta:
        """Return what was held back; no text may follow."""
        reasoning, text = self._splitter.finish()
        if self._calls is None:
            return ReplyDelta(reasoning, text)
        return join((ReplyDelta(reasoning), self._calls.feed(text), self._calls.finish()))


def _call_parser(form: CallForm, grammar: str | None) -> CallParser:
    if not form.has_xml_arguments:
        return CallParser(form)
    return CallParser(form, partial(XmlReader, read_note(grammar, NOTE) or {}))
