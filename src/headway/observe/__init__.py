"""Consumers of core events: traces, metrics and the ledger.

Must not import engine or server. In reading order:

    trace/        follows each request and attributes its waits
    metrics/      Prometheus metrics and the statistics line of the log
    ledger/       one row per finished request, in SQLite or PostgreSQL
    observers.py  wires metrics, audit and ledger
"""

from headway.observe.ledger.ledger import Ledger
from headway.observe.metrics.metrics import Metrics
from headway.observe.metrics.stats_log import StatsLog
from headway.observe.observers import Observers, make_observers
from headway.observe.trace.audit import Audit

__all__ = ["Audit", "Ledger", "Metrics", "Observers", "StatsLog", "make_observers"]
