"""What the collector keeps: sums that add up, and a bounded amount of it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headway.clock import VirtualClock
from headway.config import LedgerConfig
from headway.core.events import Admitted, Arrived, Event, Finished, Preempted, Routed
from headway.core.owners import BlockOwners
from headway.core.terms import Targets, Terms
from headway.dashboard.collector import MAX_SHOWN, NUM_ENDED, NUM_PREEMPTIONS, Collector
from headway.dashboard.frames import FrameMaker
from headway.dashboard.history import MAX_KINDS
from headway.dashboard.tenants import MAX_TENANTS, TenantWindow
from headway.dashboard.waits import INTERVAL_S, NUM_INTERVALS
from headway.observe import Metrics, make_observers
from tests.observe.stories import STOP, causes, tokens
from tests.observe.test_metrics import step


class Rig:
    """A collector over hand-made events, on a clock that moves by hand."""

    def __init__(self) -> None:
        self.clock = VirtualClock(1000.0)
        self.observers = make_observers(Metrics("m"), LedgerConfig(ledger_url="none"), self.clock)
        self.engines: list[Any] = []
        engine: Any = SimpleNamespace(engines=self.engines, subscribe_restarts=lambda _: None)
        self.collector = Collector(engine, self.observers, self.clock, lambda: 5.0)
        self.frames = FrameMaker(self.collector, lambda: "ready")

    def tell(self, at: float, *events: Event) -> None:
        self.clock.advance_to(at)
        self.collector.consume(self.collector.requests.consume(events))

    def run(self, name: str, terms: Terms, at: float, waited_s: float) -> None:
        """A request that waits, and ends with its first token."""
        self.tell(at, Arrived(name, at, 10, terms))
        start = at + waited_s
        shares = causes(kv_blocks=0.75 * waited_s, tenant_share=0.25 * waited_s)
        admitted = Admitted(name, start, waited_s, 4, 10, False, shares)
        self.tell(start, admitted, tokens(name), Finished(name, start, STOP, 1), step(start))


def total(pairs: list[Any]) -> float:
    return sum(sum(values) for _, values in pairs)


def test_the_seconds_of_the_causes_add_up_to_the_waits() -> None:
    rig, draw = Rig(), random.Random(1)
    waited, at = 0.0, 1000.0
    for number in range(60):
        at = rig.clock.now() + draw.uniform(0.0, 2.0)
        wait_s = draw.uniform(0.0, 6.0)
        rig.run(f"r-{number}", Terms(tenant=f"t{number % 3}"), at, wait_s)
        waited += wait_s
    frame = rig.frames.history()
    assert sum(frame["wait_s"]) == pytest.approx(waited, abs=0.01)
    assert total(frame["causes"]) == pytest.approx(waited, abs=0.05)
    assert sum(frame["open_waits"]) == 0.0
    by_tenant = [one.total() for one in rig.collector.tenants.tenants.values()]
    assert sum(one["wait_s"] for one in by_tenant) == pytest.approx(waited)
    for counts in by_tenant:
        parts = [value for name, value in counts.items() if name.startswith("wait:")]
        assert sum(parts) == pytest.approx(counts["wait_s"])
    assert rig.frames.history()["causes"] == frame["causes"]


def test_a_request_that_waits_is_shown_before_its_causes_are_known() -> None:
    rig = Rig()
    rig.tell(1000.0, Arrived("r-1", 1000.0, 10, Terms(tenant="a")))
    rig.clock.advance_to(1012.5)
    frame, now = rig.frames.history(), rig.frames.now()
    assert sum(frame["open_waits"]) == pytest.approx(12.5)
    assert (now["num_running"], now["num_waiting"]) == (0, 1)
    assert now["tenants"] == [["a", 0, 1, 0]]
    assert frame["loads"]["waiting"][0][-3:] == [1, 1, 1]


def test_counts_of_an_interval() -> None:
    rig = Rig()
    slo = Terms(tenant="a", targets=Targets(ttft_s=1.0))
    rig.run("r-1", slo, 1000.0, 0.5)
    rig.run("r-2", slo, 1001.0, 2.0)
    rig.tell(1003.5, Arrived("r-3", 1003.5, 10, Terms(tenant="b")))
    rig.tell(1003.6, Admitted("r-3", 1003.6, 0.1, 0, 10, False))
    rig.tell(1003.7, Preempted("r-3", 1003.7, "r-9", 7), Routed("r-3", 1003.7, "e", "x", 0.0, 0))
    for reason in ("overloaded", "overloaded", "tenant_limit"):
        rig.observers.metrics.count_refusal(reason)
    rig.collector.count_restart("crash", 3)
    frame = rig.frames.history()
    assert (frame["num_met"][-1], frame["num_missed"][-1]) == (1, 1)
    assert (frame["num_arrived"][-1], frame["num_finished"][-1]) == (3, 2)
    assert [[name, values[-1]] for name, values in frame["refusals"]] == [
        ["overloaded", 2],
        ["tenant_limit", 1],
    ]
    assert [[name, values[-1]] for name, values in frame["preemptions"]] == [["kv_blocks", 1]]
    lost = frame["last_preemptions"][0]
    assert (lost["id"], lost["tenant"], lost["by_tenant"]) == ("r-3", "b", None)
    assert frame["last_restarts"] == [{"at": 5.0, "reason": "crash", "num_resubmitted": 3}]
    assert frame["num_steps"][-1] == 2
    assert rig.collector.routed == {"e": 1}


def test_blocks_of_all_engines_by_owner() -> None:
    rig = Rig()
    info: Any = SimpleNamespace(capacity=SimpleNamespace(num_blocks=100))
    for name, num_running in (("a", 1), ("b", 1), ("c", 0)):
        owners = BlockOwners(13, {name: 10, "z": 1}, 2, 5)
        last = step(1.0, num_blocks_used=13, num_running=num_running)
        rig.engines.append(SimpleNamespace(info=info, last_step=last, owners=owners))
    blocks = rig.frames.history()["blocks"]
    assert blocks["total"] == 300
    assert dict(zip(blocks["tenants"], (one[-1] for one in blocks["owned"]), strict=True)) == {
        "a": 10,
        "b": 10,
        "z": 2,
    }
    assert (blocks["kept"][-1], blocks["cached"][-1], blocks["used"][-1]) == (4, 15, 39)


def test_an_hour_of_ten_thousand_tenants_is_bounded() -> None:
    rig = Rig()
    for number in range(10_000):
        terms = Terms(tenant=f"t{number}")
        rig.run(f"r-{number}", terms, 1000.0 + 0.36 * number, 0.1)
        rig.tell(rig.clock.now(), Preempted("r-x", 0.0, "r-y", 1))
        rig.collector.count_refusal(f"reason {number % 100}")
        rig.run(f"s-{number}", Terms(tenant="busy"), rig.clock.now(), 0.1)
    collector = rig.collector
    assert len(collector.history.intervals) == NUM_INTERVALS
    assert len(collector.tenants.tenants) <= MAX_TENANTS
    assert "busy" in collector.tenants.tenants
    assert len(collector.preemptions) == NUM_PREEMPTIONS
    assert len(collector.ended) == NUM_ENDED
    assert all(len(one.refusals) <= MAX_KINDS + 1 for one in collector.history.intervals)
    frame = rig.frames.history()
    assert len(frame["loads"]["tenants"]) <= MAX_SHOWN
    assert len(msgspec.json.encode(frame)) < 200_000
    assert sum(frame["num_arrived"]) == pytest.approx(
        2 * NUM_INTERVALS * INTERVAL_S / 0.36, rel=0.05
    )


def test_a_busy_tenant_is_among_those_with_counts_of_their_own() -> None:
    window, draw = TenantWindow(0.0, max_tenants=8), random.Random(3)
    for number in range(4000):
        # Eight tenants that were busy before it, then many that ask once.
        name = "busy" if draw.random() < 0.2 else f"t{number}"
        name = f"early {number % 8}" if number < 400 else name
        window.of(name).add("arrived")
    assert len(window.tenants) == 8
    named = {name: one.total()["arrived"] for name, one in window.tenants.items()}
    assert sum(named.values()) + window.others.total()["arrived"] == 4000
    assert max(named, key=lambda name: named[name]) == "busy"
    window.advance(3600.0)
    assert not window.tenants and not window.others.total()


def test_a_pause_longer_than_the_window_empties_it() -> None:
    rig = Rig()
    rig.run("r-1", Terms(tenant="a"), 1000.0, 3.0)
    rig.clock.advance_to(10_000.0)
    frame = rig.frames.history()
    assert total(frame["causes"]) == 0.0
    assert sum(frame["num_arrived"]) == 0
