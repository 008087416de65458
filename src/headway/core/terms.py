"""On what terms a request is served: whose share it draws on, and what it was promised.

Plain values, decided at the edge from the tenant and its tier, and read by the policies here. A
request that nobody made terms for has none of them: no tenant, equal weight, no targets.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Targets:
    """When a request should be where, in seconds; None is no promise."""

    ttft_s: float | None = None
    """From arrival to the first token."""
    tpot_s: float | None = None
    """Between two output tokens, on average."""
    deadline_s: float | None = None
    """From arrival to the last token."""


NO_TARGETS = Targets()


@dataclass(frozen=True, slots=True)
class Terms:
    """One tenant's terms, in one tier."""

    tenant: str = ""
    tier: str = ""
    weight: float = 1.0
    """Its share of the service, in proportion to those of others."""
    is_spot: bool = False
    """Takes only what nobody else wants, and is the first to be preempted."""
    max_kv_share: float = 1.0
    """Most of the KV blocks that the tenant's running requests may hold together."""
    cache_group: str = ""
    """Requests of one group share cached prefixes; by default each tenant is a group."""
    targets: Targets = NO_TARGETS


NO_TERMS = Terms()
