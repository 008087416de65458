"""Prometheus metrics and the statistics line of the log, from events.

In reading order:

    lifetimes.py       how long each stage of a request took
    goodput.py         SLOs met, and the service gap between tenants
    tenant_metrics.py  metrics by tenant and tier
    metrics.py         Metrics
    stats_log.py       the statistics line
"""
