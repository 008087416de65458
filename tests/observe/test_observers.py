"""One request table for every observer."""

from __future__ import annotations

import logging
from typing import NoReturn

import pytest

from headway.clock import SystemClock
from headway.config import LedgerConfig
from headway.core.events import Arrived, Finished
from headway.observe import Metrics, make_observers
from tests.observe.stories import STOP
from tests.observe.test_metrics import LABELS


def test_a_fault_in_one_observer_does_not_affect_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_changes: object) -> NoReturn:
        raise ValueError("broken")

    observers = make_observers(Metrics("m"), LedgerConfig(ledger_url="none"), SystemClock())
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(observers.metrics, "consume", fail)
        observers.consume([Arrived("r-1", 0.0, 10)])
    assert "an observer failed" in caplog.text
    assert (observers.stats.line(1.0) or "").startswith("running 0")
    observers.consume([Finished("r-1", 1.0, STOP, 0)])
    found = observers.ledger.find("r-1", None)
    assert found is not None and found.state == "finished"
    read = observers.metrics.registry.get_sample_value
    assert read("vllm:request_success_total", {**LABELS, "finished_reason": "stop"}) == 1
