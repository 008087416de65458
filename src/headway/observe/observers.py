"""Wires metrics, audit and ledger to the same events."""

from __future__ import annotations

from dataclasses import dataclass

from headway.clock import Clock
from headway.config import LedgerConfig
from headway.observe.ledger.ledger import Ledger, open_archive
from headway.observe.metrics.metrics import Metrics
from headway.observe.trace.audit import Audit


@dataclass(frozen=True, slots=True)
class Observers:
    """Metrics and ledger of one server."""

    metrics: Metrics
    ledger: Ledger


def make_observers(metrics: Metrics, config: LedgerConfig, clock: Clock) -> Observers:
    """Return the observers of a server, with the ledger of the config.

    The caller starts and closes the ledger.
    """
    archive = open_archive(config)
    ledger = Ledger(Audit(on_wait=metrics.count_wait), clock, archive)
    if archive is not None:
        metrics.watch_ledger(archive.writer)
    return Observers(metrics, ledger)
