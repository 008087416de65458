"""Metrics by engine: state of those that are there, predictions, a bounded number of series."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from headway.core.events import Routed
from headway.observe.metrics.engine_metrics import EngineMetrics, EngineState

LABELS = {"model_name": "m", "engine": "0"}


def made(max_engines: int = 2) -> tuple[EngineMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    return EngineMetrics(registry, LABELS, max_engines), registry


def value(registry: CollectorRegistry, name: str, engine: str) -> float | None:
    return registry.get_sample_value(f"headway_engine_{name}", {**LABELS, "engine": engine})


def test_the_state_is_that_of_the_engines_that_are_there() -> None:
    metrics, registry = made()
    metrics.describe([EngineState("a", 3, 1, 0.5), EngineState("b", 0, 0, 0.0)])
    metrics.describe([EngineState("a", 2, 0, 0.25)])
    assert value(registry, "requests_running", "a") == 2
    assert value(registry, "requests_waiting", "a") == 0
    assert value(registry, "kv_usage", "a") == 0.25
    assert value(registry, "requests_running", "b") is None


def test_a_flood_of_engines_shares_a_label() -> None:
    metrics, registry = made()
    metrics.describe([EngineState(f"e{number}", 1, 2, 0.9) for number in range(50)])
    assert value(registry, "requests_running", "other") == 48
    assert value(registry, "requests_waiting", "other") == 96
    assert value(registry, "kv_usage", "other") is None
    for number in range(50):
        metrics.route(Routed(f"r{number}", 0.0, f"e{number}", "load", 0.0, 0, 1.0))
        metrics.observe_ttft(f"r{number}", 2.0)
    assert value(registry, "predicted_requests_total", "other") == 48


def test_predictions_are_compared_with_what_came() -> None:
    metrics, registry = made()
    for name, predicted_s, actual_s in (("x", 1.0, 1.5), ("y", 2.0, 1.0)):
        metrics.route(Routed(name, 0.0, "a", "load", 0.0, 0, predicted_s))
        metrics.observe_ttft(name, actual_s)
    assert value(registry, "predicted_requests_total", "a") == 2
    assert value(registry, "predicted_ttft_seconds_total", "a") == 3.0
    assert value(registry, "actual_ttft_seconds_total", "a") == 2.5
    assert value(registry, "ttft_error_seconds_total", "a") == 1.5


def test_what_was_sent_again_or_has_ended_is_not_compared() -> None:
    metrics, registry = made()
    metrics.route(Routed("moved", 0.0, "a", "load", 0.0, 0, 1.0))
    metrics.route(Routed("moved", 0.0, "b", "failover", 0.0, 0, 1.0))
    metrics.observe_ttft("moved", 2.0)
    metrics.route(Routed("ended", 0.0, "a", "load", 0.0, 0, 1.0))
    metrics.forget("ended")
    metrics.route(Routed("unpredicted", 0.0, "a", "load", 0.0, 0))
    metrics.observe_ttft("unpredicted", 2.0)
    assert value(registry, "predicted_requests_total", "a") is None
    assert not metrics._predicted
