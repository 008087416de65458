"""Reads how much processor time the host took from this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAX_STEAL = 0.03
"""A run with a larger share is marked: its times say more about the host than about the code."""
_STAT = Path("/proc/stat")
_USER, _NICE, _SYSTEM, _IRQ, _SOFT_IRQ, _STEAL = 0, 1, 2, 5, 6, 7
_BUSY = (_USER, _NICE, _SYSTEM, _IRQ, _SOFT_IRQ, _STEAL)


@dataclass(frozen=True, slots=True)
class Ticks:
    """Busy and stolen ticks of all processors since the machine started."""

    busy: int
    stolen: int

    @staticmethod
    def now() -> Ticks:
        """Read the counters; zeros where the system has none."""
        try:
            fields = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:]]
        except (OSError, ValueError):
            return Ticks(0, 0)
        return Ticks(sum(fields[at] for at in _BUSY), fields[_STEAL])

    def steal_since(self, before: Ticks) -> float:
        """Return the stolen share of the busy time since then."""
        busy = self.busy - before.busy
        return (self.stolen - before.stolen) / busy if busy > 0 else 0.0
