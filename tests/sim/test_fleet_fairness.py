"""A simulated fleet with two frontends: one router gives fair shares, and may be killed."""

from __future__ import annotations

import pytest

from benchmarks.sim import fleet_fair_rig
from benchmarks.sim.fleet_fair_rig import FleetRig, FleetTenant, Setup

TENANTS = (FleetTenant("flood", 300), FleetTenant("calm", 60, is_last=True))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_fair_rig, "NUM_ENGINES", 3)
    monkeypatch.setattr(fleet_fair_rig, "WARM_UP_S", 1.0)


def test_one_router_shares_a_fleet_between_tenants_of_two_frontends():
    figures = FleetRig(Setup(2), TENANTS, 0).run(5.0)
    assert figures.jain > 0.97 and figures.gap_s <= figures.bound_s


def test_requests_are_served_through_the_death_of_the_router():
    rig = FleetRig(Setup(2, kills_at_s=(1.5,), outage_s=0.5), TENANTS, 0)
    rig.run(5.0)
    records = rig.fleet.records.values()
    ended = [one for one in records if one.finished_at is not None]
    assert len(ended) > 60 and {rig._owners[one.id].name for one in ended} == {"flood", "calm"}
    # Nobody is passed over by requests of its tenant that came a second later.
    waiting = [one for one in records if one.first_token_at is None]
    begun = max(one.arrived_at for one in records if one.first_token_at is not None)
    assert begun - min(one.arrived_at for one in waiting) < 2.5
    for router in rig.fleet.routers:
        router.check()
