"""Tenants get their turns whatever the others add."""

from __future__ import annotations

import random

from headway.engine.process.tenant_turns import TenantTurns


def take_all(turns: TenantTurns[str]) -> list[str]:
    taken: list[str] = []
    while (found := turns.take()) is not None:
        taken.append(found[1])
    return taken


def test_each_tenant_has_one_item_per_round():
    turns: TenantTurns[str] = TenantTurns()
    for name in ("a0", "a1", "a2", "b0", "b1", "c0"):
        turns.add(name[0], name)
    assert take_all(turns) == ["a0", "b0", "c0", "a1", "b1", "a2"]
    assert turns.take() is None


def test_a_tenant_that_comes_later_waits_for_no_second_item():
    turns: TenantTurns[str] = TenantTurns()
    turns.add("a", "a0")
    assert turns.take() == ("a", "a0")
    turns.add("a", "a1")
    turns.add("b", "b0")
    assert take_all(turns) == ["b0", "a1"]


def test_busy_tenants_are_passed_over():
    turns: TenantTurns[str] = TenantTurns()
    for name in ("a0", "a1", "b0"):
        turns.add(name[0], name)
    assert turns.take(busy={"a"}) == ("b", "b0")
    assert turns.take(busy={"a"}) is None
    assert take_all(turns) == ["a0", "a1"]


def test_no_item_waits_for_two_of_another_tenant():
    """Random arrivals: between an item's turn and its end, each other tenant has one item."""
    draw = random.Random(7)
    turns: TenantTurns[tuple[str, int]] = TenantTurns()
    waiting: dict[str, list[int]] = {}
    passed: dict[tuple[str, str], int] = {}
    for number in range(5000):
        if draw.random() < 0.5:
            tenant = draw.choice("aaaaaabc")
            if not waiting.get(tenant):
                passed.update({(tenant, other): 0 for other in "abc"})
            waiting.setdefault(tenant, []).append(number)
            turns.add(tenant, (tenant, number))
        elif (found := turns.take()) is not None:
            tenant, (_, taken) = found
            assert waiting[tenant].pop(0) == taken, "a tenant's items stay in order"
            for other in "abc":
                passed[tenant, other] = 0
                if other != tenant and waiting.get(other):
                    passed[other, tenant] += 1
                    assert passed[other, tenant] <= 2, (other, tenant)
