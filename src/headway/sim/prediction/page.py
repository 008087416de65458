"""Parts of a report as one HTML file: tables and line charts, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import floor, isfinite, log10

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 44
COLORS = ("#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#64748b")
NUM_TICKS = 5

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
  color: #1e293b; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #cbd5e1; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; } .verdict { font-size: 1.1rem; } .note { color: #475569; }
svg { max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: #475569; }
@media (prefers-color-scheme: dark) {
  body { color: #e2e8f0; background: #0f172a; } th, td { border-color: #334155; }
  .note { color: #94a3b8; } svg text { fill: #94a3b8; }
}
"""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart; with `low` and `high`, with a band around it."""

    name: str
    points: Sequence[tuple[float, float]]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over an axis, with marks at some places of either axis."""

    x_label: str
    y_label: str
    lines: Sequence[Curve]
    x_marks: Sequence[tuple[float, str]] = ()
    y_marks: Sequence[tuple[float, str]] = ()
    y_max: float | None = None
    is_log_x: bool = False


def page(title: str, parts: Sequence[str]) -> str:
    """Return a whole page."""
    head = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    body = "\n".join(parts)
    return (
        f"<!doctype html>\n<html lang='en'><head>{head}<title>{escape(title)}</title>"
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def heading(text: str) -> str:
    """Return a heading of a section."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph; its kind is `verdict`, `note` or none."""
    return f"<p class='{escape(kind)}'>{escape(text)}</p>" if kind else f"<p>{escape(text)}</p>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    content = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f"<div class='wide'><table>{content}</table></div>"


class _Scale:
    """Maps values of an axis to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float, is_log: bool) -> None:
        self._is_log = is_log
        self._low, self._high = self._map(low), self._map(high)
        self._start, self._end = start, end
        self.low, self.high = low, high

    def _map(self, value: float) -> float:
        return log10(max(value, 1e-6)) if self._is_log else value

    def __call__(self, value: float) -> float:
        share = (self._map(value) - self._low) / max(self._high - self._low, 1e-12)
        return round(self._start + min(max(share, -0.02), 1.02) * (self._end - self._start), 1)

    def ticks(self) -> list[float]:
        if self._is_log:
            powers = range(floor(self._low), floor(self._high) + 1)
            found = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
            return [one for one in found if self.low <= one <= self.high]
        raw = (self.high - self.low) / NUM_TICKS
        size = 10.0 ** floor(log10(raw)) if raw > 0 else 1.0
        step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= raw)
        first = floor(self.low / step)
        found = [step * number for number in range(first, first + 3 * NUM_TICKS)]
        return [one for one in found if self.low <= one <= self.high * 1.0001]


def draw(chart: Chart) -> str:
    """Return a chart as SVG."""
    xs = [x for line in chart.lines for x, _ in line.points if isfinite(x)]
    ys = [y for line in chart.lines for _, y in line.points if isfinite(y)]
    if not xs or not ys:
        return paragraph("nothing to draw", "note")
    y_max = chart.y_max if chart.y_max is not None else max(ys)
    x_low = min(one for one in xs if one > 0) if chart.is_log_x else min(0.0, *xs)
    x_high = max([*xs, *(x for x, _ in chart.x_marks)])
    x_of = _Scale(x_low, x_high, LEFT, WIDTH - RIGHT, chart.is_log_x)
    y_of = _Scale(0.0, y_max, HEIGHT - BOTTOM, TOP, False)
    parts = [*_axes(chart, x_of, y_of), *_marks(chart, x_of, y_of)]
    for number, line in enumerate(chart.lines):
        color = COLORS[number % len(COLORS)]
        parts += _line(line, color, x_of, y_of)
        if len(chart.lines) > 1:
            parts.append(_text(LEFT + 12, TOP + 14 + 16 * number, line.name, "start", color))
    label = escape(f"{chart.y_label} by {chart.x_label}", quote=True)
    return (
        f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' role='img' aria-label='{label}'>"
        f"{''.join(parts)}</svg>"
    )


def _axes(chart: Chart, x_of: _Scale, y_of: _Scale) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts: list[str] = []
    for value in y_of.ticks():
        parts.append(_stroke(LEFT, y_of(value), WIDTH - RIGHT, y_of(value), "#94a3b840"))
        parts.append(_text(LEFT - 8, y_of(value) + 4, f"{value:g}", "end"))
    for value in x_of.ticks():
        parts.append(_stroke(x_of(value), TOP, x_of(value), bottom, "#94a3b820"))
        parts.append(_text(x_of(value), bottom + 16, f"{value:g}", "middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 8, chart.x_label, "middle"))
    parts.append(
        f"<text transform='rotate(-90)' x='{-(TOP + bottom) / 2}' y='14' text-anchor='middle'>"
        f"{escape(chart.y_label)}</text>"
    )
    return parts


def _marks(chart: Chart, x_of: _Scale, y_of: _Scale) -> list[str]:
    parts: list[str] = []
    for number, (value, name) in enumerate(chart.x_marks):
        parts.append(_stroke(x_of(value), TOP, x_of(value), HEIGHT - BOTTOM, "#64748b", "5 4"))
        parts.append(_text(x_of(value) - 4, TOP + 12 + 14 * number, name, "end"))
    for value, name in chart.y_marks:
        parts.append(_stroke(LEFT, y_of(value), WIDTH - RIGHT, y_of(value), "#dc2626", "5 4"))
        parts.append(_text(LEFT + 6, y_of(value) - 5, name, "start"))
    return parts


def _line(line: Curve, color: str, x_of: _Scale, y_of: _Scale) -> list[str]:
    parts: list[str] = []
    xs = [x_of(x) for x, _ in line.points]
    if line.low and line.high:
        there = [f"{x},{y_of(y)}" for x, y in zip(xs, line.high, strict=True)]
        back = [f"{x},{y_of(y)}" for x, y in zip(xs, line.low, strict=True)]
        around = " ".join([*there, *reversed(back)])
        parts.append(f"<polygon points='{around}' fill='{color}' fill-opacity='0.18'/>")
    points = " ".join(f"{x},{y_of(y)}" for x, (_, y) in zip(xs, line.points, strict=True))
    parts.append(f"<polyline points='{points}' fill='none' stroke='{color}' stroke-width='2'/>")
    return parts


def _stroke(x1: float, y1: float, x2: float, y2: float, color: str, dash: str = "") -> str:
    dashes = f" stroke-dasharray='{dash}'" if dash else ""
    return f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{color}'{dashes}/>"


def _text(x: float, y: float, text: str, anchor: str, color: str = "") -> str:
    fill = f" style='fill:{color}'" if color else ""
    return f"<text x='{x}' y='{y}' text-anchor='{anchor}'{fill}>{escape(text)}</text>"
