"""Finds the record of a tenant by key or name.

Records follow the last valid file. A lookup takes the same time for ten tenants and for ten
thousand. The meters survive a reload: a changed file does not reset the use of any tenant.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice

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
"""Tenants that are in no file, and that a gateway has named."""
MAX_LOOKS = 64
"""Unlisted tenants checked per eviction; bounds the cost of a lookup."""


@dataclass(frozen=True, slots=True)
class TenantRecord:
    """A tenant with its current terms, permissions and meter."""

    tenant: Tenant
    terms: Terms
    meter: Meter
    permissions: Permissions = DEFAULT_PERMISSIONS
    gateway: str | None = None
    """The gateway tenant that named this tenant, if it is in no file."""

    def with_tier(self, tier: Tier) -> TenantRecord:
        """Return the record of this tenant in another tier."""
        return replace(self, terms=terms_for(self.tenant, tier), permissions=tier.permissions)

    def without_admin(self) -> TenantRecord:
        """Return the record of this tenant without admin rights."""
        if not self.tenant.is_admin:
            return self
        return replace(self, tenant=replace(self.tenant, is_admin=False))


class Directory:
    """Finds tenant records by key or name.

    `keys` are the keys outside the roster, each with the name of its tenant.
    """

    def __init__(
        self,
        clock: Clock,
        keys: Mapping[bytes, str] | None = None,
        roster: Roster | None = None,
    ) -> None:
        self._clock = clock
        self.keys: Mapping[bytes, str] = {}
        """Keys outside the roster, by digest."""
        self.is_open = not keys and roster is None
        """Whether no key is required; every request then has the anonymous tenant."""
        self._listed: dict[str, TenantRecord] = {}
        self._by_digest: dict[bytes, tuple[bytes, TenantRecord]] = {}
        self._unlisted: OrderedDict[str, TenantRecord] = OrderedDict()
        """Tenants that are in no file, least recently named first."""
        self._draining: dict[str, TenantRecord] = {}
        """Removed tenants that still have requests under way or a quota debt."""
        self.roster = EMPTY
        self.adopt(roster or EMPTY, keys or {})

    @property
    def anonymous(self) -> TenantRecord:
        return self._listed[ANONYMOUS.name]

    def price_of(self, tier: str) -> Price | None:
        """Return the price of the tier with this name, or None."""
        found = self.roster.tier(tier)
        return None if found is None else found.price

    def by_digest(self, digest: bytes) -> TenantRecord | None:
        """Return the record of the tenant whose key has this digest, or None."""
        # The time of this lookup reveals nothing about a key, because a client cannot choose its
        # digest. The comparison takes constant time nevertheless.
        known, record = self._by_digest.get(digest, (b"", None))
        return record if hmac.compare_digest(known, digest) else None

    def may_see_all(self, record: TenantRecord) -> bool:
        """Return whether a tenant may see all tenants: an admin, or the only tenant."""
        # The anonymous tenant is always listed.
        is_alone = len(self._listed) == 2 and record.tenant.name in self._listed
        return self.is_open or record.tenant.is_admin or is_alone

    def listed(self, name: str) -> TenantRecord | None:
        """Return the record of a tenant that a file names, or that a gateway has named."""
        return self._listed.get(name) or self._unlisted.get(name)

    def names_with(self, text: str, max_names: int) -> list[str]:
        """Return names of listed tenants that contain a text, at most `max_names`."""
        found = (name for name in self._listed if name and text in name)
        return list(islice(found, max_names))

    def find(self, name: str, gateway: str | None) -> TenantRecord | None:
        """Return the record of a tenant, listed or named by this gateway; None if it is gone."""
        if gateway is None:
            return self._listed.get(name)
        by = self._listed.get(gateway)
        return None if by is None else self.find_named(name, by)

    def find_named(self, name: str, gateway: TenantRecord) -> TenantRecord:
        """Return the record of the tenant that `gateway` names.

        A tenant that is in no file gets the terms of the gateway, with a share and quotas of its
        own. If there are too many such tenants, the record is that of the gateway itself.
        """
        known = self._listed.get(name)
        if known is not None:
            return known if gateway.tenant.is_admin else known.without_admin()
        unlisted = self._unlisted.get(name)
        if unlisted is not None:
            self._unlisted.move_to_end(name)
            return unlisted
        if len(self._unlisted) >= MAX_UNLISTED and not self._evict_unlisted():
            return gateway.without_admin()
        unlisted = self._unlisted_record(name, gateway.tenant, self._draining.pop(name, None))
        self._unlisted[name] = unlisted
        return unlisted

    def adopt(self, roster: Roster, keys: Mapping[bytes, str] | None = None) -> None:
        """Replace the roster, and the keys if `keys` is not None.

        Raises ConfigError, and changes nothing, if the roster claims a key of another tenant.
        """
        keys = self.keys if keys is None else keys
        for tenant in roster.tenants.values():
            for digest in tenant.key_digests:
                if keys.get(digest, tenant.name) != tenant.name:
                    raise ConfigError(
                        f"a key of tenants.{tenant.name} is also a key of {keys[digest]}, from "
                        "api_key or the keys file; remove one of the two"
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
            # Most records are unchanged, and building them anew would delay streams.
            if has_same_tiers and (known := listed.get(name)) and known.tenant == tenant
            else self._make_record(tenant, before.get(name))
            for name, tenant in tenants.items()
        }
        digests = {digest: one.name for one in tenants.values() for digest in one.key_digests}
        self._by_digest = {
            digest: (digest, self._listed[name]) for digest, name in (digests | self.keys).items()
        }
        for name, unlisted in unlisted_before.items():
            gateway = self._listed.get(unlisted.gateway or "")
            if gateway is not None and name not in self._listed:
                self._unlisted[name] = self._unlisted_record(name, gateway.tenant, unlisted)
        self._draining = {
            name: one
            for name, one in before.items()
            if name not in self._listed and name not in self._unlisted
            if not one.meter.is_idle
        }

    def _unlisted_record(
        self, name: str, gateway: Tenant, before: TenantRecord | None
    ) -> TenantRecord:
        """Return the record of an unlisted tenant, on its gateway's terms."""
        record = self._make_record(_tenant_named_by(name, gateway), before)
        return replace(record, gateway=gateway.name)

    def _evict_unlisted(self) -> bool:
        """Evict the least recently named idle unlisted tenant; return False if none is found.

        A tenant with requests under way or a quota debt moves to the end. The next call then checks
        other tenants, so a few long streams never protect thousands of idle tenants.
        """
        for _ in range(min(MAX_LOOKS, len(self._unlisted))):
            name, unlisted = self._unlisted.popitem(last=False)
            if unlisted.meter.is_idle:
                return True
            self._unlisted[name] = unlisted
        return False

    def _make_record(self, tenant: Tenant, before: TenantRecord | None) -> TenantRecord:
        """Return the record of a tenant, with the meter of the record `before`, if any."""
        tier = self.roster.tier_of(tenant)
        terms = terms_for(tenant, tier)
        if before is None:
            meter = Meter(tenant.quotas, self._clock)
        else:
            meter = before.meter
            meter.set_quotas(tenant.quotas)
        return TenantRecord(tenant, terms, meter, tier.permissions)


def _tenant_named_by(name: str, gateway: Tenant) -> Tenant:
    # A disabled gateway is refused by its own record; this tenant may also use another gateway.
    return replace(
        gateway, name=name, key_digests=(), cache_group=None, is_admin=False, is_disabled=False
    )
