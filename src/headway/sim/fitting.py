"""Fits a profile's step times, overhead and delays to what was measured.

Step times are a least squares fit in which every step counts by its squared relative error around
the prediction, so that sums of predictions are not too short: a fit around the measured times, or
one that cuts slow steps, would be. The spread of the coefficients comes from refits to steps drawn
in blocks, because neighbouring steps are slow together.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, inf, log, sqrt
from statistics import fmean

from headway.core.slo.steptime import StepShape
from headway.errors import ConfigError
from headway.record.entries import RecordingHeader
from headway.sim.observed import ObservedEngine, ObservedStep
from headway.sim.profile import Delays, MachineProfile, ResidualRun, StepFit, features

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
MIN_STEPS_AT_KNOT = 12
MIN_STEPS = 300
NUM_LINEAR = 3
"""Coefficients after those at the knots: decodes, context, attended tokens."""
NUM_REQUEST = 2
"""Coefficients after those: requests that arrive during a step, and that have just ended."""
RUN_LENGTH = 50
"""Steps of a residual run, and of a block that is drawn as a whole."""
MAX_RUNS = 120
NUM_REFITS = 40
NUM_WEIGHTINGS = 4
NUM_SWEEPS = 3000
MAX_DELAYS = 200
AT_ONCE_S = 1e-4
"""Up to this time after a step, the next one follows at once."""
DELAY_LIMITS = (1, 2, 4, 8, 16, 32, 64, 128)

Row = list[tuple[int, float]]


@dataclass(slots=True)
class _Sums:
    """Normal equations of a weighted least squares fit."""

    squares: list[list[float]]
    products: list[float]

    @staticmethod
    def empty(size: int) -> _Sums:
        return _Sums([[0.0] * size for _ in range(size)], [0.0] * size)

    def add(self, row: Row, measured: float, weight: float) -> None:
        for at, value in row:
            self.products[at] += weight * value * measured
            squares = self.squares[at]
            for other, factor in row:
                squares[other] += weight * value * factor

    def plus(self, others: Iterable[_Sums]) -> _Sums:
        total = _Sums([list(row) for row in self.squares], list(self.products))
        for one in others:
            for at, row in enumerate(one.squares):
                total.products[at] += one.products[at]
                line = total.squares[at]
                for other, value in enumerate(row):
                    line[other] += value
        return total

    def solve(self, start: Sequence[float] | None = None) -> list[float]:
        """Return the best coefficients of at least 0, by coordinate descent."""
        solution = [0.0] * len(self.products) if start is None else list(start)
        for _ in range(NUM_SWEEPS):
            change = 0.0
            for at, row in enumerate(self.squares):
                if row[at] <= 0.0:
                    continue
                pull = self.products[at] - sum(map(_multiply, row, solution))
                value = max(0.0, solution[at] + pull / row[at])
                change = max(change, abs(value - solution[at]) * sqrt(row[at]))
                solution[at] = value
            if change < 1e-9:
                break
        return solution


def _multiply(one: float, other: float) -> float:
    return one * other


def choose_knots(steps: Sequence[ObservedStep]) -> tuple[int, ...]:
    """Return the knots that have enough steps near them to be measured."""
    rows = sorted(one.shape.num_decodes + one.shape.num_prefill_tokens for one in steps)
    chosen: list[int] = []
    for number, knot in enumerate(KNOTS):
        low = KNOTS[number - 1] if number else 0
        high = KNOTS[number + 1] if number + 1 < len(KNOTS) else 2 * knot
        if bisect_left(rows, high) - bisect_left(rows, low + 1) >= MIN_STEPS_AT_KNOT:
            chosen.append(knot)
    if len(chosen) < 2:
        raise ConfigError("the measured steps are too much alike for a profile")
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class Slowing:
    """How much longer steps take while other processes read and end requests."""

    per_added_s: float
    per_ended_s: float

    @property
    def per_request_s(self) -> float:
        return self.per_added_s + self.per_ended_s

    def without(self, steps: Sequence[ObservedStep]) -> list[ObservedStep]:
        """Return the steps as they would be without."""
        return [
            replace(one, elapsed_s=max(one.elapsed_s / 2, one.elapsed_s - self._seconds(one, num)))
            for one, num in zip(steps, _ended_before(steps), strict=True)
        ]

    def _seconds(self, step: ObservedStep, num_ended_before: int) -> float:
        return step.num_added * self.per_added_s + num_ended_before * self.per_ended_s


def _ended_before(steps: Sequence[ObservedStep]) -> list[int]:
    """Return for each step how many requests ended with one that it followed at once."""
    numbers, until, num_ended = list[int](), -inf, 0
    for one in steps:
        numbers.append(num_ended if one.began_at - until < AT_ONCE_S else 0)
        until, num_ended = one.began_at + one.elapsed_s + one.overhead_s, one.num_ended
    return numbers


def fit_steps(steps: Sequence[ObservedStep], seed: int = 0) -> tuple[StepFit, Slowing]:
    """Return the step times that fit the steps, in order of time, and what requests add to them."""
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"{len(steps)} steps were measured; a profile needs {MIN_STEPS}")
    knots = choose_knots(steps)
    num_of_shape = len(knots) + NUM_LINEAR
    rows = [
        [
            *features(one.shape, knots),
            (num_of_shape, one.num_added),
            (num_of_shape + 1, num_ended),
        ]
        for one, num_ended in zip(steps, _ended_before(steps), strict=True)
    ]
    measured = [one.elapsed_s for one in steps]
    weights = [1.0 / seconds**2 for seconds in measured]
    solution: list[float] | None = None
    blocks: list[_Sums] = []
    for _ in range(NUM_WEIGHTINGS):
        blocks = _sum_blocks(rows, measured, weights, num_of_shape + NUM_REQUEST)
        solution = blocks[0].plus(blocks[1:]).solve(solution)
        predicted = [_predict(row, solution) for row in rows]
        weights = [1.0 / max(seconds, 1e-6) ** 2 for seconds in predicted]
    if solution is None:
        raise RuntimeError("no fit was made")
    scale = sum(measured) / sum(_predict(row, solution) for row in rows)
    rng = random.Random(f"refits/{seed}")
    refits: list[tuple[float, ...]] = []
    for _ in range(NUM_REFITS):
        first, *others = rng.choices(blocks, k=len(blocks))
        refit = first.plus(others).solve(solution)
        refits.append(tuple(scale * value for value in refit[:num_of_shape]))
    scaled = [scale * value for value in solution]
    fit = StepFit(knots, tuple(scaled[:num_of_shape]), tuple(refits))
    return fit, Slowing(*scaled[num_of_shape:])


def _sum_blocks(
    rows: Sequence[Row], measured: Sequence[float], weights: Sequence[float], size: int
) -> list[_Sums]:
    blocks: list[_Sums] = []
    triples = zip(rows, measured, weights, strict=True)
    while block := list(islice(triples, RUN_LENGTH)):
        sums = _Sums.empty(size)
        for row, seconds, weight in block:
            sums.add(row, seconds, weight)
        blocks.append(sums)
    return blocks


def _predict(row: Row, solution: Sequence[float]) -> float:
    return sum([value * solution[at] for at, value in row])


def residual_runs(
    steps: Sequence[ObservedStep], fit: StepFit, seed: int = 0
) -> tuple[ResidualRun, ...]:
    """Return runs of measured by predicted time, by predicted time."""
    runs: list[ResidualRun] = []
    for first in range(0, len(steps) - RUN_LENGTH + 1, RUN_LENGTH):
        block = steps[first : first + RUN_LENGTH]
        predicted = [fit.predict(one.shape) for one in block]
        ratios = [
            round(one.elapsed_s / seconds, 4) for one, seconds in zip(block, predicted, strict=True)
        ]
        runs.append(ResidualRun(fmean(predicted), tuple(ratios)))
    if len(runs) > MAX_RUNS:
        runs = random.Random(f"runs/{seed}").sample(runs, MAX_RUNS)
    return tuple(sorted(runs, key=lambda run: run.predicted_s))


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds of the engine process between steps."""

    constant_s: float
    per_row_s: float
    """For each scheduled request."""
    per_request_s: float
    """For each request, from its arrival to its end."""


def fit_overhead(steps: Sequence[ObservedStep]) -> Overhead:
    """Return the time between steps, which adds requests and ends them too."""
    sums = _Sums.empty(4)
    for one in steps:
        row = [(0, 1.0), (1, one.num_scheduled), (2, one.num_added), (3, one.num_ended)]
        sums.add(row, one.overhead_s, 1.0)
    constant_s, per_row_s, per_added_s, per_ended_s = sums.solve()
    return Overhead(constant_s, per_row_s, per_added_s + per_ended_s)


def measure_drift(passes: Sequence[Sequence[Sequence[ObservedStep]]], fit: StepFit) -> float:
    """Return how much the speed differs between passes over the same loads.

    `passes` has the steps of each load of each pass. The result is the standard deviation of the
    logarithm of measured by predicted time, within loads.
    """
    squares, num_free = 0.0, 0
    for of_load in zip(*passes, strict=True):
        logs = [
            log(sum(one.elapsed_s for one in steps) / sum(fit.predict(one.shape) for one in steps))
            for steps in of_load
            if steps
        ]
        if len(logs) > 1:
            mean = fmean(logs)
            squares += sum((value - mean) ** 2 for value in logs)
            num_free += len(logs) - 1
    return sqrt(squares / num_free) if num_free else 0.0


@dataclass(frozen=True, slots=True)
class MeasuredDelay:
    """Delays of one request, with the requests in flight when it was sent."""

    num_in_flight: int
    to_engine_s: float
    to_client_s: float


def group_delays(delays: Sequence[MeasuredDelay], seed: int = 0) -> tuple[Delays, ...]:
    """Return samples of the delays by requests in flight."""
    rng = random.Random(f"delays/{seed}")
    grouped: list[Delays] = []
    low = 0
    for limit in DELAY_LIMITS:
        found = [one for one in delays if low < one.num_in_flight <= limit]
        low = limit
        if len(found) > MAX_DELAYS:
            found = rng.sample(found, MAX_DELAYS)
        if found:
            to_engine = tuple(round(one.to_engine_s, 6) for one in found)
            to_client = tuple(round(one.to_client_s, 6) for one in found)
            grouped.append(Delays(limit, to_engine, to_client))
    if not grouped:
        raise ConfigError("no request of the measurement was answered")
    return tuple(grouped)


def largest_shape(steps: Sequence[ObservedStep]) -> StepShape:
    """Return the largest value of each property of the steps."""
    columns = zip(*[one.shape for one in steps], strict=True)
    return StepShape(*[max(column) for column in columns])


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a profile comes from."""

    model: str
    machine: str
    headway: str
    command: str
    date: str
    start_s: float = 0.0
    steal: float = 0.0


def fit_profile(
    header: RecordingHeader,
    passes: Sequence[Sequence[Sequence[ObservedStep]]],
    delays: tuple[Delays, ...],
    origin: Provenance,
) -> MachineProfile:
    """Fit a profile to the steps of each load of each pass."""
    every = [step for of_pass in passes for of_load in of_pass for step in of_load]
    overhead, (fit, slowing) = fit_overhead(every), fit_steps(every)
    passes = [[slowing.without(of_load) for of_load in of_pass] for of_pass in passes]
    steps = [step for of_pass in passes for of_load in of_pass for step in of_load]
    return MachineProfile(
        model=origin.model,
        machine=origin.machine,
        headway=origin.headway,
        command=origin.command,
        date=origin.date,
        scheduler=header.scheduler,
        capacity=header.capacity,
        enable_prefix_caching=header.enable_prefix_caching,
        fit=fit,
        residuals=residual_runs(steps, fit),
        drift=measure_drift(passes, fit),
        overhead_s=overhead.constant_s,
        overhead_per_row_s=overhead.per_row_s,
        request_s=overhead.per_request_s + slowing.per_request_s,
        delays=delays,
        start_s=origin.start_s,
        largest=largest_shape(steps),
        num_steps=len(steps),
        steal=origin.steal,
    )


def profile_of(observed: ObservedEngine) -> MachineProfile:
    """Return the profile of a recorded engine, without the delays of its clients."""
    header, steps = observed.header, observed.steps
    third = max(1, ceil(len(steps) / 3))
    passes = [[steps[start : start + third]] for start in range(0, len(steps), third)]
    origin = Provenance(header.model, header.platform, header.headway, "from a recording", "")
    return fit_profile(header, passes, (Delays(1, (0.0,), (0.0,)),), origin)
