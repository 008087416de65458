"""Profiles: what steps and requests take on one machine with one model, and how sure that is.

A profile is measured on a server under load (`headway profile`), so that its step times have the
API process and the clients on the same cores. It is a JSON file.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp
from pathlib import Path

from headway.config import SchedulerConfig
from headway.core.executor import Capacity
from headway.core.slo.steptime import StepShape
from headway.errors import ConfigError
from headway.sim.profile.plain import from_plain
from headway.sim.steps import DrawStep, StepTime

FORMAT = 1
NEIGHBOUR_SHARE = 6
"""One of so many runs of residuals fits a step: those of the steps of nearest length."""
MIN_NEIGHBOURS = 6
PAUSE_RATIO = 2.0
"""A step that took longer than so many times its prediction was stopped, not slow."""


@dataclass(frozen=True, slots=True)
class StepFit:
    """Seconds of a step by its shape.

    The linear layers take a time that depends on the rows of the step (decodes and prefill tokens),
    linear between knots; the rest is proportional to decodes, context and attended tokens.
    """

    knots: tuple[int, ...]
    coefficients: tuple[float, ...]
    """Seconds at each knot, then per decode, per context token and per attended token."""
    refits: tuple[tuple[float, ...], ...] = ()
    """Coefficients of other samples of the same steps; their spread is that of the fit."""

    def predict(self, shape: StepShape) -> float:
        """Return the expected seconds of a step: `features` times coefficients."""
        decodes, prefill_tokens, context, attended = shape
        coefficients, knots = self.coefficients, self.knots
        upper, share = _between(decodes + prefill_tokens, knots)
        first = len(knots)
        return (
            (1.0 - share) * coefficients[upper - 1]
            + share * coefficients[upper]
            + decodes * coefficients[first]
            + context * coefficients[first + 1]
            + attended * coefficients[first + 2]
        )

    def slowed(self, factor: float) -> StepFit:
        """Return the fit of steps that take so many times as long."""
        coefficients, *refits = [
            tuple(factor * seconds for seconds in one) for one in (self.coefficients, *self.refits)
        ]
        return StepFit(self.knots, coefficients, tuple(refits))

    def draw(self, rng: random.Random) -> StepFit:
        """Return one of the refits."""
        return StepFit(self.knots, rng.choice(self.refits)) if self.refits else self


def _between(rows: int, knots: Sequence[int]) -> tuple[int, float]:
    """Return the knot above a number of rows, and how near it is, from the knot before it.

    Rows beyond the last knot continue its slope.
    """
    upper = min(max(bisect_left(knots, rows), 1), len(knots) - 1)
    low = knots[upper - 1]
    return upper, max(0.0, (rows - low) / (knots[upper] - low))


def features(shape: StepShape, knots: Sequence[int]) -> list[tuple[int, float]]:
    """Return the features of a step that are not 0, as (position, value)."""
    decodes, prefill_tokens, context, attended = shape
    upper, share = _between(decodes + prefill_tokens, knots)
    first = len(knots)
    return [
        (upper - 1, 1.0 - share),
        (upper, share),
        (first, decodes),
        (first + 1, context),
        (first + 2, attended),
    ]


@dataclass(frozen=True, slots=True)
class ResidualRun:
    """Measured by predicted seconds of consecutive steps."""

    predicted_s: float
    """Mean of the predictions."""
    ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Delays:
    """Seconds between client and engine, with up to so many requests in flight."""

    max_in_flight: int
    to_engine_s: tuple[float, ...]
    to_client_s: tuple[float, ...]

    def slowed(self, factor: float) -> Delays:
        """Return delays that are so many times as long."""
        to_engine_s = tuple(factor * seconds for seconds in self.to_engine_s)
        to_client_s = tuple(factor * seconds for seconds in self.to_client_s)
        return replace(self, to_engine_s=to_engine_s, to_client_s=to_client_s)


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """One machine with one model, as measured."""

    model: str
    machine: str
    headway: str
    command: str
    date: str
    scheduler: SchedulerConfig
    capacity: Capacity
    enable_prefix_caching: bool
    fit: StepFit
    residuals: tuple[ResidualRun, ...]
    """By predicted seconds."""
    drift: float
    """Standard deviation of the logarithm of the speed between passes of the measurement."""
    overhead_s: float
    overhead_per_row_s: float
    """Seconds of the engine process per step and per scheduled request."""
    delays: tuple[Delays, ...]
    """By requests in flight."""
    start_s: float
    """Seconds from the start of the server to the first answer."""
    largest: StepShape
    """Largest value of each property of the measured steps."""
    num_steps: int
    steal: float
    """Share of the CPU time that the host took during the measurement."""
    per_request_s: float = 0.0
    """Seconds besides for each request, if the engine is busy: to read it, add it and end it."""
    caveat: str = ""
    """What makes predictions doubtful; a measured profile has none."""
    format: int = FORMAT

    def engines(self, rng: random.Random) -> Iterator[MeasuredTimes]:
        """Yield the step times of the engines of one simulated run.

        What is not known of the profile is the same for all: the coefficients, and the error of a
        datasheet. Measured engines differ in their speed.
        """
        fit, speed = self.fit.draw(rng), exp(rng.gauss(0.0, self.drift))
        while True:
            yield MeasuredTimes(self, fit, speed)
            if not self.is_datasheet:
                speed = exp(rng.gauss(0.0, self.drift))

    def slowed(self, factor: float) -> MachineProfile:
        """Return the profile of a machine on which everything takes so many times as long."""
        return replace(
            self,
            fit=self.fit.slowed(factor),
            overhead_s=factor * self.overhead_s,
            overhead_per_row_s=factor * self.overhead_per_row_s,
            per_request_s=factor * self.per_request_s,
            delays=tuple(one.slowed(factor) for one in self.delays),
            start_s=factor * self.start_s,
            residuals=tuple(
                replace(run, predicted_s=factor * run.predicted_s) for run in self.residuals
            ),
        )

    def expected(self) -> MeasuredTimes:
        """Return step times with the best coefficients and the mean speed."""
        return MeasuredTimes(self, self.fit, 1.0)

    @property
    def is_datasheet(self) -> bool:
        """Whether it was computed and not measured."""
        return bool(self.caveat)

    def delays_with(self, num_in_flight: int) -> Delays:
        """Return the delays with this many requests in flight."""
        limits = [one.max_in_flight for one in self.delays]
        return self.delays[min(bisect_left(limits, num_in_flight), len(limits) - 1)]

    def is_beyond(self, shape: StepShape) -> bool:
        """Return whether a step is larger than every measured one in some property."""
        a, b, c, d = shape
        most_a, most_b, most_c, most_d = self.largest
        return a > most_a or b > most_b or c > most_c or d > most_d


@dataclass(frozen=True, slots=True)
class MeasuredTimes:
    """Step times of a profile, with residuals in runs as they were measured."""

    profile: MachineProfile
    fit: StepFit
    speed: float
    """Factor of all step times."""

    def start(self, rng: random.Random) -> DrawStep:
        profile, fit = self.profile, self.fit
        means = [run.predicted_s for run in profile.residuals]
        num_near = max(MIN_NEIGHBOURS, len(means) // NEIGHBOUR_SHARE)
        left: list[float] = []
        run_s = 0.0

        def draw(shape: StepShape, num_ended: int) -> StepTime:
            nonlocal run_s
            predicted_s = fit.predict(shape)
            if not left and means:
                first = bisect_right(means, predicted_s) - num_near // 2
                first = max(0, min(first, len(means) - num_near))
                run = profile.residuals[min(first + rng.randrange(num_near), len(means) - 1)]
                left.extend(reversed(run.ratios))
                run_s = run.predicted_s
            ratio = left.pop() if left else 1.0
            rows = shape.num_decodes + (shape.num_prefill_tokens > 0)
            overhead_s = profile.overhead_s + profile.overhead_per_row_s * rows
            # A pause is not longer because it falls into a longer step.
            base_s = min(run_s, predicted_s) if ratio > PAUSE_RATIO else predicted_s
            elapsed_s = predicted_s + (ratio - 1.0) * base_s + num_ended * profile.per_request_s
            return StepTime(self.speed * elapsed_s, self.speed * overhead_s)

        return draw


def write_profile(path: Path, profile: MachineProfile) -> None:
    """Write a profile as JSON, one field per line."""
    plain = asdict(profile)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in plain.items()]
    try:
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def read_profile(path: Path) -> MachineProfile:
    """Read a profile; ConfigError if the file is none."""
    try:
        profile = from_plain(
            MachineProfile, json.loads(path.read_bytes(), parse_constant=_refuse_constant)
        )
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # not JSON, or not of this form
        raise ConfigError(
            f"{path} is not a profile written by `headway profile`: {error}"
        ) from error
    if profile.format != FORMAT:
        raise ConfigError(
            f"{path} has format {profile.format}, this release reads {FORMAT}: measure it again"
        )
    return profile


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")
