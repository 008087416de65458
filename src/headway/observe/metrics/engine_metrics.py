"""Metrics of each engine of a frontend: load, KV cache, predicted against actual TTFT.

The number of label values is bounded: engines beyond the first MAX_ENGINES share the label "other".
Series of engines that are gone stay with their last counts; the state of an engine that is gone is
removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge

from headway.core.events import Routed
from headway.observe.metrics.tenant_metrics import OTHER, Labels

MAX_ENGINES = 128


class EngineState(NamedTuple):
    """One engine now."""

    name: str
    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of the KV blocks in use."""


class _Predicted(NamedTuple):
    engine: str
    ttft_s: float


class EngineMetrics:
    """Gauges of the state of engines, and counters of predicted and actual TTFT."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: Mapping[str, str],
        max_engines: int = MAX_ENGINES,
    ) -> None:
        self._labels = dict(labels)
        self._engines = Labels(max_engines)
        self._predicted: dict[str, _Predicted] = {}
        """Predictions for requests without a first token."""
        names = [name for name in self._labels if name != "engine"] + ["engine"]
        self._running = Gauge(
            "headway_engine_requests_running",
            "Requests in the running set of an engine, of all frontends.",
            names,
            registry=registry,
        )
        self._waiting = Gauge(
            "headway_engine_requests_waiting",
            "Requests in the waiting queue of an engine, of all frontends.",
            names,
            registry=registry,
        )
        self._kv_usage = Gauge(
            "headway_engine_kv_usage",
            "Share of the KV blocks of an engine in use, 0 to 1.",
            names,
            registry=registry,
        )
        self._requests = Counter(
            "headway_engine_predicted_requests",
            "Requests with a first token whose TTFT the router had predicted.",
            names,
            registry=registry,
        )
        self._predicted_s = Counter(
            "headway_engine_predicted_ttft_seconds",
            "Sum of the TTFT that the router predicted when it chose the engine.",
            names,
            registry=registry,
        )
        self._actual_s = Counter(
            "headway_engine_actual_ttft_seconds",
            "Sum of the TTFT of the same requests.",
            names,
            registry=registry,
        )
        self._error_s = Counter(
            "headway_engine_ttft_error_seconds",
            "Sum of the absolute differences between predicted and actual TTFT.",
            names,
            registry=registry,
        )

    def describe(self, engines: list[EngineState]) -> None:
        """Export the state of all engines, and of no others."""
        for gauge in (self._running, self._waiting, self._kv_usage):
            gauge.clear()
        for one in engines:
            label = self._labelled(one.name)
            self._running.labels(**label).inc(one.num_running)
            self._waiting.labels(**label).inc(one.num_waiting)
            if label["engine"] != OTHER:  # shares of several engines have no sum
                self._kv_usage.labels(**label).set(one.kv_usage)

    def route(self, event: Routed) -> None:
        """Remember what was predicted for a request; nothing for one that was sent before."""
        if event.request_id in self._predicted or not event.predicted_ttft_s:
            self._predicted.pop(event.request_id, None)
        else:
            self._predicted[event.request_id] = _Predicted(event.engine, event.predicted_ttft_s)

    def observe_ttft(self, request_id: str, ttft_s: float | None) -> None:
        """Compare the TTFT of a request with what was predicted."""
        predicted = self._predicted.pop(request_id, None)
        if predicted is not None and ttft_s is not None:
            label = self._labelled(predicted.engine)
            self._requests.labels(**label).inc()
            self._predicted_s.labels(**label).inc(predicted.ttft_s)
            self._actual_s.labels(**label).inc(max(0.0, ttft_s))
            self._error_s.labels(**label).inc(abs(ttft_s - predicted.ttft_s))

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended."""
        self._predicted.pop(request_id, None)

    def _labelled(self, engine: str) -> dict[str, str]:
        return {**self._labels, "engine": self._engines.of(engine)}
