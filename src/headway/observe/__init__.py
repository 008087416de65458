"""Consumers of core events: metrics, the statistics line of the log, traces and the ledger.

Must not import engine or server. `observers.py` wires them.

    trace/    follows each request and explains its waits
    metrics/  Prometheus metrics and the statistics line
    ledger/   one row per finished request, in SQLite or PostgreSQL
"""

from headway.observe.ledger.ledger import Ledger
from headway.observe.metrics.metrics import Metrics
from headway.observe.metrics.stats_log import StatsLog
from headway.observe.observers import Observers, make_observers
from headway.observe.trace.audit import Audit

__all__ = ["Audit", "Ledger", "Metrics", "Observers", "StatsLog", "make_observers"]
