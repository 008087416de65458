"""Plots of load runs: latencies of a run, or the curve of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.bench.load.records import LoadRecord, Outcome
from headway.bench.load.sweep import Knee, SweepPoint
from headway.errors import ConfigError

_COLORS = {50: "#2a7f62", 95: "#e0a030", 99: "#b0413e"}


def draw_run(path: Path, title: str, records: Sequence[LoadRecord]) -> None:
    """Plot the distributions of TTFT, TPOT and E2E, and TTFT over time."""
    figure = _figure(12, 4.5)
    spread, over_time = figure.subplots(1, 2)
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    for label in ("ttft_s", "tpot_s", "e2e_s"):
        values = sorted(v for r in completed if (v := getattr(r, label)) is not None and v > 0)
        shares = [(rank + 1) / len(values) for rank in range(len(values))]
        spread.step(values, shares, where="post", label=label.removesuffix("_s").upper())
    spread.set(title="share of requests within a time", xlabel="seconds", ylim=(0, 1.02))
    if completed:
        spread.set_xscale("log")
    spread.legend()
    over_time.plot(
        [r.scheduled_at for r in completed], [r.ttft_s for r in completed], ".", color=_COLORS[50]
    )
    lost = [r for r in records if r.outcome in (Outcome.REFUSED, Outcome.FAILED)]
    over_time.plot(
        [r.scheduled_at for r in lost], [0.0] * len(lost), "x", color=_COLORS[99],
        label=f"{len(lost)} refused or failed",
    )  # fmt: skip
    over_time.set(title="time to first token", xlabel="arrival, seconds", ylabel="seconds")
    over_time.set_ylim(bottom=0)
    if lost:
        over_time.legend()
    _save(figure, path, title)


def draw_sweep(path: Path, title: str, points: Sequence[SweepPoint], knee: Knee) -> None:
    """Plot throughput by rate and latency by throughput, with the knee."""
    figure = _figure(12, 4.5)
    speed, curve = figure.subplots(1, 2)
    rates = [point.rate for point in points]
    tokens_per_s = [point.summary.output_tokens_per_s for point in points]
    speed.plot(rates, tokens_per_s, "o-", color=_COLORS[50])
    speed.set(title="throughput", xlabel="requests/s offered", ylabel="output tokens/s")
    speed.set_ylim(bottom=0)
    for percent, color in _COLORS.items():
        known = [point.summary for point in points if point.summary.ttft_s]
        curve.plot(
            [s.output_tokens_per_s for s in known], [s.ttft_s[percent] for s in known], "o-",
            color=color, label=f"p{percent}",
        )  # fmt: skip
    curve.set(title="time to first token by throughput", xlabel="output tokens/s", ylabel="seconds")
    if knee.rate is not None and knee.why is not None:
        speed.axvline(knee.rate, color="#888888", linestyle="--", label="knee")
        curve.axvline(
            tokens_per_s[rates.index(knee.rate)], color="#888888", linestyle="--", label="knee"
        )
        speed.legend()
    curve.legend()
    _save(figure, path, title)


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: pip install 'headway[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
