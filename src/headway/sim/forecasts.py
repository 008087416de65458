"""What the API process does with the forecasts of engines: refuse early, and rule out engines."""

from __future__ import annotations

from collections.abc import Iterable

from headway.core.events import Event
from headway.core.request import Request
from headway.core.slo.forecast_reader import EngineTraits, ForecastReader
from headway.core.terms import NO_TARGETS
from headway.errors import DeadlineError


class FeasibleEngines:
    """Keeps requests from engines whose forecasts rule out their targets.

    Forecasts are read from the first request with targets on, so that others cost nothing; they do
    not become too old, because no simulated engine hangs.
    """

    def __init__(self, traits: EngineTraits) -> None:
        self._traits = traits
        self._readers: dict[str, ForecastReader] = {}
        """Forecasts of the engines, by name."""
        self._feasible: dict[str, frozenset[str]] = {}
        """Engines that may have a request with targets."""
        self._draining: set[str] = set()
        self._is_reading = False

    @property
    def restricts(self) -> bool:
        return bool(self._feasible)

    def engine_joined(self, name: str) -> None:
        """Add an engine, which may have every request until it has a forecast."""
        self._readers[name] = ForecastReader()

    def engine_lost(self, name: str) -> None:
        """Remove an engine; each of the others may have what it was to have."""
        del self._readers[name]
        self._draining.discard(name)
        self._feasible.clear()

    def engine_draining(self, name: str) -> None:
        """Have no request wait for an engine; without another one, it may wait for all."""
        self._draining.add(name)
        self._feasible = {key: one - {name} for key, one in self._feasible.items()}

    def observe(self, name: str, events: Iterable[Event], now: float) -> None:
        """Take over the forecast in a report of an engine."""
        if self._is_reading:
            self._readers[name].observe(events, now)

    def arrive(self, request: Request, now: float) -> bool:
        """Return whether a request may come in: not if every forecast rules out its targets."""
        if request.terms.targets == NO_TARGETS:
            return True
        self._is_reading = True
        engines = self._readers.keys() - self._draining
        names = [name for name in engines if self._is_feasible(request, name, now)]
        if engines and not names:
            return False
        self._feasible[request.id] = frozenset(names)
        return True

    def _is_feasible(self, request: Request, name: str, now: float) -> bool:
        try:
            self._readers[name].check(request, self._traits, now)
        except DeadlineError:
            return False
        return True

    def sent(self, request: Request, name: str, now: float) -> None:
        """Count a request until a forecast of its engine includes it."""
        if self._is_reading:
            self._readers[name].add(request, self._traits, now)

    def ended(self, request_id: str) -> None:
        """Forget a request."""
        self._feasible.pop(request_id, None)

    def may_assign(self, request: Request, engine: str) -> bool:
        """Return whether a request may wait for an engine."""
        feasible = self._feasible.get(request.id)
        return not feasible or engine in feasible

    def may_send(self, request: Request, engine: str) -> bool:
        """Return whether a request may be sent to an engine now."""
        return True
