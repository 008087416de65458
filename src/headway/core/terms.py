"""Terms of a request: tenant, tier, weight, KV quota and SLO targets.

The API process sets the terms from the tenant and its tier; the policies in core read them. A
request without terms has no tenant, weight 1 and no targets.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Targets:
    """SLO targets of a request, in seconds; None is no target."""

    ttft_s: float | None = None
    """Time from arrival to the first token."""
    tpot_s: float | None = None
    """Mean time per output token after the first."""
    deadline_s: float | None = None
    """Time from arrival to the last token."""


NO_TARGETS = Targets()


@dataclass(frozen=True, slots=True)
class Terms:
    """Terms of one tenant in one tier."""

    tenant: str = ""
    tier: str = ""
    weight: float = 1.0
    """Factor of the tenant in its fair share of the service."""
    is_spot: bool = False
    """Whether the request uses only spare capacity and is preempted first."""
    max_kv_share: float = 1.0
    """Largest share of the KV blocks that running requests of the tenant may hold."""
    cache_group: str = ""
    """Group that shares cached prefixes; by default each tenant is one group."""
    targets: Targets = NO_TARGETS
    cache_salt: str = ""
    """Divides the cache group: prefixes are shared only by requests with the same salt."""

    @property
    def prefix_salt(self) -> str:
        """Where hashes of prefixes start: requests share prefixes only if this is equal."""
        # Names have no control characters, so no group and salt can look like another pair.
        return f"{self.cache_group}\0{self.cache_salt}" if self.cache_salt else self.cache_group


NO_TERMS = Terms()
