"""Passes events to the request table, and its changes to every observer."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from headway.clock import Clock
from headway.config import LedgerConfig
from headway.core.events import Event
from headway.observe.ledger.ledger import Ledger, open_archive
from headway.observe.metrics.metrics import Metrics
from headway.observe.metrics.stats_log import StatsLog
from headway.observe.requests.steps import RecentSteps
from headway.observe.requests.table import Changes, RequestTable

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
    steps: RecentSteps = field(default_factory=RecentSteps)
    others: list[Observer] = field(default_factory=list[Observer])

    def consume(self, events: Iterable[Event]) -> None:
        """Consume the events of at most one step, in order."""
        changes = self.requests.consume(events)
        for observer in (self.metrics, self.ledger, self.stats, *self.others):
            try:
                observer.consume(changes)
            except Exception:
                # A fault in one observer must not affect the others.
                logger.exception("an observer failed")


def make_observers(metrics: Metrics, config: LedgerConfig, clock: Clock) -> Observers:
    """Return the observers of a server, with the ledger of the config.

    The caller starts and closes the ledger.
    """
    archive = open_archive(config)
    if archive is not None:
        metrics.watch_ledger(archive.writer)
    requests = RequestTable()
    return Observers(requests, metrics, Ledger(requests, clock, archive), StatsLog(requests))
