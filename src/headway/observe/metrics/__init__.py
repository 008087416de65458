"""Prometheus metrics and the statistics line of the log, from the request table.

In reading order:

    goodput.py         whether requests met their SLO targets
    tenant_metrics.py  metrics by tenant and tier
    engine_metrics.py  metrics by engine of a fleet
    expected_ttft.py   TTFT of a request that would arrive now
    batch_metrics.py   metrics of batches
    metrics.py         Metrics
    stats_log.py       the statistics line
"""
