"""Consumers of core events: metrics and the statistics line of the log."""

from headway.observe.metrics import Metrics
from headway.observe.stats_log import StatsLog

__all__ = ["Metrics", "StatsLog"]
