"""Consumers of core events: metrics, the statistics line of the log, and the ledger."""

from headway.observe.audit import Audit
from headway.observe.ledger import Ledger
from headway.observe.metrics import Metrics
from headway.observe.observers import Observers, make_observers
from headway.observe.stats_log import StatsLog

__all__ = ["Audit", "Ledger", "Metrics", "Observers", "StatsLog", "make_observers"]
