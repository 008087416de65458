"""Tenants and tiers as plain values, and the terms that follow from them.

The values are checked where they are read (`roster.py`), not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.core.terms import NO_TARGETS, Targets, Terms
from headway.errors import InvalidRequestError

MIN_TARGET_MS, MAX_TARGET_MS = 0.001, 86_400_000.0
"""A target is at most a day; less than a microsecond cannot be measured."""
DEFAULT_TIER = "default"
"""The tier of a tenant that names none; it needs no entry in the file."""


@dataclass(frozen=True, slots=True)
class Price:
    """Price of a million tokens, in a currency of the operator's choice."""

    prompt: float = 0.0
    cached_prompt: float = 0.0
    output: float = 0.0


FREE = Price()


@dataclass(frozen=True, slots=True)
class Permissions:
    """What requests of a tier may set beyond the tier's own values."""

    allow_targets: bool = True
    allow_priority: bool = True
    min_ttft_ms: float = 10.0
    min_tpot_ms: float = 5.0
    min_deadline_ms: float = 50.0

    def check_targets(self, tier: str, requested_ms: Mapping[str, float]) -> None:
        """Refuse targets of a request, by field name, that the tier does not allow."""
        for name, value in requested_ms.items():
            if not self.allow_targets:
                raise InvalidRequestError(
                    f"{name}: tier {tier!r} does not allow requests to set targets (allow_targets)",
                    name,
                )
            floor: float = getattr(self, f"min_{name}")
            if value < floor:
                raise InvalidRequestError(
                    f"{name} must be at least {floor:g} in tier {tier!r} (min_{name}), "
                    f"got {value:g}",
                    name,
                )

    def check_priority(self, tier: str) -> None:
        """Refuse the priority of a request if the tier does not allow it."""
        if not self.allow_priority:
            raise InvalidRequestError(
                f"tier {tier!r} does not allow requests to set a priority (allow_priority)",
                "priority",
            )


DEFAULT_PERMISSIONS = Permissions()


@dataclass(frozen=True, slots=True)
class Tier:
    """A level of service: weight, targets and price."""

    name: str = DEFAULT_TIER
    weight: float = 1.0
    targets: Targets = NO_TARGETS
    price: Price = FREE
    is_spot: bool = False
    permissions: Permissions = DEFAULT_PERMISSIONS


@dataclass(frozen=True, slots=True)
class Quotas:
    """Limits of a tenant; None is no limit.

    Each prompt counts as a request, also if one HTTP request has several.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    kv_share: float = 1.0


NO_QUOTAS = Quotas()


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant: keys, tier, weight and quotas. Only digests of its keys are stored."""

    name: str = ""
    key_digests: tuple[bytes, ...] = ()
    tier: str = DEFAULT_TIER
    weight: float = 1.0
    quotas: Quotas = NO_QUOTAS
    cache_group: str | None = None
    """Tenants of the same group share cached prefixes; None shares with no other tenant."""
    is_admin: bool = False
    is_disabled: bool = False


ANONYMOUS = Tenant()
"""The tenant of every request to a server without keys."""


@dataclass(frozen=True, slots=True)
class Roster:
    """Every tenant and every tier, by name."""

    tenants: Mapping[str, Tenant] = field(default_factory=dict[str, Tenant])
    tiers: Mapping[str, Tier] = field(default_factory=dict[str, Tier])

    def tier(self, name: str) -> Tier | None:
        """Return the tier with this name, or None."""
        tier = self.tiers.get(name)
        return Tier() if tier is None and name == DEFAULT_TIER else tier

    def tier_of(self, tenant: Tenant) -> Tier:
        return self.tier(tenant.tier) or Tier()


EMPTY = Roster()


def terms_for(tenant: Tenant, tier: Tier) -> Terms:
    """Return the terms by which the tenant is served in this tier."""
    # Tenant names contain no space, so the name of a tenant never equals the name of a group.
    group = tenant.name if tenant.cache_group is None else f"group {tenant.cache_group}"
    return Terms(
        tenant=tenant.name,
        tier=tier.name,
        weight=tier.weight * tenant.weight,
        is_spot=tier.is_spot,
        max_kv_share=tenant.quotas.kv_share,
        cache_group=group,
        targets=tier.targets,
    )
