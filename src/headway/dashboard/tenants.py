"""Counts of the last ten minutes for the busiest tenants; the others are counted together.

The busiest are found as by the space-saving algorithm: a tenant that is not among them replaces the
one with the least weight and inherits that weight, so that a busy tenant is never kept out.
"""

from __future__ import annotations

MAX_TENANTS = 64
SLOT_S = 60.0
NUM_SLOTS = 10


class TenantCounts:
    """Counts of one tenant by minute, under names that the caller chooses."""

    def __init__(self, slot: int, weight: float = 0.0) -> None:
        self.weight = weight
        self._newest = slot
        self._slots: list[dict[str, float]] = [{} for _ in range(NUM_SLOTS)]

    def advance(self, slot: int) -> None:
        """Forget minutes that are too old."""
        for number in range(max(self._newest + 1, slot - NUM_SLOTS + 1), slot + 1):
            self._slots[number % NUM_SLOTS] = {}
        self._newest = max(self._newest, slot)

    def add(self, name: str, amount: float = 1) -> None:
        slot = self._slots[self._newest % NUM_SLOTS]
        slot[name] = slot.get(name, 0) + amount

    def merge(self, other: TenantCounts) -> None:
        """Add the counts of another tenant, minute by minute."""
        other.advance(self._newest)
        for mine, others in zip(self._slots, other._slots, strict=True):
            _add_all(mine, others)

    def total(self) -> dict[str, float]:
        """Return the counts of all minutes."""
        total: dict[str, float] = {}
        for slot in self._slots:
            _add_all(total, slot)
        return total


def _add_all(total: dict[str, float], others: dict[str, float]) -> None:
    for name, amount in others.items():
        total[name] = total.get(name, 0) + amount


class TenantWindow:
    """Counts of at most MAX_TENANTS tenants, and of all others together."""

    def __init__(self, now: float, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._slot = int(now // SLOT_S)
        self.tenants: dict[str, TenantCounts] = {}
        self.others = TenantCounts(self._slot)

    def advance(self, now: float) -> None:
        """Begin the minute of `now`; forget tenants without counts."""
        slot = int(now // SLOT_S)
        if slot <= self._slot:
            return
        self._slot = slot
        for counts in (*self.tenants.values(), self.others):
            counts.advance(slot)
        self.tenants = {name: one for name, one in self.tenants.items() if one.total()}

    def of(self, tenant: str) -> TenantCounts:
        """Return the counts of a tenant, which may replace those of another."""
        counts = self.tenants.get(tenant)
        if counts is None:
            weight = self._make_room() if len(self.tenants) >= self._max_tenants else 0.0
            counts = self.tenants[tenant] = TenantCounts(self._slot, weight)
        counts.weight += 1
        return counts

    def _make_room(self) -> float:
        name = min(self.tenants, key=lambda one: self.tenants[one].weight)
        counts = self.tenants.pop(name)
        self.others.merge(counts)
        return counts.weight
