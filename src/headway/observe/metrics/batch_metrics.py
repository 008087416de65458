"""Metrics of batches: those that are open, their lines under way, and lines done.

No label names a batch or a tenant: there may be thousands of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

COMPLETED, FAILED = "completed", "failed"
"""Outcomes of a line: in the output file, or in the error file."""


class BatchMetrics:
    """Gauges that are read at each scrape, and a counter of lines done."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._open = Gauge(
            "headway_batches_open",
            "Batches that have not ended, by status.",
            [*labels, "status"],
            registry=registry,
        )
        self._under_way = Gauge(
            "headway_batch_lines_under_way",
            "Lines of batches that are sent to engines and have no result yet.",
            [*labels],
            registry=registry,
        )
        self._done = Counter(
            "headway_batch_lines_done",
            "Lines of batches whose result is on disk, by outcome.",
            [*labels, "outcome"],
            registry=registry,
        )

    def watch(
        self,
        statuses: Iterable[str],
        num_open: Callable[[str], int],
        num_under_way: Callable[[], int],
    ) -> None:
        """Export the batches with each status, and the lines under way."""
        for status in statuses:
            gauge = self._open.labels(**self._labels, status=status)
            gauge.set_function(partial(num_open, status))
        self._under_way.labels(**self._labels).set_function(num_under_way)
        for outcome in (COMPLETED, FAILED):
            self._done.labels(**self._labels, outcome=outcome)  # 0 before the first

    def count_done(self, is_error: bool, number: int) -> None:
        """Count lines whose result is on disk; any thread may call."""
        outcome = FAILED if is_error else COMPLETED
        self._done.labels(**self._labels, outcome=outcome).inc(number)
