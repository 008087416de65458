"""Waiting time by cause over the last ten minutes.

A wait is known by cause when it ends. Each cause is then spread evenly over the wait, so that the
height of all causes at a time is the number of requests that waited at that time, and the area of a
cause is its seconds. Adding a wait takes constant time, however long the wait was: the series keeps
where a rate begins and ends, and the reader adds them up.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from headway.observe.trace.account import CauseShare

INTERVAL_S = 5.0
NUM_INTERVALS = 120


class SecondsSeries:
    """Seconds of one cause in each of the last NUM_INTERVALS intervals."""

    def __init__(self, newest: int) -> None:
        self._newest = newest
        self._single = array("d", bytes(8 * NUM_INTERVALS))
        """Seconds that belong to one interval alone."""
        self._change = array("d", bytes(8 * NUM_INTERVALS))
        """Change of the seconds per interval, from this interval on."""
        self._level = 0.0
        """Seconds per interval before the oldest interval."""

    def advance(self, newest: int) -> None:
        """Forget intervals that are too old."""
        for number in range(max(self._newest + 1, newest - NUM_INTERVALS + 1), newest + 1):
            self._forget(number % NUM_INTERVALS)
        if newest - self._newest >= NUM_INTERVALS:
            self._level = 0.0
        self._newest = max(self._newest, newest)

    def _forget(self, place: int) -> None:
        self._level += self._change[place]
        self._change[place] = self._single[place] = 0.0

    def add(self, start: float, end: float, seconds: float) -> None:
        """Spread `seconds` evenly from `start` to `end`, which is in the newest interval."""
        first, last = int(start // INTERVAL_S), self._newest
        if first >= last:
            self._single[last % NUM_INTERVALS] += seconds
            return
        rate = seconds / (end - start)
        oldest = last - NUM_INTERVALS + 1
        if first >= oldest:
            part_s = (first + 1) * INTERVAL_S - start
            self._single[first % NUM_INTERVALS] += rate * part_s
        begin = max(first + 1, oldest)
        self._change[begin % NUM_INTERVALS] += rate * INTERVAL_S
        self._change[last % NUM_INTERVALS] -= rate * INTERVAL_S
        self._single[last % NUM_INTERVALS] += rate * max(0.0, end - last * INTERVAL_S)

    def column(self) -> list[float]:
        """Return the seconds of each interval, oldest first."""
        level, values = self._level, list[float]()
        for number in range(self._newest - NUM_INTERVALS + 1, self._newest + 1):
            place = number % NUM_INTERVALS
            level += self._change[place]
            values.append(max(0.0, level + self._single[place]))
        return values


class WaitHistory:
    """Seconds of ended waits by cause; the number of causes is that of the program."""

    def __init__(self) -> None:
        self._newest = 0
        self._by_cause: dict[str, SecondsSeries] = {}

    def advance(self, newest: int) -> None:
        self._newest = newest
        for series in self._by_cause.values():
            series.advance(newest)

    def add(self, shares: Iterable[CauseShare], end: float) -> float:
        """Add a wait that ends now; return its seconds."""
        shares = tuple(shares)
        waited_s = sum(share.seconds for share in shares)
        for share in shares:
            series = self._by_cause.get(share.cause)
            if series is None:
                series = self._by_cause[share.cause] = SecondsSeries(self._newest)
            series.add(end - waited_s, end, share.seconds)
        return waited_s

    def columns(self) -> dict[str, list[float]]:
        """Return the seconds of each cause by interval, oldest first."""
        return {cause: series.column() for cause, series in self._by_cause.items()}


def open_waits(starts: Iterable[float], now: float) -> list[float]:
    """Return the seconds of waits that have not ended, by interval, oldest first."""
    series = SecondsSeries(int(now // INTERVAL_S))
    for start in starts:
        series.add(min(start, now), now, max(0.0, now - start))
    return series.column()
