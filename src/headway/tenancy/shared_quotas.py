"""The port to quotas that are counted over several frontends."""

from __future__ import annotations

from typing import Protocol

from headway.tenancy.quotas import QuotaLease


class SharedMeters(Protocol):
    """Accepts or refuses requests by the use of all frontends together."""

    async def reserve(self, tenant: str, lease: QuotaLease) -> None:
        """Count what a lease has reserved, from now to its release, or raise QuotaError.

        If nobody counts for all frontends now, nothing happens: the lease counts here.
        """
        ...
