"""Results of a comparison: one line of JSON per run, and figures from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headway.bench.offline.modes import Spread


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one run of one contender, or the reason why it failed."""

    round: int
    workload: str
    contender: str
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None
    started: str = ""
    """Start of the comparison: a file may have the same round of several comparisons."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a workload, and whether higher is better."""

    key: str
    label: str
    is_higher_better: bool = False


METRICS = {
    "mixed-64": (
        Metric("output_tokens_per_s", "output tokens/s", is_higher_better=True),
        Metric("ttft_s", "time to first token, p50, s"),
        Metric("tpot_ms", "time per output token, p50, ms"),
    ),
    "single": (
        Metric("tpot_ms", "time per output token, ms"),
        Metric("ttft_s", "time to first token, s"),
    ),
    "long": (
        Metric("output_tokens_per_s", "output tokens/s", is_higher_better=True),
        Metric("seconds", "seconds in all"),
        Metric("tpot_ms", "time per output token, p50, ms"),
    ),
    "cold": (
        Metric("first_token_s", "process start to first token, s"),
        Metric("load_s", "process start to ready, s"),
    ),
}
FALLBACK = (Metric("seconds", "seconds in all"),)


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one metric; `speed` is relative to the reference, above 1 is faster."""

    contender: str
    spread: Spread | None
    num_rounds: int
    speed: Spread | None
    reason: str | None


def metrics_of(workload: str) -> tuple[Metric, ...]:
    return METRICS.get(workload, FALLBACK)


def append(path: Path, result: Result) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def read(path: Path) -> list[Result]:
    """Return all runs of a file; an incomplete last line is skipped."""
    results: list[Result] = []
    for line in path.read_text().splitlines():
        try:
            results.append(Result(**json.loads(line)))
        except json.JSONDecodeError:
            continue
    return results


def rows(results: Iterable[Result], workload: str, metric: Metric, reference: str) -> list[Row]:
    """Return the rows of a metric, best first; failed contenders last."""
    ours = [result for result in results if result.workload == workload]
    names = list(dict.fromkeys(result.contender for result in ours))
    values = {name: _values(ours, name, metric.key) for name in names}
    made: list[Row] = []
    for name in names:
        found = values[name]
        reasons = [r.reason for r in ours if r.contender == name and r.reason is not None]
        made.append(
            Row(
                name,
                Spread.of(list(found.values())) if found else None,
                len(found),
                _speed(found, values.get(reference, {}), metric),
                reasons[-1] if reasons else None,
            )
        )
    sign = -1 if metric.is_higher_better else 1
    with_figures = [row for row in made if row.spread is not None]
    with_figures.sort(key=lambda row: sign * (row.spread.median if row.spread else 0.0))
    return with_figures + [row for row in made if row.spread is None]


def same_first_tokens(
    results: Sequence[Result], workload: str, contender: str, reference: str
) -> tuple[int, int] | None:
    """Return the requests whose first token equals the reference's, and their number.

    Few equal tokens would mean that an engine computes another model. Prompts are random, so near
    ties are common, and a few differences mean nothing.
    """
    theirs = _first_tokens(results, workload, contender)
    ours = _first_tokens(results, workload, reference)
    if theirs is None or ours is None or len(theirs) != len(ours):
        return None
    return sum(a == b for a, b in zip(theirs, ours, strict=True)), len(ours)


def _values(results: Sequence[Result], contender: str, key: str) -> dict[tuple[str, int], float]:
    return {
        (result.started, result.round): result.figures[key]
        for result in results
        if result.contender == contender and result.figures.get(key) is not None
    }


def _speed(
    theirs: dict[tuple[str, int], float], ours: dict[tuple[str, int], float], metric: Metric
) -> Spread | None:
    """Return the speed relative to ours, within each round: the machine may change."""
    pairs = [(theirs[when], ours[when]) for when in theirs if when in ours]
    if not pairs:
        return None
    if metric.is_higher_better:
        return Spread.of([their / our for their, our in pairs])
    return Spread.of([our / their for their, our in pairs])


def _first_tokens(results: Sequence[Result], workload: str, contender: str) -> list[int] | None:
    found = [
        result.figures["first_token_ids"]
        for result in results
        if result.workload == workload
        and result.contender == contender
        and "first_token_ids" in result.figures
    ]
    return found[-1] if found else None
