"""KV blocks by owner, shared by kv and events."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockOwners:
    """KV blocks by owner; a block that two tenants share counts for both."""

    num_used: int
    """Blocks with an owner, at the time of the count."""
    by_tenant: dict[str, int]
    """Blocks in the tables of the tenants with the most."""
    num_kept: int
    """Blocks that preempted requests keep."""
    num_cached: int
    """Blocks without an owner whose content is in the prefix index."""
