"""How many engines a fleet needs, by the work that arrives and waits.

Work is counted in seconds of one machine, by the step-time models of the engines. So prompts of any
length, outputs of any length and machines of any speed add up, and the number follows from the
load itself, before requests are late. Utilisation would not do: an engine is busy at any load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, inf

WINDOW_S = 60.0
"""Time over which arriving work is averaged."""
NUM_SLOTS = 60
HEADROOM = 1.2
"""Capacity beyond the mean of arriving work, for its variation."""
DEFAULT_TTFT_S = 5.0
"""Time within which the backlog should be computed, if no request that waits has a target."""
MIN_TTFT_S = 0.1
MIN_SPEED = 0.05
LOW = 0.7
"""Share of the engines below which one of them is not needed."""
DOWN_AFTER_S = 300.0
"""Time that the need must be low before an engine is removed."""
KEEPING = 1.25
"""Factor by which another pool must need an engine more than the pool that has it."""


@dataclass(frozen=True, slots=True)
class FleetDemand:
    """The work of one router."""

    work_rate: float = 0.0
    """Seconds of work that arrive per second."""
    backlog_s: float = 0.0
    """Seconds of work that wait."""
    ttft_s: float = DEFAULT_TTFT_S
    """Tightest TTFT target among the requests that wait."""
    speed: float = 1.0
    """Seconds of work that one engine does per second."""

    @property
    def need(self) -> float:
        """Engines that this work needs; not rounded, so that several routers add up."""
        work = HEADROOM * self.work_rate + self.backlog_s / max(self.ttft_s, MIN_TTFT_S)
        return work / max(self.speed, MIN_SPEED)


def total_need(demands: Iterable[FleetDemand]) -> float:
    """Return the engines that the work of several routers needs together."""
    found = list(demands)
    if not found:
        return 0.0
    work_rate = sum(one.work_rate for one in found)
    backlog_s = sum(one.backlog_s for one in found)
    ttft_s = min((one.ttft_s for one in found if one.backlog_s), default=DEFAULT_TTFT_S)
    weights = [one.work_rate + one.backlog_s for one in found]
    total = sum(weights)
    speeds = [one.speed for one in found]
    if total > 0.0:
        speed = sum(w * s for w, s in zip(weights, speeds, strict=True)) / total
    else:
        speed = max(speeds)
    return FleetDemand(work_rate, backlog_s, ttft_s, speed).need


class WorkRate:
    """Work that has arrived in the last minute, in slots of a second."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._slot_s = window_s / NUM_SLOTS
        self._window_s = window_s
        self._slots: deque[tuple[int, float]] = deque()
        """Number of the slot and its work, the oldest first."""
        self._began_at = inf

    def add(self, work_s: float, now: float) -> None:
        """Count work that has arrived."""
        self._began_at = min(self._began_at, now)
        slot = int(now / self._slot_s)
        if self._slots and self._slots[-1][0] == slot:
            work_s += self._slots.pop()[1]
        self._slots.append((slot, work_s))
        self._forget(now)

    def rate(self, now: float) -> float:
        """Return the seconds of work per second.

        At the start, over the time since the first arrival, but not over less than a sixth of the
        window: one early request is no rate.
        """
        self._forget(now)
        if not self._slots:
            return 0.0
        span_s = min(self._window_s, max(now - self._began_at, self._window_s / 6))
        return sum(work_s for _, work_s in self._slots) / span_s

    def _forget(self, now: float) -> None:
        oldest = int(now / self._slot_s) - NUM_SLOTS
        while self._slots and self._slots[0][0] <= oldest:
            self._slots.popleft()


class Autoscaler:
    """Turns a need into a number of engines: up at once, down one by one."""

    def __init__(self, down_after_s: float = DOWN_AFTER_S) -> None:
        self._down_after_s = down_after_s
        self._low_since: float | None = None

    def decide(self, need: float, current: int, low: int, high: int, now: float) -> int:
        """Return how many engines there should be, between `low` and `high`."""
        bounded = min(max(ceil(need), low), high)
        if bounded >= current or current > high:
            self._low_since = None
            return bounded
        if need >= LOW * current:
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        elif now - self._low_since >= self._down_after_s:
            self._low_since = now
            return max(current - 1, bounded)
        return current


@dataclass(frozen=True, slots=True)
class PoolNeed:
    """What one of several pools needs, of engines that all of them share."""

    need: float
    """Engines that its work needs, not rounded."""
    wanted: int
    """Engines that it would have alone."""
    least: int
    current: int


def share_engines(pools: Mapping[str, PoolNeed], most: int) -> dict[str, int]:
    """Return the engines of each pool, at most `most` in all.

    Each pool has its least; each further engine goes to the pool with the most work per engine. A
    pool keeps what it has unless another needs it KEEPING times as much.
    """
    shares = {name: min(pool.least, pool.wanted) for name, pool in pools.items()}

    def urgency(name: str) -> float:
        pool, number = pools[name], shares[name] + 1
        return pool.need / number * (KEEPING if number <= pool.current else 1.0)

    while sum(shares.values()) < most:
        open_pools = [name for name, pool in pools.items() if shares[name] < pool.wanted]
        if not open_pools:
            break
        shares[max(open_pools, key=urgency)] += 1
    return shares
