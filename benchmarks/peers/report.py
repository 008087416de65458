"""Shows the figures of a comparison as tables, JSON and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.catalog import HEADWAY
from benchmarks.peers.results import (
    Group,
    Metric,
    Result,
    Row,
    groups,
    metrics_of,
    rows,
    same_first_tokens,
)
from benchmarks.peers.runner import GREEDY
from headway.bench.steal import steal_plain

OURS, THEIRS = "#2a7f62", "#8a9ba8"
MAX_REASON = 160
HEADINGS = ("engine", "rounds", "median", "least - most", "speed", "most steal", "precision")
LEFT = ("engine", "precision")


def as_text(results: Sequence[Result]) -> str:
    """Return one table per workload, sampling and metric."""
    lines: list[str] = []
    for group in groups(results):
        for metric in metrics_of(group.workload):
            better = "more" if metric.is_higher_better else "less"
            lines.append(
                f"{group.title}: {metric.label} ({better} is better); speed relative to "
                f"{group.reference}"
            )
            lines += [*_table(rows(group, metric)), ""]
        lines.extend(_agreements(group))
        lines.extend(_marks(group))
    return "\n".join(lines)


def as_plain(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the figures for a JSON file."""
    return [
        {
            "workload": group.workload,
            "sampling": group.sampling,
            "metric": metric.key,
            "contender": row.contender,
            "precision": row.precision,
            "rounds": row.num_rounds,
            "median": None if row.spread is None else row.spread.median,
            "low": None if row.spread is None else row.spread.low,
            "high": None if row.spread is None else row.spread.high,
            "speed": None if row.speed is None else row.speed.median,
            "reference": group.reference,
            "reason": row.reason,
            "steal": steal_plain(row.steal),
        }
        for group in groups(results)
        for metric in metrics_of(group.workload)
        for row in rows(group, metric)
    ]


def draw(path: Path, results: Sequence[Result]) -> None:
    """Draw the first metric of each workload and sampling: medians, least and most."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("pictures need matplotlib: pip install 'headway[plot]'") from error

    shown = [
        (group.title, metrics_of(group.workload)[0], made)
        for group in groups(results)
        if (made := _drawable(group))
    ]
    if not shown:
        raise SystemExit("there is nothing to draw: no run has a figure")
    figure = Figure(figsize=(5 * len(shown) + 1, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for axis, (title, metric, made) in zip(axes, shown, strict=True):
        _draw_one(axis, title, metric, made)
    figure.suptitle("Headway and its CPU peers: medians, least to most")
    figure.savefig(path, dpi=120)


def _drawable(group: Group) -> list[Row]:
    made = rows(group, metrics_of(group.workload)[0])
    return [row for row in made if row.spread is not None]


def _draw_one(axis: Any, title: str, metric: Metric, made: Sequence[Row]) -> None:
    spreads = [row.spread for row in made if row.spread is not None]
    errors = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
    names = [row.contender for row in made]
    colors = [OURS if name.startswith(HEADWAY) else THEIRS for name in names]
    bars = axis.barh(names, [s.median for s in spreads], color=colors, xerr=errors)
    axis.bar_label(bars, fmt="%.3g", padding=4)
    axis.invert_yaxis()  # the best is on top
    axis.margins(x=0.15)
    better = "more" if metric.is_higher_better else "less"
    axis.set(title=title, xlabel=f"{metric.label} ({better} is better)")


def _table(made: Sequence[Row]) -> list[str]:
    """Return a heading, the rows in aligned columns, and the reasons of failures."""
    cells = [HEADINGS, *(_cells(row) for row in made)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines: list[str] = []
    for line in cells:
        padded = [
            cell.ljust(width) if heading in LEFT else cell.rjust(width)
            for cell, width, heading in zip(line, widths, HEADINGS, strict=True)
        ]
        lines.append("  ".join(["", *padded]).rstrip())
    failed = [(row.contender, row.reason) for row in made if row.reason is not None]
    return lines + [f"  {name} failed: {_short(reason)}" for name, reason in failed]


def _cells(row: Row) -> tuple[str, ...]:
    spread, speed = row.spread, row.speed
    return (
        row.contender,
        str(row.num_rounds),
        "-" if spread is None else _number(spread.median),
        "-" if spread is None else f"{_number(spread.low)} - {_number(spread.high)}",
        "-" if speed is None else f"{speed.median:.2f} ({speed.low:.2f} - {speed.high:.2f})",
        "-" if row.steal is None else f"{100 * row.steal.share:.1f} %",
        row.precision or "-",
    )


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _short(reason: str) -> str:
    flat = " ".join(reason.split())
    return flat if len(flat) <= MAX_REASON else flat[: MAX_REASON - 3] + "..."


def _agreements(group: Group) -> list[str]:
    if group.sampling != GREEDY:  # other numbers are drawn, so the tokens differ
        return []
    found: list[str] = []
    for name in group.contenders:
        same = same_first_tokens(group, name)
        if same is not None and name != group.reference:
            found.append(f"{name} {same[0]} of {same[1]}")
    if not found:
        return []
    title, reference = group.title, group.reference
    return [f"{title}: first tokens equal to those of {reference}: {', '.join(found)}", ""]


def _marks(group: Group) -> list[str]:
    """Return one line per run with high steal."""
    marked = [
        f"{group.title}, {result.contender}, round {result.round}: {result.steal}"
        for result in group.results
        if result.steal is not None and result.steal.is_high
    ]
    return [*marked, ""] if marked else []
