"""Passes events to the request table, and its changes to every observer."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from headway.clock import Clock
from headway.config import LedgerConfig, TracingConfig
from headway.core.events import Event
from headway.observe.ledger.ledger import Ledger, open_archive
from headway.observe.metrics.metrics import Metrics
from headway.observe.metrics.stats_log import StatsLog
from headway.observe.requests.steps import RecentSteps
from headway.observe.requests.table import Changes, RequestTable
from headway.observe.spans.recorder import SpanRecorder, open_spans

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Reads what the events of a step changed; must not block."""

    def consume(self, changes: Changes) -> None: ...


@dataclass(frozen=True, slots=True)
class Observers:
    """The request table of one server, and what reads it."""

    requests: RequestTable
    metrics: Metrics
    ledger: Ledger
    stats: StatsLog
    spans: SpanRecorder | None = None
    steps: RecentSteps = field(default_factory=RecentSteps)
    others: list[Observer] = field(default_factory=list[Observer])

    def consume(self, events: Iterable[Event]) -> None:
        """Consume the events of at most one step, in order."""
        changes = self.requests.consume(events)
        own = (self.metrics, self.ledger, self.stats)
        spans = () if self.spans is None else (self.spans,)
        for observer in (*own, *spans, *self.others):
            try:
                observer.consume(changes)
            except Exception:
                # A fault in one observer must not affect the others.
                logger.exception("an observer failed")

    def start(self) -> None:
        """Start the threads that write the ledger and send spans."""
        self.ledger.start()
        if self.spans is not None:
            self.spans.exporter.start()

    def close(self) -> None:
        """Write and send what is left; blocks for at most some seconds."""
        if self.spans is not None:
            self.spans.exporter.stop()
        self.ledger.close()


def make_observers(
    metrics: Metrics, config: LedgerConfig, clock: Clock, tracing: TracingConfig | None = None
) -> Observers:
    """Return the observers of a server, with the ledger and the receiver of the config.

    The caller starts and closes them.
    """
    archive = open_archive(config)
    if archive is not None:
        metrics.watch_ledger(archive.writer)
    requests = RequestTable()
    spans = None if tracing is None else open_spans(tracing, requests, clock)
    if spans is not None:
        metrics.watch_spans(spans.exporter)
    ledger = Ledger(requests, clock, archive)
    return Observers(requests, metrics, ledger, StatsLog(requests), spans)
