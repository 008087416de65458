"""Fits step times to the latencies of requests, for runs whose steps were not recorded.

The run is simulated with the step times so far. In what was simulated, the time of a request to its
first token, and from there to its last, is a sum over steps, so it is linear in the coefficients.
Least squares gives better ones, and the run is simulated again: other step times make other steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

import numpy as np

from headway.clock import Clock
from headway.core.slo.steptime import StepShape
from headway.routing import RULES, Router
from headway.sim.fleet import EngineSpec, FleetRecord, VirtualFleet
from headway.sim.profile.machine import StepFit, features
from headway.sim.steps import DrawStep, StepTime

HUBER = 0.1
"""Relative error beyond which a request counts less."""
DAMPING = 0.02
"""Weight of the values so far."""
MOST_CHANGE = 2.0
"""A coefficient changes by at most this factor at once."""
RULE = "least-loaded"


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds of a request from its arrival to its first and last token."""

    ttft_s: float
    e2e_s: float
    num_output: int

    @property
    def tpot_s(self) -> float:
        return (self.e2e_s - self.ttft_s) / (self.num_output - 1)


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request before it is served."""

    at: float
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class ServingRun:
    """Requests that engines got, and the settings of the engines."""

    arrivals: tuple[Arrival, ...]
    spec: EngineSpec
    num_engines: int = 1


@dataclass(frozen=True, slots=True)
class Costs:
    """Step times, and the delay between engine and client."""

    fit: StepFit
    delay_s: float

    @property
    def values(self) -> np.ndarray:
        return np.array([*self.fit.coefficients, self.delay_s])

    def with_values(self, values: np.ndarray) -> Costs:
        *coefficients, delay_s = [float(value) for value in values]
        return Costs(StepFit(self.fit.knots, tuple(coefficients)), delay_s)


@dataclass(slots=True)
class StepLog:
    """Steps of one simulated engine: when they began, how long they took, their features."""

    fit: StepFit
    clock: Clock | None = None
    began_at: list[float] = field(default_factory=list[float])
    seconds: list[float] = field(default_factory=list[float])
    rows: list[np.ndarray] = field(default_factory=list[np.ndarray])

    def start(self, rng: Random) -> DrawStep:
        def draw(shape: StepShape, _num_ended: int) -> StepTime:
            if self.clock is None:
                raise RuntimeError("a step before the fleet")
            row = np.zeros(len(self.fit.coefficients))
            for at, value in features(shape, self.fit.knots):
                row[at] += value
            seconds = self.fit.predict(shape)
            self.began_at.append(self.clock.now())
            self.seconds.append(seconds)
            self.rows.append(row)
            return StepTime(seconds)

        return draw


@dataclass(frozen=True, slots=True)
class Timeline:
    """The steps of one simulated engine as sums over time."""

    coefficients: np.ndarray
    began_at: np.ndarray
    seconds: np.ndarray
    rows: np.ndarray
    sums: np.ndarray
    """Features of all steps before each one."""

    @staticmethod
    def of(log: StepLog) -> Timeline:
        rows = np.array(log.rows).reshape(-1, len(log.fit.coefficients))
        sums = np.cumsum(rows, axis=0) - rows
        coefficients = np.array(log.fit.coefficients)
        return Timeline(coefficients, np.array(log.began_at), np.array(log.seconds), rows, sums)

    def features_until(self, times: np.ndarray) -> np.ndarray:
        """Return the sum of the features of all steps until each time, with parts of steps."""
        last = np.searchsorted(self.began_at, times, side="right") - 1
        at = np.maximum(last, 0)
        share = np.clip((times - self.began_at[at]) / self.seconds[at], 0.0, 1.0)
        return self.sums[at] + np.where(last < 0, 0.0, share)[:, None] * self.rows[at]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A run as simulated, with the steps of its engines."""

    records: tuple[FleetRecord, ...]
    engines: dict[str, Timeline]
    delay_s: float

    def latencies(self) -> list[Latencies]:
        """Return what clients saw."""
        found: list[Latencies] = []
        for one in self.records:
            if one.first_token_at is None or one.finished_at is None:
                raise RuntimeError(f"request {one.id} has not finished")
            waited_s = self.delay_s - one.arrived_at
            found.append(
                Latencies(one.first_token_at + waited_s, one.finished_at + waited_s, one.num_output)
            )
        return found

    def equations(self, chosen: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return features of the time to the first token and from there, and idle seconds.

        Two rows for each chosen request; the last column is that of the delay.
        """
        rows: list[np.ndarray] = []
        idle: list[float] = []
        for number in chosen:
            record = self.records[number]
            engine = self.engines[record.engine]
            times = np.array([record.arrived_at, record.first_token_at, record.finished_at])
            parts = np.diff(engine.features_until(times), axis=0)
            busy = parts @ engine.coefficients
            rows += [np.append(parts[0], 1.0), np.append(parts[1], 0.0)]
            idle += list(np.diff(times) - busy)
        return np.array(rows), np.array(idle)


def simulate_run(run: ServingRun, costs: Costs) -> SimulatedRun:
    """Simulate a run through the scheduler, with these step times."""
    router = Router(RULES[RULE](), ahead_steps=inf)
    logs = [StepLog(costs.fit) for _ in range(run.num_engines)]
    fleet = VirtualFleet([router], logs, run.spec, delay_s=0.0)
    for log in logs:
        log.clock = fleet.clock
    records: list[FleetRecord] = []
    for number, arrival in enumerate(run.arrivals):
        # Prompts share no tokens, so none is found in the prefix cache.
        prompt = list(range(100_000 * number, 100_000 * number + arrival.num_prompt))
        records.append(FleetRecord(str(number), prompt, arrival.num_output, arrived_at=arrival.at))
        fleet.send(records[-1])
    fleet.run(inf)
    engines = {f"engine-{number}": Timeline.of(log) for number, log in enumerate(logs)}
    return SimulatedRun(tuple(records), engines, costs.delay_s)


@dataclass(frozen=True, slots=True)
class Fitted:
    """The best costs found, and their loss."""

    costs: Costs
    loss: float


def fit_requests(
    run: ServingRun,
    measured: Sequence[Latencies],
    chosen: Sequence[int],
    start: Costs,
    num_rounds: int = 10,
    note: Callable[[str], None] = lambda _text: None,
) -> Fitted:
    """Return the costs that explain the latencies of the chosen requests, and only theirs."""
    targets = np.array(
        [
            seconds
            for number in chosen
            for one in [measured[number]]
            for seconds in (one.ttft_s, one.e2e_s - one.ttft_s)
        ]
    )
    costs, best = start, Fitted(start, inf)
    for number in range(num_rounds):
        simulated = simulate_run(run, costs)
        rows, idle = simulated.equations(chosen)
        errors = (rows @ costs.values + idle) / targets - 1.0
        loss = float(np.mean(_huber(errors)))
        if loss < best.loss:
            best = Fitted(costs, loss)
        note(f"round {number + 1} of {num_rounds}: median error {np.median(np.abs(errors)):.1%}")
        costs = costs.with_values(_improve(costs.values, rows, targets - idle, targets, errors))
    return best


def _huber(errors: np.ndarray) -> np.ndarray:
    size = np.abs(errors)
    return np.where(size < HUBER, size**2, 2 * HUBER * size - HUBER**2)


def _improve(
    values: np.ndarray,
    rows: np.ndarray,
    seconds: np.ndarray,
    targets: np.ndarray,
    errors: np.ndarray,
) -> np.ndarray:
    """Return better values: damped least squares for the factors of the values so far."""
    weights = np.sqrt(np.minimum(1.0, HUBER / np.maximum(np.abs(errors), 1e-9))) / targets
    left = rows * values * weights[:, None]
    right = seconds * weights
    damping = DAMPING * np.sqrt(len(targets)) * np.eye(len(values))
    left = np.vstack([left, damping])
    right = np.concatenate([right, damping @ np.ones(len(values))])
    factors, *_ = np.linalg.lstsq(left, right, rcond=None)
    return values * np.clip(factors, 1 / MOST_CHANGE, MOST_CHANGE)
