"""The sections of the screen: each returns lines of at most some width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.text import Text

from headway.cli.top.figures import Sums, TopFigures
from headway.cli.top.messages import HistoryFrame, NowFrame, SlowRequests
from headway.cli.top.text import (
    bar,
    cause_name,
    clock,
    count,
    duration,
    fit,
    left,
    right,
    share,
    tenant_name,
)

T = TypeVar("T")
NUM_COUNTS = 4
ID_WIDTH = 41
TITLE, MUTED, BAD, GOOD = "bold cyan", "dim", "bold red", "green"


def summary(now: NowFrame, history: HistoryFrame, figures: TopFigures, width: int) -> Text:
    """Return the line of the most important figures."""
    ttft_ms = figures.mean_ms(history.ttft_ms, history.num_first_tokens)
    usage = now.num_blocks_used / now.num_blocks if now.num_blocks else None
    parts = [
        f"running {count(now.num_running)}",
        f"waiting {count(now.num_waiting)}",
        f"{count(now.tokens_per_s)} tokens/s",
        f"TTFT {duration(None if ttft_ms is None else ttft_ms / 1000)}",
        f"KV {share(usage)}",
    ]
    while len("  ".join(parts)) > width:
        parts.pop()
    return Text("  ".join(parts), "bold")


def waits(
    causes: Sequence[Sums],
    history: HistoryFrame,
    figures: TopFigures,
    num_rows: int,
    is_ascii: bool,
    width: int,
) -> list[Text]:
    """Return the waiting time by cause; the rows add up to the last."""
    name_width = min(28, width - 19 - 4)
    bar_width = width - name_width - 19
    still = figures.sums("still waiting", history.open_waits)
    found = [Sums(cause_name(one.name), one.minute, one.all) for one in causes]
    found += [still] if still.all > 0 else []
    shown, hidden = _split(found, num_rows - 1)
    if hidden:
        shown.append(_total("others", hidden))
    most = max((one.minute for one in shown), default=0.0)

    def line(one: Sums, style: str = "") -> Text:
        drawn = bar(one.minute, most, bar_width, is_ascii) if not style else " " * bar_width
        cells = (
            left(one.name, name_width),
            right(duration(one.minute), 8),
            drawn,
            right(duration(one.all), 8),
        )
        return Text(" ".join(cells), style)

    title = " ".join(
        (left("Waited for", name_width), right("1 min", 8), " " * bar_width, right("10 min", 8))
    )
    return [Text(title, TITLE), *map(line, shown), line(_total("all waits", found), "bold")]


def tenants(now: NowFrame, num_rows: int, width: int) -> list[Text]:
    """Return the requests and KV blocks of the tenants with the most requests."""
    widths = (width - 26, 7, 7, 9)
    running, waiting = now.others
    shown, hidden = _split(now.tenants, num_rows - (1 if running or waiting else 0))
    running += sum(one[1] for one in hidden)
    waiting += sum(one[2] for one in hidden)
    cells = [(tenant_name(name), *map(count, numbers)) for name, *numbers in shown]
    if running or waiting:
        cells.append(("all others", count(running), count(waiting), "-"))
    lines = [_row(one, widths) for one in cells] or [Text("no requests", MUTED)]
    return [_row(("Tenant", "running", "waiting", "KV blocks"), widths, TITLE), *lines]


def steps(history: HistoryFrame, figures: TopFigures, width: int) -> list[Text]:
    """Return the step time of the last minute against the step-time model."""
    mean = figures.mean_ms(history.step_ms, history.num_steps)
    model = figures.mean_ms(history.predicted_ms, history.num_steps)
    error, longest = figures.model_error(), figures.longest_ms()
    first = f"mean {_ms(mean)}, model {_ms(model)}"
    if error is not None:
        first += f", error {share(error)}"
    second = f"longest {_ms(longest)}, {figures.steps_per_s():.1f} steps/s"
    return [_title("Step time, 1 min", width), Text(fit(first, width)), Text(fit(second, width))]


def blocks(now: NowFrame, history: HistoryFrame, width: int) -> list[Text]:
    """Return the KV blocks in use, kept and cached."""
    columns = (history.blocks.kept, history.blocks.cached)
    kept, cached = (column[-1] if column else 0 for column in columns)
    usage = now.num_blocks_used / now.num_blocks if now.num_blocks else None
    first = f"in use {count(now.num_blocks_used)} of {count(now.num_blocks)} ({share(usage)})"
    second = f"kept of preempted {count(kept)}, cached {count(cached)}"
    return [_title("KV blocks", width), Text(fit(first, width)), Text(fit(second, width))]


def counts(history: HistoryFrame, figures: TopFigures, width: int) -> list[Text]:
    """Return finished requests, goodput, burn rate and restarts."""
    recent, whole = figures.goodput(True), figures.goodput(False)
    finished = figures.sums("", history.num_finished)
    restarts = figures.sums("", history.num_restarts)
    widths = (width - 18, 8, 8)

    def rate(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    return [
        _row(("Requests", "1 min", "10 min"), widths, TITLE),
        _row(("finished", count(finished.minute), count(finished.all)), widths),
        _row(("goodput", share(recent.share, 1), share(whole.share, 1)), widths),
        _row(("burn rate", rate(recent.burn_rate), rate(whole.burn_rate)), widths),
        _row(
            ("engine restarts", count(restarts.minute), count(restarts.all)),
            widths,
            BAD if restarts.minute else "",
        ),
    ]


def events(history: HistoryFrame, figures: TopFigures, width: int) -> list[Text]:
    """Return refusals and preemptions by reason, and the last preemption."""
    refused = figures.columns(history.refusals)
    preempted = figures.columns(history.preemptions)
    found = refused + [
        Sums(f"preempted: {cause_name(one.name)}", one.minute, one.all) for one in preempted
    ]
    last = history.last_preemptions[:1]
    shown, hidden = _split(found, NUM_COUNTS - len(last))
    if hidden:
        shown.append(_total("others", hidden))
    widths = (width - 15, 6, 7)
    lines = [_row(("Refused and preempted", "1 min", "10 min"), widths, TITLE)]
    lines += [_row((one.name, count(one.minute), count(one.all)), widths) for one in shown]
    for one in last:
        name_width = max(4, (width - 13) // 2)
        tenant, by = (fit(tenant_name(name), name_width) for name in (one.tenant, one.by_tenant))
        lines.append(Text(fit(f"{clock(one.at)} {tenant} for {by}", width), MUTED))
    return lines if len(lines) > 1 else [*lines, Text("none", MUTED)]


def slowest(requests: SlowRequests | None, num_rows: int, width: int) -> list[Text]:
    """Return the oldest live requests."""
    live = [] if requests is None else requests.live
    num_live = 0 if requests is None else requests.num_live
    has_wait = width >= 90
    tails = (8, 8, 11) if has_wait else (8, 11)
    room = width - 7 - sum(tails) - len(tails) - 2
    id_width = max(room // 2, min(ID_WIDTH, room - 8))
    widths = (id_width, room - id_width, 7, *tails)
    titles = ("waited", "tokens") if has_wait else ("tokens",)
    name = f"Slowest of {count(num_live)} live"
    lines = [_row((name, "tenant", "state", "age", *titles), widths, TITLE, num_left=3)]
    for one in live[:num_rows]:
        tokens = f"{count(one.num_prompt_tokens)}+{count(one.num_output_tokens)}"
        tail = (duration(one.wait_s), tokens) if has_wait else (tokens,)
        cells = (one.id, tenant_name(one.tenant), one.state, duration(one.age_s), *tail)
        lines.append(_row(cells, widths, num_left=3))
    return lines if live else [*lines, Text("no requests", MUTED)]


def _row(cells: Sequence[str], widths: Sequence[int], style: str = "", num_left: int = 1) -> Text:
    """Return cells of these widths, the first ones at the left."""
    pairs = zip(cells, widths, strict=True)
    parts = [
        left(cell, width) if number < num_left else right(cell, width)
        for number, (cell, width) in enumerate(pairs)
        if width > 0
    ]
    return Text(" ".join(parts), style)


def _title(text: str, width: int) -> Text:
    return Text(left(text, width), TITLE)


def _ms(value: float | None) -> str:
    return duration(None if value is None else value / 1000)


def _split(found: list[T], most: int) -> tuple[list[T], list[T]]:
    """Return the first of a list and the rest, which has one of `most` places if there is one."""
    num_shown = len(found) if len(found) <= most else max(0, most - 1)
    return found[:num_shown], found[num_shown:]


def _total(name: str, found: Iterable[Sums]) -> Sums:
    found = list(found)
    return Sums(name, sum(one.minute for one in found), sum(one.all for one in found))
