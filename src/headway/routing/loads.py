"""Engines in order of their load."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from headway.routing.engines import RoutedEngine


class EnginesByLoad:
    """Engines sorted by load; those whose load has changed are sorted in when asked for."""

    def __init__(self) -> None:
        self._sorted: list[tuple[float, int]] = []
        """Load and number of each engine."""
        self._load_of: dict[int, float] = {}
        self._engines: dict[int, RoutedEngine] = {}
        self._changed: dict[int, RoutedEngine] = {}

    def change(self, engine: RoutedEngine) -> None:
        """Note that the load of an engine is new, or has changed."""
        self._changed[engine.number] = engine

    def remove(self, engine: RoutedEngine) -> None:
        self._changed.pop(engine.number, None)
        self._take_out(engine.number)

    def _take_out(self, number: int) -> None:
        load_s = self._load_of.pop(number, None)
        if load_s is not None:
            del self._sorted[bisect_left(self._sorted, (load_s, number))]
            del self._engines[number]

    def __iter__(self) -> Iterator[RoutedEngine]:
        """Yield the engines, the least loaded first."""
        changed, self._changed = self._changed, {}
        for number, engine in changed.items():
            self._take_out(number)
            self._load_of[number], self._engines[number] = engine.load_s, engine
            insort(self._sorted, (engine.load_s, number))
        return (self._engines[number] for _, number in self._sorted)
