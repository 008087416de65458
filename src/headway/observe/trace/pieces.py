"""An account cut into pieces of time: waits, prefill and decode of each part.

The pieces of a part follow each other without a gap. Those of waits add up to `queue_s`, and all of
a request with one part add up to `duration_s`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headway.observe.trace.account import CauseShare, Entry, RequestAccount

QUEUE = "queue"
PREFILL = "prefill"
DECODE = "decode"
ELSEWHERE = "elsewhere"
"""Another frontend had the request."""
LEFT_OUT = "left_out"
"""The timeline was too long, and its last entries are gone."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a part did from one time to another, in seconds since the arrival."""

    kind: str
    part: str
    start_s: float
    end_s: float
    causes: tuple[CauseShare, ...] = ()
    """Of a wait that has ended."""
    interruption: Entry | None = None
    """The preemption or engine failure that a wait began with."""


def pieces_of(account: RequestAccount) -> list[Piece]:
    """Return the pieces of all parts, part by part."""
    parts: dict[str, list[Entry]] = {}
    for entry in account.timeline:
        parts.setdefault(entry.part, []).append(entry)
    return [
        piece
        for entries in parts.values()
        for piece in _cut(entries, account)
        if piece.end_s > piece.start_s
    ]


def _cut(entries: Sequence[Entry], account: RequestAccount) -> Iterator[Piece]:
    at, part = entries[0].at_s, entries[0].part
    running, interruption = PREFILL, None
    # After entries that are left out nobody knows whether the part waited or ran.
    last = LEFT_OUT if account.num_entries_left_out else None
    is_over = False
    for entry in entries:
        match entry.kind:
            case "waited" | "waiting":
                yield Piece(running, part, at, entry.at_s)
                at = entry.at_s + (entry.seconds or 0.0)
                yield Piece(QUEUE, part, entry.at_s, at, entry.causes, interruption)
            case "first_token":
                yield Piece(running, part, at, entry.at_s)
                at, running = entry.at_s, DECODE
            case "preempted" | "engine_lost":
                # Each wait but the first begins with one; one within a wait is replaced by then.
                interruption = entry
            case "adopted":
                yield Piece(ELSEWHERE, part, at, entry.at_s)
                at = max(at, entry.at_s)
                running = DECODE if entry.num_tokens else running
            case "finished":
                yield Piece(last or running, part, at, entry.at_s)
                is_over = True
            case _:
                pass
    if not is_over:
        yield Piece(last or running, part, at, account.duration_s)
