"""Figures of a prediction as rows: for the terminal, for JSON and for a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from headway.sim.prediction.figures import Figures, Interval, Prediction, by_tenant
from headway.sim.prediction.served import ServedLoad

COLUMNS = ("", "median", "5 % below", "95 % below")


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with its unit."""

    name: str
    label: str
    of: Callable[[Figures], float]


def _latencies(name: str, label: str, factor: float) -> list[Figure]:
    return [
        Figure(
            f"{name}_p{percent}",
            f"{label} p{percent}, {'ms' if factor > 1 else 's'}",
            lambda one, percent=percent: factor * getattr(one, f"{name}_s")[percent],
        )
        for percent in (50, 95, 99)
    ]


FIGURES = (
    Figure("requests_per_s", "requests/s", lambda one: one.requests_per_s),
    Figure("output_tokens_per_s", "output tokens/s", lambda one: one.output_tokens_per_s),
    *_latencies("ttft", "TTFT", 1e3),
    *_latencies("tpot", "TPOT", 1e3),
    *_latencies("e2e", "E2E", 1.0),
    Figure("cached_share", "prefix hits, % of prompt tokens", lambda one: 100 * one.cached_share),
    Figure("refused", "refused requests", lambda one: one.num_refused),
)
GOOD = Figure("good_share", "within all targets, %", lambda one: 100 * (one.good_share or 0.0))


def figures_of(prediction: Prediction) -> tuple[Figure, ...]:
    """Return the figures that say something about a prediction."""
    is_judged = any(one.good_share is not None for one in prediction.figures)
    refuses = any(one.num_refused for one in prediction.figures)
    shown = [one for one in FIGURES if one.name != "refused" or refuses]
    return (*shown, GOOD) if is_judged else tuple(shown)


def rows_of(prediction: Prediction) -> list[tuple[str, ...]]:
    """Return label, median and range of each figure."""
    figures = prediction.figures
    return [
        (one.label, *_texts_of([one.of(run) for run in figures])) for one in figures_of(prediction)
    ]


def _texts_of(values: Sequence[float]) -> tuple[str, str, str]:
    """Return the median of some runs and the ends of their range; one run has no range."""
    found = Interval.of(values)
    if len(values) == 1:
        return number(found.middle), "-", "-"
    return number(found.middle), number(found.low), number(found.high)


def number(value: float) -> str:
    """Return three digits of a number; a dash if there is none."""
    if not isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


SCALING: tuple[tuple[str, str, Callable[[ServedLoad], float]], ...] = (
    ("most", "engines at most", lambda one: one.most_engines),
    ("starts", "engines started", lambda one: one.num_starts),
    ("minutes", "engine minutes", lambda one: one.engine_s / 60.0),
    ("cost_share", "% of a fixed pool of the most engines", lambda one: 100.0 * one.cost_share),
)
"""What engines that come and go cost: name, label, and the figure of a load."""


def scaling_rows(loads: Sequence[ServedLoad]) -> list[tuple[str, ...]]:
    """Return label, median and range of what the engines cost."""
    return [(label, *_texts_of([of(one) for one in loads])) for _, label, of in SCALING]


def plain_scaling(loads: Sequence[ServedLoad]) -> dict[str, dict[str, float | None]]:
    """Return what the engines cost as plain values."""
    return {name: _plain(Interval.of([of(one) for one in loads])) for name, _, of in SCALING}


def tenants_of(prediction: Prediction) -> dict[str, list[Figures]]:
    """Return the figures of each tenant in each run that had requests of the tenant."""
    found: dict[str, list[Figures]] = {}
    for load in prediction.loads:
        for name, figures in by_tenant(load.requests).items():
            found.setdefault(name, []).append(figures)
    return dict(sorted(found.items(), key=lambda one: -sum(it.num_requests for it in one[1])))


TENANT_COLUMNS = (
    "tenant",
    "requests",
    "output tokens/s",
    "TTFT p50, ms",
    "TTFT p99, ms",
    "E2E p50, s",
)


def tenant_rows(tenants: dict[str, list[Figures]], limit: int) -> list[tuple[str, ...]]:
    """Return a row of medians over the runs for the tenants with the most requests."""

    def middle(runs: Sequence[Figures], of: Callable[[Figures], float]) -> str:
        return number(Interval.of([of(one) for one in runs]).middle)

    return [
        (
            name,
            middle(runs, lambda one: one.num_requests),
            middle(runs, lambda one: one.output_tokens_per_s),
            middle(runs, lambda one: 1e3 * one.ttft_s[50]),
            middle(runs, lambda one: 1e3 * one.ttft_s[99]),
            middle(runs, lambda one: one.e2e_s[50]),
        )
        for name, runs in list(tenants.items())[:limit]
    ]


def plain_of(figures: Sequence[Figures]) -> dict[str, dict[str, float | None]]:
    """Return the intervals of all figures as plain values; null where there is none."""
    is_judged = any(one.good_share is not None for one in figures)
    shown = (*FIGURES, GOOD) if is_judged else FIGURES
    return {one.name: _plain(Interval.of([one.of(it) for it in figures])) for one in shown}


def _plain(interval: Interval) -> dict[str, float | None]:
    ends = {"low": interval.low, "median": interval.middle, "high": interval.high}
    return {name: value if isfinite(value) else None for name, value in ends.items()}
