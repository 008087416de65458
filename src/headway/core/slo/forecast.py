"""The engine's forecast: what the API process needs to refuse hopeless requests at once.

A frozen value, exported after each step. All times in it are durations from the end of that step,
so that the reader needs no common clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.core.slo.demand import Points, tightness
from headway.core.slo.steptime import StepCost


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Step-cost model, and how steps divide into work and constant cost."""

    cost: StepCost
    step_s: float
    """Target time of a step."""
    full_step_s: float
    """Time of a step that fills the token budget: what steps take if nobody has targets."""
    decode_s: float = 0.0
    """Seconds of each step that the present decodes take."""
    busy_s: float = 0.0
    """Time of the last step, if requests are running; else 0."""

    @property
    def speed(self) -> float:
        """Seconds of work done per second at the target step time."""
        return max(0.05, self._work_share(self.step_s))

    @property
    def full_speed(self) -> float:
        """Seconds of work done per second if no target shortens the steps."""
        return max(0.05, self._work_share(self.full_step_s))

    def _work_share(self, step_s: float) -> float:
        constant_s = self.cost.constant_s
        return 1.0 - constant_s / max(step_s, 2 * constant_s, 1e-9)


@dataclass(frozen=True, slots=True)
class Demand:
    """Work of the open SLO requests of one tenant, or of all."""

    due: Points = field(default_factory=Points)
    """Seconds of work by due time."""
    starts: Points = field(default_factory=Points)
    """Seconds of prefill by planned start."""
    rates: dict[int, float] = field(default_factory=dict[int, float])
    """Recent rate of admitted work by tightness, in seconds per second."""

    def reserved(self, horizon_s: float) -> float:
        """Share of the time that requests with clearly tighter targets have been using."""
        key = tightness(horizon_s)
        return sum([rate for other, rate in self.rates.items() if other < key])


NO_DEMAND = Demand()


@dataclass(frozen=True, slots=True)
class TenantForecast:
    """What one tenant has admitted, and its share of the machine."""

    share: float
    """Weight by the weights of all tenants with requests here."""
    demand: Demand = NO_DEMAND
    owed_s: float = 0.0
    """Work of other tenants that goes first, because this tenant is ahead of its share."""
    length_share: float = 1.0
    """Expected output length as a share of max_tokens."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """The state of the engine by which SLO admission is judged."""

    speed: EngineSpeed
    demand: Demand = NO_DEMAND
    tenants: dict[str, TenantForecast] = field(default_factory=dict[str, TenantForecast])
    """Tenants with open SLO requests; some may be left out."""
    active_weight: float = 0.0
    """Sum of the weights of the tenants with requests here."""

    def without_demand(self) -> Forecast:
        """The same engine with nothing to do."""
        speed = self.speed
        idle = EngineSpeed(speed.cost, speed.full_step_s, speed.full_step_s)
        return Forecast(idle)
