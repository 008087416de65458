"""Metrics that tell tenants and tiers apart, from hand-made events."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from headway.core.causes import PreemptionMethod, WaitCause
from headway.core.events import Admitted, Arrived, EngineLost, Event, Finished, Forked, Preempted
from headway.core.request import FinishReason
from headway.core.slo.forecast import EngineSpeed, Forecast
from headway.core.slo.steptime import StepCost
from headway.core.terms import Targets, Terms
from headway.core.waiting.accounts import CACHED_COST
from headway.observe import Metrics
from headway.observe.metrics.goodput import Fairness
from headway.observe.trace.account import CauseShare
from tests.observe.stories import tokens
from tests.observe.test_metrics import Reader, step

STOP, ABORT, ERROR = FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("m")


@pytest.fixture
def read(metrics: Metrics) -> Reader:
    return Reader(metrics)


def live(name: str, targets: Targets, end: FinishReason = STOP) -> list[list[Event]]:
    """First token after 2 s, then 1 s for each of two more; ends after 4 s."""
    terms = Terms(tenant="a", tier="gold", targets=targets)
    return [
        [Arrived(name, 0.0, 10, terms), Admitted(name, 1.0, 1.0, 0, 10, False)],
        [tokens(name), step(2.0)],
        [tokens(name), step(3.0)],
        [tokens(name), Finished(name, 4.0, end, 3), step(4.0)],
    ]


@pytest.mark.parametrize(
    ("targets", "end", "counts"),
    [
        (Targets(ttft_s=2.0, tpot_s=1.0, deadline_s=4.0), STOP, (1, 1)),
        (Targets(ttft_s=1.9), STOP, (1, 0)),
        (Targets(tpot_s=0.9), STOP, (1, 0)),
        (Targets(deadline_s=3.9), STOP, (1, 0)),
        (Targets(deadline_s=9.0), ERROR, (1, 0)),
        (Targets(deadline_s=9.0), ABORT, (None, None)),
        (Targets(ttft_s=1.9), ABORT, (1, 0)),
        (Targets(), STOP, (None, None)),
    ],
)
def test_goodput(
    metrics: Metrics, read: Reader, targets: Targets, end: FinishReason, counts: tuple
) -> None:
    for events in live("r-1", targets, end):
        metrics.consume(events)
    of = {"tenant": "a", "tier": "gold"}
    promised = read("headway_requests_with_targets_total", **of)
    kept = read("headway_requests_within_targets_total", **of)
    assert (promised, kept or (promised and 0)) == counts
    if promised:
        assert read("headway_tokens_with_targets_total", **of) == 3
        assert read("headway_goodput") == counts[1]
    else:
        assert read("headway_goodput") == 1.0


def test_waits_by_cause(metrics: Metrics, read: Reader) -> None:
    terms = Terms(tenant="a", tier="gold")
    metrics.count_wait(terms, (CauseShare("kv_blocks", 1.5, "b"), CauseShare("tenant_share", 0.5)))
    metrics.count_wait(terms, (CauseShare("kv_blocks", 1.0),))
    of = {"tenant": "a", "tier": "gold"}
    assert read("headway_wait_seconds_total", cause="kv_blocks", **of) == 2.5
    assert read("headway_wait_seconds_total", cause="tenant_share", **of) == 0.5


def test_preemptions_by_method(metrics: Metrics, read: Reader) -> None:
    metrics.consume([Arrived("r-1", 0.0, 10), Admitted("r-1", 0.0, 0.0, 0, 10, False)])
    metrics.consume([Preempted("r-1", 1.0, "r-2", 7, PreemptionMethod.TRIM, WaitCause.TIER_ORDER)])
    assert read("headway_preemptions_total", method="trim", cause="tier_order") == 1
    assert read("headway_preempted_tokens_discarded_total") == 7


def test_the_labels_are_bounded() -> None:
    metrics = Metrics("m", max_tenants=3)
    for number in range(50):
        metrics.count_wait(Terms(tenant=f"t{number}"), (CauseShare("kv_blocks", 1.0),))
    lines = metrics.render().decode().splitlines()
    found = [line for line in lines if line.startswith("headway_wait_seconds_total")]
    names = sorted(line.split('tenant="')[1].split('"')[0] for line in found)
    assert names == ["other", "t0", "t1", "t2"]
    read = Reader(metrics)
    assert read("headway_wait_seconds_total", tenant="other", tier="", cause="kv_blocks") == 47


def test_the_error_of_the_step_time_model(metrics: Metrics, read: Reader) -> None:
    forecast = Forecast(EngineSpeed(StepCost(0.01, error=0.07), 0.1, 0.1))
    metrics.consume([step(1.0, forecast=forecast)])
    assert read("headway_step_time_model_error") == 0.07


# -------------------------------------------------------------------- fairness


def test_the_gap_is_between_tenants_that_both_wait(metrics: Metrics, read: Reader) -> None:
    a, b = Terms(tenant="a"), Terms(tenant="b", weight=2.0)
    metrics.consume([Arrived(f"a-{n}", 0.0, 100, a) for n in range(3)])
    assert read("headway_fairness_gap") == 0
    metrics.consume([Arrived(f"b-{n}", 0.0, 100, b) for n in range(3)])
    metrics.consume([Admitted("a-0", 1.0, 1.0, 0, 100, False), step(1.0)])
    assert read("headway_fairness_gap") == 100
    metrics.consume([tokens("a-0", 5), step(2.0)])
    assert read("headway_fairness_gap") == 110
    metrics.consume([Admitted("b-0", 2.0, 2.0, 40, 100, False), step(2.0)])
    assert read("headway_fairness_gap") == 110 - (60 + CACHED_COST * 40) / 2
    # Nothing of it waits any more: whatever it gets then is at nobody's expense.
    metrics.consume([Admitted(f"b-{n}", 3.0, 3.0, 0, 100, False) for n in (1, 2)])
    assert read("headway_fairness_gap") == 0


def test_whoever_comes_back_from_idle_has_no_claim_on_the_past() -> None:
    fairness = Fairness()
    a, b = Terms(tenant="a"), Terms(tenant="b")
    for _ in range(2):
        fairness.arrive(a)
    fairness.serve(a, 1000.0)
    fairness.arrive(b)
    assert fairness.gap == 0
    fairness.serve(b, 10.0)
    assert fairness.gap == 10
    fairness.leave(b, is_waiting=True)
    assert len(fairness) == 1
    fairness.arrive(b)
    assert fairness.gap == 0


def test_preempted_forked_and_lost_requests_wait_and_leave(metrics: Metrics) -> None:
    fairness = metrics._by_tenant._fairness
    a, b = Terms(tenant="a"), Terms(tenant="b")
    metrics.consume([Arrived("a-0", 0.0, 10, a), Arrived("b-0", 0.0, 10, b)])
    metrics.consume([Admitted(name, 0.0, 0.0, 0, 10, False) for name in ("a-0", "b-0")])
    metrics.consume([Forked("a-0#1", 1.0, "a-0"), tokens("a-0", 50), step(1.0)])
    assert fairness.gap == 0
    metrics.consume([Preempted("a-0", 1.0, "b-0", 10)])
    assert fairness.gap == 0
    metrics.consume([EngineLost(2.0)])
    assert fairness.gap == 100
    metrics.consume([Finished(name, 3.0, ABORT, 0) for name in ("a-0", "a-0#1", "b-0")])
    assert (fairness.gap, len(fairness)) == (0, 0)


def test_the_least_served_is_found_without_a_look_at_everyone():
    class Counted(dict[str, Any]):
        num_looks = 0

        def values(self):
            self.num_looks += len(self)
            return super().values()

    fairness = Fairness()
    fairness._tenants = tenants = Counted()
    for number in range(1000):
        fairness.arrive(Terms(tenant=str(number)))
    assert tenants.num_looks == 0


def test_a_newcomer_begins_where_the_least_served_is():
    random, fairness, live = Random(1), Fairness(), dict[str, list[float]]()
    for _ in range(5000):
        tenant = str(random.randrange(40))
        terms = Terms(tenant=tenant)
        if random.random() < 0.4:
            least = min((service for service, _ in live.values()), default=0.0)
            live.setdefault(tenant, [least, 0])[1] += 1
            fairness.arrive(terms)
        elif tenant in live and random.random() < 0.5:
            live[tenant][0] += 5.0
            fairness.serve(terms, 5.0)
        elif tenant in live:
            live[tenant][1] -= 1
            fairness.leave(terms, is_waiting=True)
            if not live[tenant][1]:
                del live[tenant]
        services = [service for service, _ in live.values()]
        assert fairness.gap == (max(services) - min(services) if services else 0)
        assert len(fairness) == len(live)
        assert len(fairness._least) <= 2 * 40 + 1
