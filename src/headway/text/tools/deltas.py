"""What a reply gained: reasoning, text and parts of tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of one tool call; the first part of a call has its name."""

    number: int
    """Of the call in its reply, from 0."""
    arguments: str = ""
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """What a reply gained, in this order: reasoning, text, calls."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.text or self.calls)


def join(deltas: Sequence[ReplyDelta]) -> ReplyDelta:
    """Return several deltas of one reply as one, with one part per call."""
    parts: dict[int, list[CallDelta]] = {}
    for part in (part for delta in deltas for part in delta.calls):
        parts.setdefault(part.number, []).append(part)
    return ReplyDelta(
        "".join([delta.reasoning for delta in deltas]),
        "".join([delta.text for delta in deltas]),
        tuple(
            CallDelta(number, "".join([one.arguments for one in found]), found[0].name)
            for number, found in parts.items()
        ),
    )
