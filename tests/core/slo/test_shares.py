"""What tenants owe each other, and how it bounds which targets are feasible."""

from __future__ import annotations

import pytest

from headway.core.events import Admitted, Stepped
from headway.core.terms import Terms
from headway.core.waiting.fair import URGENT_LEAD
from tests.core.slo.paced import Paced
from tests.support.harness import make_request


def serve_ahead(engine: Paced, lead: float) -> None:
    """Two tenants wait; one of them has been given so much more than the other."""
    engine.add("running", 4, max_tokens=20)
    engine.step()
    engine.add("quiet", 20, max_tokens=2, terms=Terms(tenant="quiet"))
    account = engine.scheduler.accounts.open(make_request(terms=Terms(tenant="busy")))
    account.counter = engine.scheduler.accounts.of(engine.scheduler.requests["quiet"]).counter
    account.charge(lead)


def test_what_the_requests_of_a_tenant_use_of_its_lead_counts_for_the_next():
    engine = Paced(max_num_seqs=1, scheduling_policy="fair")
    serve_ahead(engine, URGENT_LEAD - 100)
    engine.step()
    engine.ask("first", 1500, 100, tenant="busy", deadline_s=60.0)
    assert engine.refusal("first") is None
    # Its tenant's turn comes when the other has caught up with what the first is given.
    engine.ask("second", 20, 2, tenant="busy", ttft_s=1.0)
    assert engine.refusal("second") is not None
    engine.ask("stranger", 20, 2, tenant="quiet", ttft_s=1.0)
    assert engine.refusal("stranger") is None
    engine.run()


@pytest.mark.parametrize(
    ("lead", "first", "second"),
    [(URGENT_LEAD - 1, "soon", "quiet"), (URGENT_LEAD + 1, "quiet", "soon")],
)
def test_a_request_with_targets_goes_before_another_tenant_within_the_lead_only(
    lead: float, first: str, second: str
):
    engine = Paced(max_num_seqs=1, scheduling_policy="fair")
    serve_ahead(engine, lead)
    engine.ask("soon", 20, 2, tenant="busy", ttft_s=2.0)
    engine.run()
    order = [event.request_id for event in engine.seen(Admitted)]
    assert order == ["running", first, second]


def test_what_a_tenant_owes_others_counts_when_its_targets_are_judged():
    engine = Paced(max_num_seqs=1, scheduling_policy="fair")
    serve_ahead(engine, URGENT_LEAD + 3000)
    engine.ask("soon", 20, 2, tenant="busy", ttft_s=2.0)
    assert engine.refusal("soon") is not None
    engine.run()


def test_a_tenant_owes_nothing_to_itself_nor_to_spot():
    engine = Paced(max_num_seqs=1, scheduling_policy="fair")
    engine.add("running", 4, max_tokens=20)
    engine.step()
    busy, spot = Terms(tenant="busy"), Terms(tenant="idler", is_spot=True)
    engine.add("spot", 20, max_tokens=2, terms=spot)
    engine.add("own", 20, max_tokens=2, terms=busy)
    account = engine.scheduler.accounts.of(engine.scheduler.requests["own"])
    account.charge(10 * URGENT_LEAD)
    for tenants in (["busy"], ["busy", "idler", "nobody"]):
        assert not engine.scheduler.waiting.shares(tenants).leads.get("busy")
    engine.ask("soon", 20, 2, tenant="busy", ttft_s=2.0)
    assert engine.refusal("soon") is None
    engine.run()


def test_the_forecast_says_what_a_tenant_owes_others():
    engine = Paced(max_num_seqs=1, scheduling_policy="fair")
    serve_ahead(engine, URGENT_LEAD + 100)
    engine.ask("soon", 20, 2, tenant="busy", ttft_s=2.0)
    engine.step()
    shares = engine.scheduler.waiting.shares(["busy"])
    assert shares.leads["busy"].excess == pytest.approx(100, abs=10)
    assert shares.owed("busy", 500) == pytest.approx(600, abs=10)
    assert shares.owed("busy", -500) == shares.owed("quiet", 500) == 0.0
    forecast = engine.seen(Stepped)[-1].forecast
    assert forecast is not None
    assert forecast.tenants["busy"].owed_s == pytest.approx(0.1 + 0.024, abs=0.02)
    engine.run()
    forecast = engine.seen(Stepped)[-1].forecast
    assert forecast is not None
    assert forecast.tenants == {}
