"""Fair shares over the fleet, charged in machine-seconds."""

from __future__ import annotations

from collections import Counter

import pytest

from headway.core.request import Request
from headway.routing import Router
from headway.routing.shares import SERVICE_PER_S
from tests.routing.support import COST, LIMITS, request, router, serve, step


def work(made: Router, num_rounds: int) -> Counter[str]:
    """Have each engine finish what it was sent, round by round; count by tenant."""
    served: Counter[str] = Counter()
    for number in range(num_rounds):
        now = 0.1 * number
        for sending in made.tick(now):
            name = sending.request.id
            serve(made, name, sending.num_cached)
            made.finished(name, [7] * 8)
            served[sending.request.terms.tenant] += 1
    return served


def test_tenants_share_by_weight():
    made = router(1)
    for _ in range(60):
        made.arrive(request(512, "heavy", weight=3.0), 0.0)
        made.arrive(request(512, "light"), 0.0)
    served = work(made, 40)
    assert served["heavy"] == pytest.approx(3 * served["light"], rel=0.15)


class Pinned:
    """Only the first engine may have the requests of one tenant, as if it alone had the prefix."""

    def may_assign(self, request: Request, engine: str) -> bool:
        return request.terms.tenant != "pinned" or engine == "e0"

    def may_send(self, request: Request, engine: str) -> bool:
        return True


def test_a_tenant_pinned_to_one_engine_gets_its_share_of_the_fleet():
    """Its share is half of all four engines, so its one engine serves it alone."""
    made = router(4, allowed=Pinned(), move_gain=1.0)
    for n in range(160):
        made.arrive(request(512, "spread"), 0.0)
        if n % 4 == 0:
            made.arrive(request(512, "pinned"), 0.0)
    here = next(engine for engine in made.engines if engine.name == "e0").queue.requests
    before = Counter(one.terms.tenant for one in here)
    assert before["spread"] > 10 and before["pinned"] == 40
    work(made, 30)
    left = Counter(one.terms.tenant for one in here)
    assert before["pinned"] - left["pinned"] >= 25
    assert before["spread"] - left["spread"] <= 5


def test_a_tenant_back_from_idleness_is_lifted_to_the_least_of_the_fleet():
    made = router(2, move_gain=1.0)
    shares = made.shares
    for tenant in ("ahead", "behind", "ahead", "behind"):
        made.arrive(request(512, tenant), 0.0)
    shares.charge(request(tenant="ahead"), 100.0)
    shares.charge(request(tenant="behind"), 1.0)
    made.arrive(request(512, "new"), 0.0)
    assert shares.counter(request(tenant="new")) == SERVICE_PER_S * 1.0


def test_a_resent_request_is_not_charged_again():
    made = router(2)
    one = request(512, "a", name="one")
    made.arrive(one, 0.0)
    made.tick(0.0)
    charged = made.shares.counter(one)
    assert charged > 0
    made.engine_lost(made.engine_of("one") or "", 0.0)
    again = request(512, "a", name="one")
    made.arrive(again, 0.0, is_resent=True)
    made.tick(0.0)
    serve(made, "one")
    made.finished("one", [7] * 32)
    assert made.shares.counter(again) == charged


def test_the_charge_follows_the_output():
    made = router(1)
    served: dict[int, float] = {}
    for num_output in (1, 30):
        tenant = f"t{num_output}"
        one = request(64, tenant)
        made.arrive(one, 0.0)
        made.tick(0.0)
        serve(made, one.id)
        made.finished(one.id, [7] * num_output)
        served[num_output] = made.shares.accounts.of(one).served
    assert served[30] - served[1] == pytest.approx(SERVICE_PER_S * 29 * (0.3e-3 + 64e-6))


def test_a_prefill_that_is_cut_off_is_charged_as_far_as_it_came():
    made = router(1)
    served: dict[int, float] = {}
    for num_steps in (0, 1, 2):
        one = request(1024, f"t{num_steps}")
        made.arrive(one, 0.0)
        made.tick(0.0)
        made.admitted(one.id, 0)
        for _ in range(num_steps):
            made.observe("e0", step(512, num_running=1), 0.1)
        made.cancel(one.id)
        served[num_steps] = made.shares.accounts.of(one).served
    assert served[0] == pytest.approx(0.0)
    assert served[1] == pytest.approx(served[2] / 2)
    assert served[2] == pytest.approx(SERVICE_PER_S * COST.prefill_s(1024))


def test_a_miss_is_charged():
    made = router(1)
    served: dict[int, float] = {}
    for num_cached in (32, 0):
        tenant = f"t{num_cached}"
        for name in (f"{tenant}-first", f"{tenant}-second"):
            one = request([5] * 64, tenant, name=name)
            made.arrive(one, 0.0)
            made.tick(0.0)
            serve(made, name, num_cached if name.endswith("second") else 0)
            made.finished(name, [7])
        served[num_cached] = made.shares.accounts.of(one).served
    assert served[0] - served[32] == pytest.approx(
        SERVICE_PER_S * (COST.prefill_s(64) - COST.prefill_s(32, 32))
    )


def test_priorities_hold_within_a_tenant():
    made = router(1)
    made.arrive(request(512), 0.0)
    made.tick(0.0)
    low, high = request(512, priority=5), request(512, priority=1)
    made.arrive(low, 0.0)
    made.arrive(high, 0.0)
    made.finished(next(iter(made._requests)))
    assert [sending.request for sending in made.tick(0.1)] == [high]


def test_a_request_that_has_waited_long_goes_first_within_its_tenant():
    made = router(1)
    made.arrive(request(512, name="first"), 0.0)
    made.tick(0.0)
    old = request(512, priority=5)
    made.arrive(old, 0.0)
    made.tick(10.0)
    made.arrive(request(512, priority=1), 10.0)
    made.finished("first")
    assert [sending.request for sending in made.tick(10.1)] == [old]


def test_spot_requests_wait_for_all_others():
    made = router(1)
    made.arrive(request(512, name="first"), 0.0)
    made.tick(0.0)
    spot, ordinary = request(512, "s", is_spot=True), request(512, "o")
    made.arrive(spot, 0.0)
    made.arrive(ordinary, 0.0)
    made.finished("first")
    assert [sending.request for sending in made.tick(0.1)] == [ordinary]


def test_a_tenant_at_its_kv_quota_holds_up_nobody():
    made = router(1)
    ids = [f"s{n}" for n in range(10)]
    for name in ids:
        made.arrive(request(16, "small", name=name, max_kv_share=0.01), 0.0)
    assert len(made.tick(0.0)) == LIMITS.max_num_seqs
    made.arrive(request(512, "other"), 0.0)
    assert made.tick(0.01) == []  # the engine may admit what it has
    for n in range(3):
        made.observe("e0", step(0, num_waiting=LIMITS.max_num_seqs), 0.1 + n)
    assert [one.request.terms.tenant for one in made.tick(4.0)] == ["other"]
    for name in ids[:8]:
        made.finished(name)
    assert {one.request.id for one in made.tick(5.0)} == set(ids[8:])
    made.check()


def test_idle_tenants_take_bounded_memory():
    made = router(1)
    for number in range(300):
        one = request(16, f"t{number}")
        made.arrive(one, 0.0)
        made.tick(0.0)
        serve(made, one.id)
        made.finished(one.id)
    assert not made._requests
    assert not made.shares._listed or len(made.shares._heaps[False]) <= 300
