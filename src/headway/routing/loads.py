"""Engines in order of their load."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from headway.routing.engines import RoutedEngine


class EnginesByLoad:
    """Engines sorted by load; those whose load has changed are sorted in when asked for."""

    def __init__(self) -> None:
        # Two lists of numbers: to search tuples takes several times as long.
        self._loads: list[float] = []
        self._numbers: list[int] = []
        """Numbers of the engines, sorted by load and then by number."""
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
            at = self._position(load_s, number)
            del self._loads[at], self._numbers[at], self._engines[number]

    def _position(self, load_s: float, number: int) -> int:
        """Return where an engine is in the lists, or would be."""
        low = bisect_left(self._loads, load_s)
        return bisect_left(self._numbers, number, low, bisect_right(self._loads, load_s, low))

    def __iter__(self) -> Iterator[RoutedEngine]:
        """Yield the engines, the least loaded first."""
        changed, self._changed = self._changed, {}
        for number, engine in changed.items():
            load_s = engine.load_s
            if self._load_of.get(number) == load_s:
                continue
            self._take_out(number)
            self._load_of[number], self._engines[number] = load_s, engine
            at = self._position(load_s, number)
            self._loads.insert(at, load_s)
            self._numbers.insert(at, number)
        return (self._engines[number] for number in self._numbers)
