"""Consumers of core events: the request table, metrics and the ledger.

Must not import engine or server. In reading order:

    trace/        the account of a request, as JSON and as text
    requests/     the request table: follows each request and attributes its waits
    metrics/      Prometheus metrics and the statistics line of the log
    ledger/       one row per finished request, in SQLite or PostgreSQL
    spans/        spans of finished requests, for a receiver of OpenTelemetry
    observers.py  passes events to the request table, and its changes to the others
"""

from headway.observe.ledger.ledger import Ledger
from headway.observe.metrics.metrics import Metrics
from headway.observe.metrics.stats_log import StatsLog
from headway.observe.observers import Observers, make_observers
from headway.observe.requests.table import RequestTable

__all__ = ["Ledger", "Metrics", "Observers", "RequestTable", "StatsLog", "make_observers"]
