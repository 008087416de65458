"""Spans of requests for an OTLP receiver, made of their accounts; only if one is configured.

Must not import metrics. In reading order:

    context.py   traceparent: the trace that a request belongs to
    spans.py     the spans of a request, as plain values
    encode.py    spans as OTLP messages; the only module that needs opentelemetry-proto
    exporter.py  the thread that sends them
    recorder.py  an observer that gives ended requests to the exporter
"""
