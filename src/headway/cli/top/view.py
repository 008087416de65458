"""The lines of a screen, for any size of the window; every line fits, and none is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest

from rich.text import Text

from headway.cli.top import sections
from headway.cli.top.figures import TopFigures
from headway.cli.top.follow import TopState
from headway.cli.top.messages import HistoryFrame, NowFrame, SlowRequests
from headway.cli.top.sections import BAD, GOOD, MUTED, NUM_COUNTS
from headway.cli.top.text import clock, fit, left

MIN_WIDTH = 40
SPLIT_WIDTH = 72
"""From this width on, two sections are side by side."""
GAP_HEIGHT = 32
"""From this height on, an empty line is between sections."""
NUM_FIXED = 9
"""Lines of a screen with all sections that are not rows of waits, counts or requests."""
Section = Callable[[int], list[Text]]
"""The lines of a section of some width."""


@dataclass(frozen=True, slots=True)
class Window:
    """Size of a window, and whether it shows letters of ASCII only."""

    width: int
    height: int | None = None
    """None if there may be any number of lines."""
    is_ascii: bool = False

    @property
    def has_gaps(self) -> bool:
        return self.height is None or self.height >= GAP_HEIGHT


@dataclass(frozen=True, slots=True)
class _Rows:
    """How many rows the sections have whose length varies."""

    num_waits: int
    num_requests: int


def lines_of(state: TopState, address: str, window: Window) -> list[Text]:
    """Return the lines of a screen; the last is the footer."""
    if window.width < MIN_WIDTH:
        return _finish([Text(fit("too narrow", window.width))], window)
    lines = [_header(state, address, window.width)]
    if state.now is None or state.history is None:
        lines.append(Text("waiting for the first data"))
    else:
        lines += _body(state.now, state.history, state.requests, window)
    footer = fit(state.problem or "q quits", window.width)
    return _finish([*lines, Text(footer, BAD if state.problem else MUTED)], window)


def _finish(lines: list[Text], window: Window) -> list[Text]:
    """Leave out the lines before the footer that do not fit."""
    for line in lines:
        line.no_wrap = True
        if window.is_ascii:
            line.plain = line.plain.encode("ascii", "replace").decode()
    if window.height is None or len(lines) <= window.height:
        return lines
    return [*lines[: max(0, window.height - 1)], lines[-1]]


def _header(state: TopState, address: str, width: int) -> Text:
    at = "" if state.now is None else clock(state.now.at)
    status = "" if state.now is None else state.now.status
    if state.problem:
        status = "not connected"
    room = width - len(at) - 1
    text = left(f"headway top  {address}  {status}", room)
    line = Text(f"{text} {at}")
    line.stylize("bold", 0, 11)
    start = text.rfind(status)
    if status and start > 0:
        line.stylize(GOOD if status == "ready" else BAD, start, start + len(status))
    return line


def _body(
    now: NowFrame, history: HistoryFrame, requests: SlowRequests | None, window: Window
) -> Iterable[Text]:
    figures = TopFigures(history)
    gap = [Text("")] if window.has_gaps else []
    causes, rows = figures.columns(history.causes), _share_rows(now, history, requests, window)
    pairs: list[tuple[Section, Section]] = [
        (
            lambda width: sections.waits(
                causes, history, figures, rows.num_waits, window.is_ascii, width
            ),
            lambda width: sections.tenants(now, rows.num_waits, width),
        ),
        (
            lambda width: sections.steps(history, figures, width),
            lambda width: sections.blocks(now, history, width),
        ),
        (
            lambda width: sections.counts(history, figures, width),
            lambda width: sections.events(history, figures, width),
        ),
    ]
    yield sections.summary(now, history, figures, window.width)
    for one, other in pairs:
        yield from gap
        yield from _side_by_side(one, other, window.width)
    yield from gap
    yield from sections.slowest(requests, rows.num_requests, window.width)
    yield from gap


def _share_rows(
    now: NowFrame, history: HistoryFrame, requests: SlowRequests | None, window: Window
) -> _Rows:
    num_waits = max(sum(any(values) for _, values in history.causes) + 2, len(now.tenants) + 1)
    num_requests = 0 if requests is None else len(requests.live)
    if window.height is None:
        return _Rows(num_waits, num_requests)
    num_gaps = 5 if window.has_gaps else 0
    room = max(2, window.height - NUM_FIXED - num_gaps - NUM_COUNTS)
    num_least = min(num_waits, 6, room)
    # Waits have what the requests leave, and at least six rows.
    waits = max(num_least, min(num_waits, room - min(num_requests, room // 2)))
    return _Rows(waits, max(1, room - waits))


def _side_by_side(one: Section, other: Section, width: int) -> list[Text]:
    """Return two sections beside each other, or one under the other in a narrow window."""
    if width < SPLIT_WIDTH:
        return [*one(width), *other(width)]
    half = (width - 2) // 2
    lines: list[Text] = []
    for a, b in zip_longest(one(half), other(width - 2 - half)):
        line = a or Text(" " * half)
        lines.append(Text.assemble(line, " " * (half + 2 - line.cell_len), b or ""))
    return lines
