"""Who is found by a key or a name, and what a reload keeps."""

from __future__ import annotations

import hmac
from dataclasses import replace

import pytest

from headway.clock import VirtualClock
from headway.errors import ConfigError, QuotaError
from headway.tenancy import directory as directory_module
from headway.tenancy.directory import Directory, TenantRecord
from headway.tenancy.keys import digest_of
from headway.tenancy.values import Quotas, Roster, Tenant, Tier

A, B, C = (digest_of(key) for key in (b"a", b"b", b"c"))


def roster(*tenants: Tenant, **tiers: float) -> Roster:
    return Roster(
        {one.name: one for one in tenants},
        {name: Tier(name, weight) for name, weight in tiers.items()},
    )


def found(one: Directory, digest: bytes) -> TenantRecord:
    record = one.by_digest(digest)
    assert record is not None
    return record


def test_without_keys_everyone_is_the_anonymous_tenant() -> None:
    open_one = Directory(VirtualClock())
    assert open_one.is_open
    assert open_one.anonymous.terms.tenant == ""
    assert open_one.anonymous.terms.weight == 1.0
    assert not open_one.anonymous.tenant.is_admin


def test_a_key_opens_only_after_a_comparison_in_constant_time(monkeypatch) -> None:
    one = Directory(VirtualClock(), {A: "alice"})
    compared = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return False

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert one.by_digest(A) is None
    assert compared == [(A, A)]


def test_a_roster_without_keys_accepts_no_key() -> None:
    one = Directory(VirtualClock(), roster=roster(Tenant("alice")))
    assert not one.is_open
    assert one.by_digest(A) is None


def test_single_keys_have_default_terms_or_those_of_their_tenant() -> None:
    alice = Tenant("alice", (A,), "gold", 2.0)
    one = Directory(VirtualClock(), {B: "alice", C: "key-c"}, roster(alice, gold=3.0))
    assert found(one, A) == found(one, B)
    assert found(one, B).terms.weight == 6.0
    assert (found(one, C).terms.tenant, found(one, C).terms.weight) == ("key-c", 1.0)


def test_a_key_of_two_tenants_is_refused_and_nothing_changes() -> None:
    one = Directory(VirtualClock(), {A: "alice"}, roster(Tenant("bob", (B,))))
    with pytest.raises(ConfigError, match=r"tenants\.bob"):
        one.adopt(roster(Tenant("bob", (A,))))
    assert found(one, A).tenant.name == "alice"
    assert found(one, B).tenant.name == "bob"


def test_a_reload_changes_terms_and_keeps_what_was_used() -> None:
    quotas = Quotas(requests_per_minute=2)
    one = Directory(VirtualClock(), roster=roster(Tenant("alice", (A,), quotas=quotas)))
    lease = found(one, A).meter.open_lease()
    found(one, A).meter.open_lease()
    one.adopt(roster(Tenant("alice", (B,), "gold", quotas=quotas), gold=5.0))
    assert one.by_digest(A) is None
    after = found(one, B)
    assert after.terms.weight == 5.0
    with pytest.raises(QuotaError):
        after.meter.open_lease()
    lease.release()
    assert after.meter.num_in_flight == 1


def test_a_tenant_removed_and_added_again_keeps_its_use() -> None:
    clock, quotas = VirtualClock(), Quotas(requests_per_minute=1)
    alice, bob = Tenant("alice", (A,), quotas=quotas), Tenant("bob", (B,))
    one = Directory(clock, roster=roster(alice, bob))
    lease = found(one, A).meter.open_lease()
    one.find_named("guest", found(one, A)).meter.open_lease()
    for _ in range(2):
        one.adopt(roster(bob))
        assert one.by_digest(A) is None
    one.adopt(roster(alice, bob))
    with pytest.raises(QuotaError):
        found(one, A).meter.open_lease()
    with pytest.raises(QuotaError):
        one.find_named("guest", found(one, A)).meter.open_lease()
    lease.release()
    assert found(one, A).meter.num_in_flight == 0
    one.adopt(roster(bob))
    clock.advance_to(60.0)
    one.adopt(roster(bob))
    assert "alice" not in one._draining, "it owes nothing any more"


def test_an_unlisted_tenant_has_the_terms_of_its_gateway() -> None:
    gateway = Tenant("gateway", (A,), "gold", 2.0, Quotas(requests_per_minute=1), is_admin=True)
    one = Directory(VirtualClock(), roster=roster(gateway, Tenant("bob"), gold=3.0))
    by = found(one, A)
    guest = one.find_named("guest@x", by)
    assert guest.terms.tenant == guest.terms.cache_group == "guest@x"
    assert (guest.terms.tier, guest.terms.weight) == ("gold", 6.0)
    assert not guest.tenant.is_admin
    assert one.find_named("guest@x", by) is guest
    assert one.find_named("bob", by).terms.weight == 1.0
    guest.meter.open_lease()
    with pytest.raises(QuotaError):
        one.find_named("guest@x", by).meter.open_lease()
    by.meter.open_lease()  # its own quota is another
    one.adopt(roster(gateway, gold=4.0))
    again = one.find_named("guest@x", found(one, A))
    assert again.terms.weight == 8.0
    with pytest.raises(QuotaError):
        again.meter.open_lease()


def test_an_unlisted_tenant_shares_no_prefixes_and_outlives_its_first_gateway() -> None:
    first = Tenant("first", (A,), cache_group="team")
    second = Tenant("second", (B,))
    one = Directory(VirtualClock(), roster=roster(first, second))
    assert one.find_named("guest", found(one, A)).terms.cache_group == "guest"
    one.adopt(roster(replace(first, is_disabled=True), second))
    assert found(one, A).tenant.is_disabled
    assert not one.find_named("guest", found(one, B)).tenant.is_disabled


def test_a_gateway_without_admin_rights_names_no_admin() -> None:
    root, gateway = Tenant("root", (A,), is_admin=True), Tenant("gateway", (B,))
    one = Directory(VirtualClock(), roster=roster(root, gateway))
    find_named = one.find_named("root", found(one, B))
    assert find_named.terms == found(one, A).terms and find_named.meter is found(one, A).meter
    assert not find_named.tenant.is_admin and not one.may_see_all(find_named)
    assert one.find_named("root", found(one, A)).tenant.is_admin


def test_an_unlisted_tenant_does_not_see_all_where_its_gateway_would() -> None:
    one = Directory(VirtualClock(), roster=roster(Tenant("gateway", (A,))))
    assert one.may_see_all(found(one, A))
    assert not one.may_see_all(one.find_named("guest", found(one, A)))


def test_an_unlisted_tenant_that_is_listed_later_keeps_its_meter() -> None:
    gateway = Tenant("gateway", (A,), quotas=Quotas(requests_per_minute=1))
    one = Directory(VirtualClock(), roster=roster(gateway))
    one.find_named("guest", found(one, A)).meter.open_lease()
    one.adopt(roster(gateway, Tenant("guest", (B,), quotas=Quotas(requests_per_minute=1))))
    with pytest.raises(QuotaError):
        found(one, B).meter.open_lease()
    one.adopt(roster(Tenant("other", (C,))))
    assert one.by_digest(A) is None


def test_the_number_of_unlisted_names_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(directory_module, "MAX_UNLISTED", 2)
    clock = VirtualClock()
    gateway = Tenant("gateway", (A,), quotas=Quotas(requests_per_minute=60))
    one = Directory(clock, roster=roster(gateway))
    by = found(one, A)
    lease = one.find_named("x", by).meter.open_lease()
    one.find_named("y", by).meter.open_lease().release()
    assert one.find_named("z", by) is by  # x is busy
    admin = replace(by, tenant=replace(by.tenant, is_admin=True))
    assert not one.find_named("z", admin).tenant.is_admin
    assert one.find_named("y", by) is not by
    lease.release()
    assert one.find_named("z", by) is by  # x still owes
    clock.advance_to(1.1)
    assert one.find_named("z", by).tenant.name == "z"
    assert one.find_named("x", by).tenant.name == "x"  # in the place of y, at rest by now
    assert len(one._unlisted) == 2


def test_a_long_stream_of_the_oldest_unlisted_tenant_does_not_block_a_new_one(monkeypatch) -> None:
    monkeypatch.setattr(directory_module, "MAX_UNLISTED", 300)
    one = Directory(VirtualClock(), {A: "gateway"})
    by = found(one, A)
    streams = [one.find_named(f"busy-{i}", by).meter.open_lease() for i in range(50)]
    for i in range(250):
        one.find_named(f"idle-{i}", by)
    for i in range(250):
        assert one.find_named(f"new-{i}", by).tenant.name == f"new-{i}"
    assert len(one._unlisted) == 300
    for i, stream in enumerate(streams):
        assert one.find_named(f"busy-{i}", by).meter.num_in_flight == 1
        stream.release()


def test_a_lookup_checks_few_unlisted_tenants_and_the_next_checks_others(monkeypatch) -> None:
    monkeypatch.setattr(directory_module, "MAX_UNLISTED", 300)
    one = Directory(VirtualClock(), {A: "gateway"})
    by = found(one, A)
    for i in range(299):
        one.find_named(f"busy-{i}", by).meter.open_lease()
    one.find_named("idle", by)
    num_looks = 0
    while one.find_named("newcomer", by) is by:
        num_looks += directory_module.MAX_LOOKS
        assert num_looks < 300
    assert "idle" not in one._unlisted
    assert len(one._unlisted) == 300


def test_many_tenants_are_found_by_key() -> None:
    digests = [digest_of(b"%d" % number) for number in range(10_000)]
    tenants = [Tenant(f"t{number}", (digest,)) for number, digest in enumerate(digests)]
    one = Directory(VirtualClock(), roster=roster(*tenants))
    assert all(found(one, digests[i]).tenant.name == f"t{i}" for i in (0, 4999, 9999))
