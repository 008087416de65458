"""Sums over the history: the last minute, and all ten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from headway.cli.top.messages import Columns, HistoryFrame

T = TypeVar("T")
MINUTE_S = 60.0
OBJECTIVE = 0.99
"""Share of requests that should meet their targets; the burn rate is relative to it."""


@dataclass(frozen=True, slots=True)
class Sums:
    """The same figure over the last minute and over all of the history."""

    name: str
    minute: float
    all: float


@dataclass(frozen=True, slots=True)
class GoodputCounts:
    """Requests with targets that ended."""

    num_met: int
    num_missed: int

    @property
    def share(self) -> float | None:
        """Share that met the targets; None without such requests."""
        num_judged = self.num_met + self.num_missed
        return self.num_met / num_judged if num_judged else None

    @property
    def burn_rate(self) -> float | None:
        """Share that missed, over the share that the objective allows."""
        return None if self.share is None else (1.0 - self.share) / (1.0 - OBJECTIVE)


class TopFigures:
    """Figures of one history frame."""

    def __init__(self, history: HistoryFrame) -> None:
        self._history = history
        self._num_recent = max(1, round(MINUTE_S / max(history.interval_s, 1e-3)))

    def sums(self, name: str, values: Sequence[float]) -> Sums:
        return Sums(name, sum(self._recent(values)), sum(values))

    def columns(self, columns: Columns) -> list[Sums]:
        """Return the sums of each column that is not 0, the largest of the last minute first."""
        found = [self.sums(name, values) for name, values in columns]
        found.sort(key=lambda one: (-one.minute, -one.all, one.name))
        return [one for one in found if one.all > 0]

    def goodput(self, is_recent: bool) -> GoodputCounts:
        met, missed = self._history.num_met, self._history.num_missed
        if is_recent:
            return GoodputCounts(sum(self._recent(met)), sum(self._recent(missed)))
        return GoodputCounts(sum(met), sum(missed))

    def mean_ms(self, values: Sequence[float | None], counts: Sequence[int]) -> float | None:
        """Return the mean of the last minute of means over so many each."""
        pairs = [
            (value, num)
            for value, num in zip(self._recent(values), self._recent(counts), strict=False)
            if value is not None and num
        ]
        total = sum(num for _, num in pairs)
        return sum(value * num for value, num in pairs) / total if total else None

    def longest_ms(self) -> float | None:
        found = [one for one in self._recent(self._history.max_step_ms) if one is not None]
        return max(found, default=None)

    def steps_per_s(self) -> float:
        counts = self._recent(self._history.num_steps)
        span_s = (len(counts) - 1) * self._history.interval_s + self._history.last_s
        return sum(counts) / max(span_s, 1e-3)

    def model_error(self) -> float | None:
        known = [one for one in self._history.model_error if one is not None]
        return known[-1] if known else None

    def _recent(self, values: Sequence[T]) -> Sequence[T]:
        return values[-self._num_recent :]
