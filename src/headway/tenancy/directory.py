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


@dataclass(frozen=True, slots=True)
class Standing:
    """A tenant as it stands now."""

    tenant: Tenant
    terms: Terms
    meter: Meter
    permissions: Permissions = DEFAULT_PERMISSIONS

    def in_tier(self, tier: Tier) -> Standing:
        """The same tenant, served in another tier."""
        return replace(self, terms=terms_for(self.tenant, tier), permissions=tier.permissions)

    def without_rights(self) -> Standing:
        """The same tenant, no admin even if it is one."""
        if not self.tenant.is_admin:
            return self
        return replace(self, tenant=replace(self.tenant, is_admin=False))


@dataclass(frozen=True, slots=True)
class _Guest:
    """A tenant that is in no file, and the name of the one that spoke for it first."""

    by: str
    standing: Standing


class Directory:
    """Finds tenants. `keys` are those that belong to no roster: which tenant each stands for."""

    def __init__(
        self,
        clock: Clock,
        keys: Mapping[bytes, str] | None = None,
        roster: Roster | None = None,
    ) -> None:
        self._clock = clock
        self._keys = dict(keys or {})
        self.is_open = not keys and roster is None
        """No key is asked for, and everyone is the same anonymous tenant."""
        self._listed: dict[str, Standing] = {}
        self._by_digest: dict[bytes, tuple[bytes, Standing]] = {}
        self._unlisted: OrderedDict[str, _Guest] = OrderedDict()
        """Least recently named first."""
        self._departed: dict[str, Standing] = {}
        """No longer known, and still with requests under way or something owed."""
        self.roster = EMPTY
        self.adopt(roster or EMPTY)

    @property
    def anonymous(self) -> Standing:
        return self._listed[ANONYMOUS.name]

    def price_of(self, tier: str) -> Price | None:
        """What the tier of this name costs now."""
        found = self.roster.tier(tier)
        return None if found is None else found.price

    def by_digest(self, digest: bytes) -> Standing | None:
        """Whose key has this digest."""
        # How long it takes to look in here tells nothing of a key: nobody can choose what one
        # hashes to. What is found is compared in constant time all the same.
        known, standing = self._by_digest.get(digest, (b"", None))
        return standing if hmac.compare_digest(known, digest) else None

    def may_see_all(self, standing: Standing) -> bool:
        """Whether it may be told of everyone at once: an admin, and whoever is the only one."""
        # The anonymous one is always listed.
        is_alone = len(self._listed) == 2 and standing.tenant.name in self._listed
        return self.is_open or standing.tenant.is_admin or is_alone

    def named(self, name: str, by: Standing) -> Standing:
        """The tenant that `by` speaks for. One that is in no file has the terms of who names it,
        and a share and quotas of its own; where there are too many of those, it is `by` itself."""
        known = self._listed.get(name)
        if known is not None:
            return known if by.tenant.is_admin else known.without_rights()
        guest = self._unlisted.get(name)
        if guest is not None:
            self._unlisted.move_to_end(name)
            return guest.standing
        if len(self._unlisted) >= MAX_UNLISTED:
            oldest, guest = next(iter(self._unlisted.items()))
            if not guest.standing.meter.is_at_rest:
                return by.without_rights()
            del self._unlisted[oldest]
        standing = self._standing(_spoken_for(name, by.tenant), self._departed.pop(name, None))
        self._unlisted[name] = _Guest(by.tenant.name, standing)
        return standing

    def adopt(self, roster: Roster) -> None:
        """Go by this roster from now on. ConfigError, and nothing has changed, if it claims a key
        that is another tenant's."""
        for tenant in roster.tenants.values():
            for digest in tenant.key_digests:
                if self._keys.get(digest, tenant.name) != tenant.name:
                    raise ConfigError(
                        f"a key of tenants.{tenant.name} is given to this server as one of "
                        f"{self._keys[digest]} too"
                    )
        tenants = {ANONYMOUS.name: ANONYMOUS}
        tenants.update({name: Tenant(name) for name in self._keys.values()})
        tenants.update(roster.tenants)
        guests, self._unlisted = self._unlisted, OrderedDict()
        listed, before = self._listed, {name: guest.standing for name, guest in guests.items()}
        before = self._departed | before | listed
        has_same_tiers, self.roster = roster.tiers == self.roster.tiers, roster
        self._listed = {
            name: known
            # Most are as they were, and this is no time to hold up those who stream.
            if has_same_tiers and (known := listed.get(name)) and known.tenant == tenant
            else self._standing(tenant, before.get(name))
            for name, tenant in tenants.items()
        }
        digests = {digest: one.name for one in tenants.values() for digest in one.key_digests}
        self._by_digest = {
            digest: (digest, self._listed[name]) for digest, name in (digests | self._keys).items()
        }
        for name, guest in guests.items():
            by = self._listed.get(guest.by)
            if by is not None and name not in self._listed:
                standing = self._standing(_spoken_for(name, by.tenant), guest.standing)
                self._unlisted[name] = _Guest(guest.by, standing)
        self._departed = {
            name: one
            for name, one in before.items()
            if name not in self._listed and name not in self._unlisted
            if not one.meter.is_at_rest
        }

    def _standing(self, tenant: Tenant, before: Standing | None) -> Standing:
        """How it stands, with the meter it had before if it was there."""
        tier = self.roster.tier_of(tenant)
        terms = terms_for(tenant, tier)
        if before is None:
            meter = Meter(tenant.quotas, self._clock)
        else:
            meter = before.meter
            meter.set_quotas(tenant.quotas)
        return Standing(tenant, terms, meter, tier.permissions)


def _spoken_for(name: str, by: Tenant) -> Tenant:
    # Whether `by` is disabled is asked of itself; its guest may come through another gateway.
    return replace(
        by, name=name, key_digests=(), cache_group=None, is_admin=False, is_disabled=False
    )
