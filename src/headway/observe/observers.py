"""What the server watches its requests with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.clock import Clock
from headway.config import LedgerConfig
from headway.core.events import Event
from headway.observe.audit import Audit
from headway.observe.ledger import Ledger, no_prices, open_archive
from headway.observe.metrics import Metrics
from headway.observe.usage import PriceOf


@dataclass(frozen=True, slots=True)
class Observers:
    """Metrics and the ledger, fed from the same events."""

    metrics: Metrics
    ledger: Ledger

    def consume(self, events: Sequence[Event]) -> None:
        self.metrics.consume(events)
        self.ledger.consume(events)


def make_observers(
    metrics: Metrics, config: LedgerConfig, clock: Clock, price_of: PriceOf = no_prices
) -> Observers:
    """Observers whose ledger is as configured; it must be started, and closed in the end."""
    archive = open_archive(config)
    ledger = Ledger(Audit(on_wait=metrics.count_wait), clock, archive, price_of)
    if archive is not None:
        metrics.watch_ledger(archive.writer)
    return Observers(metrics, ledger)
