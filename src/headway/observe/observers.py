"""Passes events to the request table, and its changes to every observer."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from headway.clock import Clock
from headway.config import LedgerConfig
from headway.core.events import Event
from headway.observe.ledger.ledger import Ledger, open_archive
from headway.observe.metrics.metrics import Metrics
from headway.observe.metrics.stats_log import StatsLog
from headway.observe.requests.table import RequestTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Observers:
    """The request table of one server, and what reads it."""

    requests: RequestTable
    metrics: Metrics
    ledger: Ledger
    stats: StatsLog

    def consume(self, events: Iterable[Event]) -> None:
        """Consume the events of at most one step, in order."""
        changes = self.requests.consume(events)
        for observer in (self.metrics, self.ledger, self.stats):
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
