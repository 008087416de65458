"""Reads how much processor time the hypervisor took from this machine.

A record of a benchmark carries the steal of its run: with much of it, the times say more about the
host than about the code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

MAX_STEAL = 0.03
"""A run with a larger share is marked."""
STAT = Path("/proc/stat")
_USER, _NICE, _SYSTEM, _IRQ, _SOFT_IRQ, _STEAL = 0, 1, 2, 5, 6, 7
_BUSY = (_USER, _NICE, _SYSTEM, _IRQ, _SOFT_IRQ, _STEAL)


@dataclass(frozen=True, slots=True)
class Steal:
    """Stolen share of the busy time of all processors, and whether it is too large."""

    share: float
    is_high: bool

    @staticmethod
    def of(share: float) -> Steal:
        return Steal(share, share > MAX_STEAL)

    def __str__(self) -> str:
        return f"steal {100 * self.share:.1f} %{': repeat it' if self.is_high else ''}"


@dataclass(frozen=True, slots=True)
class _Ticks:
    """Busy and stolen ticks of all processors since the machine started."""

    busy: int
    stolen: int


class StealMeter:
    """Measures the steal from its creation on."""

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._before = _read_ticks(stat)

    def read(self) -> Steal | None:
        """Return the steal so far; None where the system does not count it."""
        before, now = self._before, _read_ticks(self._stat)
        if before is None or now is None:
            return None
        busy = now.busy - before.busy
        return Steal.of((now.stolen - before.stolen) / busy if busy > 0 else 0.0)


def highest_steal(steals: Iterable[Steal | None]) -> Steal | None:
    """Return the highest steal of several runs; None if none is known."""
    return max((s for s in steals if s is not None), key=lambda s: s.share, default=None)


def steal_text(steal: Steal | None) -> str:
    """Return the steal as text, with the mark if it is high."""
    return "steal unknown" if steal is None else str(steal)


def steal_plain(steal: Steal | None) -> dict[str, object] | None:
    """Return the steal for a JSON record."""
    return None if steal is None else asdict(steal)


def _read_ticks(stat: Path) -> _Ticks | None:
    try:
        fields = [int(field) for field in stat.read_text().split("\n", 1)[0].split()[1:]]
        return _Ticks(sum(fields[at] for at in _BUSY), fields[_STEAL])
    except (OSError, ValueError, IndexError):
        return None
