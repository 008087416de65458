"""What the server watches its requests with."""

from __future__ import annotations

from dataclasses import dataclass

from headway.clock import Clock
from headway.config import LedgerConfig
from headway.observe.ledger.ledger import Ledger, open_archive
from headway.observe.metrics.metrics import Metrics
from headway.observe.trace.audit import Audit


@dataclass(frozen=True, slots=True)
class Observers:
    """Metrics and the ledger, to be fed from the same events."""

    metrics: Metrics
    ledger: Ledger


def make_observers(metrics: Metrics, config: LedgerConfig, clock: Clock) -> Observers:
    """Observers whose ledger is as configured; it must be started, and closed in the end."""
    archive = open_archive(config)
    ledger = Ledger(Audit(on_wait=metrics.count_wait), clock, archive)
    if archive is not None:
        metrics.watch_ledger(archive.writer)
    return Observers(metrics, ledger)
