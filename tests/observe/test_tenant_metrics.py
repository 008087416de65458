"""Metrics that tell tenants and tiers apart, from hand-made events."""

from __future__ import annotations

import pytest

from headway.core.causes import PreemptionMethod, WaitCause
from headway.core.events import Admitted, Arrived, Event, Finished, Idled, Preempted
from headway.core.request import FinishReason
from headway.core.slo.forecast import EngineSpeed, Forecast
from headway.core.slo.steptime import StepCost
from headway.core.terms import Targets, Terms
from headway.observe import Metrics, RequestTable
from headway.observe.trace.account import CauseShare
from tests.observe.stories import causes, tokens
from tests.observe.test_metrics import Reader, Tell, step

STOP, ABORT, ERROR = FinishReason.STOP, FinishReason.ABORT, FinishReason.ERROR


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("m")


@pytest.fixture
def tell(metrics: Metrics) -> Tell:
    table = RequestTable()
    return lambda events: metrics.consume(table.consume(events))


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
    tell: Tell, read: Reader, targets: Targets, end: FinishReason, counts: tuple
) -> None:
    for events in live("r-1", targets, end):
        tell(events)
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


def test_waits_end_with_an_admission_or_with_the_request(tell: Tell, read: Reader) -> None:
    terms = Terms(tenant="a", tier="gold")
    tell([Arrived("r-1", 0.0, 10, terms), Arrived("r-2", 0.0, 10, terms)])
    tell([Admitted("r-1", 1.5, 1.5, 0, 10, False, causes(kv_blocks=1.5))])
    tell([Finished("r-2", 2.0, ABORT, 0, causes=causes(kv_blocks=0.5, tenant_share=1.5))])
    of = {"tenant": "a", "tier": "gold"}
    assert read("headway_wait_seconds_total", cause="kv_blocks", **of) == 2.0
    assert read("headway_wait_seconds_total", cause="tenant_share", **of) == 1.5


def test_preemptions_by_method(tell: Tell, read: Reader) -> None:
    tell([Arrived("r-1", 0.0, 10), Admitted("r-1", 0.0, 0.0, 0, 10, False)])
    tell([Preempted("r-1", 1.0, "r-2", 7, PreemptionMethod.TRIM, WaitCause.TIER_ORDER)])
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


def test_the_error_of_the_step_time_model(tell: Tell, read: Reader) -> None:
    forecast = Forecast(EngineSpeed(StepCost(0.01, error=0.07), 0.1, 0.1))
    tell([step(1.0, forecast=forecast)])
    assert read("headway_step_time_model_error") == 0.07


def test_the_service_gap_is_that_of_the_last_step(tell: Tell, read: Reader) -> None:
    tell([step(1.0, num_waiting=2, service_gap=110.0)])
    assert read("headway_fairness_gap") == 110
    tell([step(2.0, num_waiting=2, service_gap=80.0)])
    assert read("headway_fairness_gap") == 80
    tell([Idled(3.0, 0)])
    assert read("headway_fairness_gap") == 0


def test_a_restart_clears_the_service_gap(metrics: Metrics, tell: Tell, read: Reader) -> None:
    tell([step(1.0, num_waiting=2, service_gap=110.0)])
    metrics.count_restart("crash", 2)
    assert read("headway_fairness_gap") == 0


@pytest.mark.parametrize(("ttft_s", "num_met"), [(2.0, 1), (1.9, 0)])
def test_a_prompt_without_output_is_on_time_by_its_end(
    tell: Tell, read: Reader, ttft_s: float, num_met: int
) -> None:
    terms = Terms(tenant="a", tier="gold", targets=Targets(ttft_s=ttft_s))
    tell([Arrived("r-1", 0.0, 10, terms), Admitted("r-1", 1.0, 1.0, 0, 10, False)])
    tell([Finished("r-1", 2.0, FinishReason.LENGTH, 0), step(2.0)])
    of = {"tenant": "a", "tier": "gold"}
    assert read("headway_requests_with_targets_total", **of) == 1
    assert (read("headway_requests_within_targets_total", **of) or 0) == num_met
