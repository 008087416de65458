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
from headway.sim.profile.machine import Delays, MachineProfile, ResidualRun, StepFit, features
from headway.sim.recording.observed import ObservedEngine, ObservedStep

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
MIN_STEPS_AT_KNOT = 12
MIN_STEPS = 300
NUM_LINEAR = 3
"""Coefficients after those at the knots: decodes, context, attended tokens."""
RUN_LENGTH = 50
"""Steps of a residual run, and of a block that is drawn as a whole."""
MAX_RUNS = 120
NUM_REFITS = 40
NUM_WEIGHTINGS = 4
NUM_SWEEPS = 3000
MAX_DELAYS = 200
MAX_GAP_S = 1e-4
"""A step that begins later after the one before has found the engine idle."""
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


def fit_steps(steps: Sequence[ObservedStep], seed: int = 0) -> StepFit:
    """Return the step times that fit the steps, in order of time."""
    knots = _knots_of(steps)
    rows = [features(one.shape, knots) for one in steps]
    solution, blocks = _solve_weighted(rows, steps, len(knots) + NUM_LINEAR)
    scale = sum(one.elapsed_s for one in steps) / sum(_predict(row, solution) for row in rows)
    rng = random.Random(f"refits/{seed}")
    refits: list[tuple[float, ...]] = []
    for _ in range(NUM_REFITS):
        first, *others = rng.choices(blocks, k=len(blocks))
        refit = first.plus(others).solve(solution)
        refits.append(tuple(scale * value for value in refit))
    return StepFit(knots, tuple(scale * value for value in solution), tuple(refits))


def fit_ended(steps: Sequence[ObservedStep]) -> float:
    """Return the seconds that each request that has just ended adds to the next step.

    In a closed loop its client sends the next one then, which is read during the same step. The
    number that arrives during a step is no measure: a longer step has more.
    """
    knots = _knots_of(steps)
    last = len(knots) + NUM_LINEAR
    rows = [
        [*features(one.shape, knots), (last, num_ended)]
        for one, num_ended in zip(steps, ended_before(steps), strict=True)
    ]
    return _solve_weighted(rows, steps, last + 1)[0][last]


def without_ended(steps: Sequence[ObservedStep], per_ended_s: float) -> list[ObservedStep]:
    """Return the steps as they would be if no request had ended just before."""
    return [
        replace(one, elapsed_s=max(one.elapsed_s / 2, one.elapsed_s - num_ended * per_ended_s))
        for one, num_ended in zip(steps, ended_before(steps), strict=True)
    ]


def ended_before(steps: Sequence[ObservedStep]) -> list[int]:
    """Return for each step how many requests ended with one that it followed at once."""
    numbers, until, num_ended = list[int](), -inf, 0
    for one in steps:
        numbers.append(num_ended if one.began_at - until < MAX_GAP_S else 0)
        until, num_ended = one.began_at + one.elapsed_s + one.overhead_s, one.num_ended
    return numbers


def _knots_of(steps: Sequence[ObservedStep]) -> tuple[int, ...]:
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"{len(steps)} steps were measured; a profile needs {MIN_STEPS}")
    return choose_knots(steps)


def _solve_weighted(
    rows: Sequence[Row], steps: Sequence[ObservedStep], size: int
) -> tuple[list[float], list[_Sums]]:
    """Return the coefficients that fit the steps, and the sums of each block of steps."""
    measured = [one.elapsed_s for one in steps]
    weights = [1.0 / seconds**2 for seconds in measured]
    solution: list[float] | None = None
    blocks: list[_Sums] = []
    for _ in range(NUM_WEIGHTINGS):
        blocks = _sum_blocks(rows, measured, weights, size)
        solution = blocks[0].plus(blocks[1:]).solve(solution)
        weights = [1.0 / max(_predict(row, solution), 1e-6) ** 2 for row in rows]
    if solution is None:
        raise RuntimeError("no fit was made")
    return solution, blocks


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
    num_closed: int | None = None,
) -> MachineProfile:
    """Fit a profile to the steps of each load of each pass.

    The first `num_closed` loads of a pass are closed loops, of which the cost of a request is
    known. Without it, or with too few of their steps, it comes from all steps, and lacks most of
    what requests of open loops cost when they arrive.
    """
    measured = [step for of_pass in passes for of_load in of_pass for step in of_load]
    closed = [step for of_pass in passes for of_load in of_pass[:num_closed] for step in of_load]
    overhead = fit_overhead(measured)
    per_ended_s = fit_ended(closed if len(closed) >= MIN_STEPS else measured)
    passes = [[without_ended(of_load, per_ended_s) for of_load in of_pass] for of_pass in passes]
    steps = [step for of_pass in passes for of_load in of_pass for step in of_load]
    fit = fit_steps(steps)
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
        per_request_s=overhead.per_request_s + per_ended_s,
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
