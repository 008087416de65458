"""Who is behind a key or a name, on what terms, and what they have used; as of the last good file.

Looking somebody up costs the same whether there are ten tenants or ten thousand. The meters outlive
a reload: a changed file gives nobody a fresh minute.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from headway.clock import Clock
from headway.core.terms import Terms
from headway.errors import ConfigError
from headway.tenancy.quotas import Meter
from headway.tenancy.values import (
    ANONYMOUS,
    DEFAULT_PERMISSIONS,
    EMPTY,
    Permissions,
    Price,
    Roster,
    Tenant,
    Tier,
    terms_for,
)

MAX_UNLISTED = 10_000
"""Tenants that are in no file and that a proxy has named."""
MAX_LOOKS = 64
"""Guests a newcomer may look at to find one to evict: bounds the cost of a lookup."""


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """A tenant as it stands now."""

    tenant: Tenant
    terms: Terms
    meter: Meter
    permissions: Permissions = DEFAULT_PERMISSIONS
    gateway: str | None = None
    """The tenant that named this one, if it is in no file."""

    def with_tier(self, tier: Tier) -> TenantRecord:
        """The same tenant, served in another tier."""
        return replace(self, terms=terms_for(self.tenant, tier), permissions=tier.permissions)

    def without_admin(self) -> TenantRecord:
        """The same tenant, no admin even if it is one."""
        if not self.tenant.is_admin:
            return self
        return replace(self, tenant=replace(self.tenant, is_admin=False))


class Directory:
    """Finds tenants. `keys` are those that belong to no roster: which tenant each stands for."""

    def __init__(
        self,
        clock: Clock,
        keys: Mapping[bytes, str] | None = None,
        roster: Roster | None = None,
    ) -> None:
        self._clock = clock
        self.keys: Mapping[bytes, str] = {}
        """Keys that belong to no roster."""
        self.is_open = not keys and roster is None
        """No key is asked for, and everyone is the same anonymous tenant."""
        self._listed: dict[str, TenantRecord] = {}
        self._by_digest: dict[bytes, tuple[bytes, TenantRecord]] = {}
        self._unlisted: OrderedDict[str, TenantRecord] = OrderedDict()
        """Least recently named first."""
        self._draining: dict[str, TenantRecord] = {}
        """No longer known, and still with requests under way or something owed."""
        self.roster = EMPTY
        self.adopt(roster or EMPTY, keys or {})

    @property
    def anonymous(self) -> TenantRecord:
        return self._listed[ANONYMOUS.name]

    def price_of(self, tier: str) -> Price | None:
        """What the tier of this name costs now."""
        found = self.roster.tier(tier)
        return None if found is None else found.price

    def by_digest(self, digest: bytes) -> TenantRecord | None:
        """Whose key has this digest."""
        # How long it takes to look in here tells nothing of a key: nobody can choose what one
        # hashes to. What is found is compared in constant time all the same.
        known, record = self._by_digest.get(digest, (b"", None))
        return record if hmac.compare_digest(known, digest) else None

    def may_see_all(self, record: TenantRecord) -> bool:
        """Whether it may be told of everyone at once: an admin, and whoever is the only one."""
        # The anonymous one is always listed.
        is_alone = len(self._listed) == 2 and record.tenant.name in self._listed
        return self.is_open or record.tenant.is_admin or is_alone

    def find_named(self, name: str, by: TenantRecord) -> TenantRecord:
        """The tenant that `by` speaks for. One that is in no file has the terms of who names it,
        and a share and quotas of its own; where there are too many of those, it is `by` itself."""
        known = self._listed.get(name)
        if known is not None:
            return known if by.tenant.is_admin else known.without_admin()
        unlisted = self._unlisted.get(name)
        if unlisted is not None:
            self._unlisted.move_to_end(name)
            return unlisted
        if len(self._unlisted) >= MAX_UNLISTED and not self._evict_guest():
            return by.without_admin()
        unlisted = self._guest(name, by.tenant, self._draining.pop(name, None))
        self._unlisted[name] = unlisted
        return unlisted

    def adopt(self, roster: Roster, keys: Mapping[bytes, str] | None = None) -> None:
        """Go by this roster, and by these keys if any are given, from now on.

        ConfigError, and nothing has changed, if the roster claims a key of another tenant.
        """
        keys = self.keys if keys is None else keys
        for tenant in roster.tenants.values():
            for digest in tenant.key_digests:
                if keys.get(digest, tenant.name) != tenant.name:
                    raise ConfigError(
                        f"a key of tenants.{tenant.name} is given to this server as one of "
                        f"{keys[digest]} too"
                    )
        self.keys = dict(keys)
        tenants = {ANONYMOUS.name: ANONYMOUS}
        tenants.update({name: Tenant(name) for name in self.keys.values()})
        tenants.update(roster.tenants)
        unlisted_before, self._unlisted = self._unlisted, OrderedDict()
        listed = self._listed
        before = self._draining | unlisted_before | listed
        has_same_tiers, self.roster = roster.tiers == self.roster.tiers, roster
        self._listed = {
            name: known
            # Most are as they were, and this is no time to hold up those who stream.
            if has_same_tiers and (known := listed.get(name)) and known.tenant == tenant
            else self._make_record(tenant, before.get(name))
            for name, tenant in tenants.items()
        }
        digests = {digest: one.name for one in tenants.values() for digest in one.key_digests}
        self._by_digest = {
            digest: (digest, self._listed[name]) for digest, name in (digests | self.keys).items()
        }
        for name, unlisted in unlisted_before.items():
            by = self._listed.get(unlisted.gateway or "")
            if by is not None and name not in self._listed:
                self._unlisted[name] = self._guest(name, by.tenant, unlisted)
        self._draining = {
            name: one
            for name, one in before.items()
            if name not in self._listed and name not in self._unlisted
            if not one.meter.is_idle
        }

    def _guest(self, name: str, by: Tenant, before: TenantRecord | None) -> TenantRecord:
        """How a tenant that is in no file stands, on the terms of who named it."""
        return replace(self._make_record(_tenant_named_by(name, by), before), gateway=by.name)

    def _evict_guest(self) -> bool:
        """Evict the least recently named guest that rests; False if none was found.

        A guest with requests under way, or with a quota to pay back, goes to the end: the next
        newcomer looks at others, so a few long streams never keep thousands of idle guests.
        """
        for _ in range(min(MAX_LOOKS, len(self._unlisted))):
            name, unlisted = self._unlisted.popitem(last=False)
            if unlisted.meter.is_idle:
                return True
            self._unlisted[name] = unlisted
        return False

    def _make_record(self, tenant: Tenant, before: TenantRecord | None) -> TenantRecord:
        """How it stands, with the meter it had before if it was there."""
        tier = self.roster.tier_of(tenant)
        terms = terms_for(tenant, tier)
        if before is None:
            meter = Meter(tenant.quotas, self._clock)
        else:
            meter = before.meter
            meter.set_quotas(tenant.quotas)
        return TenantRecord(tenant, terms, meter, tier.permissions)


def _tenant_named_by(name: str, by: Tenant) -> Tenant:
    # Whether `by` is disabled is asked of itself; its guest may come through another gateway.
    return replace(
        by, name=name, key_digests=(), cache_group=None, is_admin=False, is_disabled=False
    )
