"""The engine's forecast: state by which the API process refuses infeasible requests.

A frozen value, exported after each step and when the last request is aborted. Demand is sampled at
fixed horizons, as durations from the time of the sample, so the reader needs no common clock. A
step makes new samples for a few tenants only; those of the others are some steps old. The forecast
of an idle engine has no demand and no tenants.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from headway.core.slo.demand import Points, points_of_sample
from headway.core.slo.steptime import StepCost


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """Step-time model, and how steps divide into work and constant cost."""

    cost: StepCost
    step_s: float
    """Target time of a step."""
    full_step_s: float
    """Time of a step that fills the token budget, as without targets."""
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

    def reserved(self, tightness: int) -> float:
        """Return the recent rate of work with clearly tighter targets."""
        return sum([rate for other, rate in self.rates.items() if other < tightness])


NO_DEMAND = Demand()


class DemandSample(NamedTuple):
    """Demand at fixed horizons, as sent to the API process."""

    due_ms: list[int]
    """Milliseconds of work due within each of HORIZONS_S."""
    starts_ms: list[int]
    """Milliseconds of prefill planned to start within each of HORIZONS_S."""
    rates: dict[int, float]

    def demand(self, age_s: float = 0.0, now: float = 0.0) -> Demand:
        """Return the demand of a sample made `age_s` ago, with times by the clock of `now`."""
        due = points_of_sample(self.due_ms, age_s, now)
        return Demand(due, points_of_sample(self.starts_ms, age_s, now), self.rates)


NO_SAMPLE = DemandSample([], [], {})


def sample_of(demand: Demand, now: float) -> DemandSample:
    """Return the demand at fixed horizons from now."""
    return DemandSample(demand.due.sampled_ms(now), demand.starts.sampled_ms(now), demand.rates)


class TenantForecast(NamedTuple):
    """Admitted demand of one tenant, and its share of the machine."""

    share: float
    """Weight over the weights of all tenants with requests here."""
    demand: DemandSample = NO_SAMPLE
    owed_s: float = 0.0
    """Work of other tenants that goes first, because this tenant is ahead of its share."""
    length_share: float = 1.0
    """Expected output length as a share of max_tokens."""
    lost_speed: float = 0.0
    """Speed that the machine loses to short steps for this tenant's TPOT targets."""
    made_at: float = 0.0
    """By the engine's clock, as in Forecast."""


def _no_tenants() -> dict[str, TenantForecast]:
    return {}


@dataclass(frozen=True, slots=True)
class Forecast:
    """State of the engine by which the API process judges SLO admission."""

    speed: EngineSpeed
    demand: DemandSample = NO_SAMPLE
    tenants: dict[str, TenantForecast] = field(default_factory=_no_tenants)
    """Tenants that have asked for targets lately; some may be left out."""
    active_weight: float = 0.0
    """Sum of the weights of the tenants with requests here."""
    made_at: float = 0.0
    """By the engine's clock: only differences of such times have a meaning elsewhere."""
