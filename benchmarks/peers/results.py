"""Results of a comparison: one line of JSON per run, and figures from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.catalog import HEADWAY
from benchmarks.peers.runner import GREEDY
from benchmarks.peers.workloads import DECODES
from headway.bench.offline.modes import Spread
from headway.bench.steal import Steal, highest_steal


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
    sampling: str = GREEDY

    @property
    def steal(self) -> Steal | None:
        plain = self.figures.get("steal")
        return None if plain is None else Steal(**plain)

    @property
    def precision(self) -> str | None:
        return self.figures.get("details", {}).get("precision")


@dataclass(frozen=True, slots=True)
class Group:
    """All runs of one workload with one sampling; they compare."""

    workload: str
    sampling: str
    results: tuple[Result, ...]

    @property
    def title(self) -> str:
        return f"{self.workload}, {self.sampling}"

    @property
    def contenders(self) -> list[str]:
        return list(dict.fromkeys(result.contender for result in self.results))

    @property
    def reference(self) -> str:
        """Return the contender that others are compared with: the first Headway."""
        return next((name for name in self.contenders if name.startswith(HEADWAY)), HEADWAY)

    def of(self, contender: str) -> list[Result]:
        return [result for result in self.results if result.contender == contender]


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a workload, and whether higher is better."""

    key: str
    label: str
    is_higher_better: bool = False


_DECODE = (
    Metric("output_tokens_per_s", "output tokens/s", is_higher_better=True),
    Metric("tpot_ms", "time per output token, p50, ms"),
    Metric("peak_memory_mb", "most memory, MB"),
)
METRICS = {
    **dict.fromkeys(DECODES, _DECODE),
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
    precision: str | None
    spread: Spread | None
    num_rounds: int
    speed: Spread | None
    reason: str | None
    steal: Steal | None
    """Steal of the run with the most."""


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


def groups(results: Iterable[Result]) -> list[Group]:
    """Return the runs by workload and sampling, in the order of their first runs."""
    found: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        found.setdefault((result.workload, result.sampling), []).append(result)
    return [Group(*key, tuple(runs)) for key, runs in found.items()]


def rows(group: Group, metric: Metric) -> list[Row]:
    """Return the rows of a metric, best first; failed contenders last."""
    ours = _values(group.of(group.reference), metric.key)
    made = [_row(name, group.of(name), ours, metric) for name in group.contenders]
    sign = -1 if metric.is_higher_better else 1
    with_figures = [row for row in made if row.spread is not None]
    with_figures.sort(key=lambda row: sign * (row.spread.median if row.spread else 0.0))
    return with_figures + [row for row in made if row.spread is None]


def _row(
    name: str, runs: Sequence[Result], ours: dict[tuple[str, int], float], metric: Metric
) -> Row:
    found = _values(runs, metric.key)
    reasons = [run.reason for run in runs if run.reason is not None]
    precisions = [run.precision for run in runs if run.precision is not None]
    return Row(
        name,
        precisions[-1] if precisions else None,
        Spread.of(list(found.values())) if found else None,
        len(found),
        _speed(found, ours, metric),
        reasons[-1] if reasons else None,
        highest_steal(run.steal for run in runs),
    )


def same_first_tokens(group: Group, contender: str) -> tuple[int, int] | None:
    """Return the requests whose first token equals the reference's, and their number.

    Few equal tokens would mean that an engine computes another model. Prompts are random, so near
    ties are common, and a few differences mean nothing.
    """
    theirs = _first_tokens(group.of(contender))
    ours = _first_tokens(group.of(group.reference))
    if theirs is None or ours is None or len(theirs) != len(ours):
        return None
    return sum(a == b for a, b in zip(theirs, ours, strict=True)), len(ours)


def _values(runs: Sequence[Result], key: str) -> dict[tuple[str, int], float]:
    return {
        (run.started, run.round): run.figures[key]
        for run in runs
        if run.figures.get(key) is not None
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


def _first_tokens(runs: Sequence[Result]) -> list[int] | None:
    found = [run.figures["first_token_ids"] for run in runs if "first_token_ids" in run.figures]
    return found[-1] if found else None
