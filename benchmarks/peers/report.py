"""Shows the figures of a comparison as tables, JSON and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.catalog import HEADWAY
from benchmarks.peers.results import Metric, Result, Row, metrics_of, rows, same_first_tokens

OURS, THEIRS = "#2a7f62", "#8a9ba8"
MAX_REASON = 160


def reference_of(results: Sequence[Result], workload: str) -> str:
    """Return the contender that others are compared with: the first Headway."""
    names = [result.contender for result in results if result.workload == workload]
    ours = [name for name in names if name.startswith(HEADWAY)]
    return ours[0] if ours else HEADWAY


def as_text(results: Sequence[Result]) -> str:
    """Return one table per workload and metric."""
    lines: list[str] = []
    for workload in dict.fromkeys(result.workload for result in results):
        reference = reference_of(results, workload)
        for metric in metrics_of(workload):
            better = "more" if metric.is_higher_better else "less"
            lines.append(f"{workload}: {metric.label} ({better} is better)")
            lines.append(_line("", "rounds", "median", "least - most", f"speed / {reference}"))
            lines.extend(_row(row) for row in rows(results, workload, metric, reference))
            lines.append("")
        lines.extend(_agreements(results, workload, reference))
    return "\n".join(lines)


def as_plain(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the figures for a JSON file."""
    plain: list[dict[str, Any]] = []
    for workload in dict.fromkeys(result.workload for result in results):
        reference = reference_of(results, workload)
        for metric in metrics_of(workload):
            plain.extend(
                {
                    "workload": workload,
                    "metric": metric.key,
                    "contender": row.contender,
                    "rounds": row.num_rounds,
                    "median": None if row.spread is None else row.spread.median,
                    "low": None if row.spread is None else row.spread.low,
                    "high": None if row.spread is None else row.spread.high,
                    "speed": None if row.speed is None else row.speed.median,
                    "reference": reference,
                    "reason": row.reason,
                }
                for row in rows(results, workload, metric, reference)
            )
    return plain


def draw(path: Path, results: Sequence[Result]) -> None:
    """Draw the first metric of each workload: medians, least and most."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("pictures need matplotlib: pip install 'headway[plot]'") from error

    shown = [
        (workload, metrics_of(workload)[0], made)
        for workload in dict.fromkeys(result.workload for result in results)
        if (made := _drawable(results, workload))
    ]
    if not shown:
        raise SystemExit("there is nothing to draw: no run has a figure")
    figure = Figure(figsize=(5 * len(shown) + 1, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(shown), squeeze=False)[0]
    for axis, (workload, metric, made) in zip(axes, shown, strict=True):
        _draw_one(axis, workload, metric, made)
    figure.suptitle("Headway and its CPU peers: medians, least to most")
    figure.savefig(path, dpi=120)


def _drawable(results: Sequence[Result], workload: str) -> list[Row]:
    made = rows(results, workload, metrics_of(workload)[0], reference_of(results, workload))
    return [row for row in made if row.spread is not None]


def _draw_one(axis: Any, workload: str, metric: Metric, made: Sequence[Row]) -> None:
    spreads = [row.spread for row in made if row.spread is not None]
    errors = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
    names = [row.contender for row in made]
    colors = [OURS if name.startswith(HEADWAY) else THEIRS for name in names]
    bars = axis.barh(names, [s.median for s in spreads], color=colors, xerr=errors)
    axis.bar_label(bars, fmt="%.3g", padding=4)
    axis.invert_yaxis()  # the best is on top
    axis.margins(x=0.15)
    better = "more" if metric.is_higher_better else "less"
    axis.set(title=workload, xlabel=f"{metric.label} ({better} is better)")


def _row(row: Row) -> str:
    if row.spread is None:
        return f"  {row.contender:28s} no figure: {_short(row.reason or 'unknown')}"
    spread, speed = row.spread, row.speed
    text = _line(
        row.contender,
        str(row.num_rounds),
        _number(spread.median),
        f"{_number(spread.low)} - {_number(spread.high)}",
        "" if speed is None else f"{speed.median:.2f} ({speed.low:.2f} - {speed.high:.2f})",
    )
    return text if row.reason is None else f"{text}  then: {_short(row.reason)}"


def _line(name: str, count: str, median: str, spread: str, speed: str) -> str:
    return f"  {name:28s} {count:>6s} {median:>9s} {spread:>17s}   {speed}".rstrip()


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _short(reason: str) -> str:
    flat = " ".join(reason.split())
    return flat if len(flat) <= MAX_REASON else flat[: MAX_REASON - 3] + "..."


def _agreements(results: Sequence[Result], workload: str, reference: str) -> list[str]:
    names = [result.contender for result in results if result.workload == workload]
    found: list[str] = []
    for name in dict.fromkeys(names):
        same = same_first_tokens(results, workload, name, reference)
        if same is not None and name != reference:
            found.append(f"{name} {same[0]} of {same[1]}")
    if not found:
        return []
    return [f"{workload}: first tokens equal to those of {reference}: {', '.join(found)}", ""]
