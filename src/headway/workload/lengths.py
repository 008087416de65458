"""Length distributions of prompts and outputs, in tokens, at least 1."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from headway.errors import ConfigError
from headway.workload.spec import Form, check_positive, check_whole, parse_form
from headway.workload.trace import read_text, read_trace

Side = Literal["prompt", "output"]


@dataclass(frozen=True, slots=True)
class Fixed:
    """A constant length."""

    num_tokens: int

    def __post_init__(self) -> None:
        check_whole(1, num_tokens=self.num_tokens)

    def draw(self, draw: Random) -> int:
        return self.num_tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Lengths from `low` to `high`, both included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        check_whole(1, low=self.low, high=self.high)
        if self.low > self.high:
            raise ConfigError(f"the first of two lengths is the lower one, not {self.low}")

    def draw(self, draw: Random) -> int:
        return draw.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of lengths; no upper limit if `high` is None."""

    low: int = 1
    high: int | None = None

    def __post_init__(self) -> None:
        check_whole(1, min=self.low, max=self.low if self.high is None else self.high)
        if self.high is not None and self.low > self.high:
            raise ConfigError(f"min {self.low} is above max {self.high}")

    def clip(self, length: float) -> int:
        bounded = max(self.low, round(length))
        return bounded if self.high is None else min(self.high, bounded)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """exp of a normal distribution of mean `mu` and deviation `sigma`, clipped."""

    mu: float
    sigma: float
    bounds: Bounds = Bounds()

    def __post_init__(self) -> None:
        check_positive(sigma=self.sigma)

    def draw(self, draw: Random) -> int:
        return self.bounds.clip(draw.lognormvariate(self.mu, self.sigma))


@dataclass(frozen=True, slots=True)
class Empirical:
    """Lengths drawn from a sample with equal probability, scaled and clipped."""

    samples: tuple[int, ...]
    scale: float = 1.0
    bounds: Bounds = Bounds()

    def __post_init__(self) -> None:
        check_positive(scale=self.scale)
        if not self.samples or min(self.samples) < 0:
            raise ConfigError("lengths are needed, none of them below 0")

    def draw(self, draw: Random) -> int:
        return self.bounds.clip(draw.choice(self.samples) * self.scale)


Lengths = Fixed | Uniform | Lognormal | Empirical


def parse_lengths(text: str, side: Side) -> Lengths:
    """Parse lengths such as `uniform:32,256`; `side` selects the column of a trace."""
    return parse_form(text, _forms(side))


def _forms(side: Side) -> dict[str, Form[Lengths]]:
    def from_file(path: str, scale: float = 1.0, **bounds: float) -> Empirical:
        return Empirical(_lengths_in(Path(path), side), scale, _bounds(**bounds))

    clipped = ("min", "max")
    return {
        "fixed": Form("fixed:TOKENS", _fixed),
        "uniform": Form("uniform:LOW,HIGH", _uniform, num_values=2),
        "lognormal": Form(
            "lognormal:MU,SIGMA[,min=N][,max=N]", _lognormal, num_values=2, optional=clipped
        ),
        "list": Form("list:N,N,...", _listed, num_values=None),
        "empirical": Form(
            "empirical:FILE[,scale=F][,min=N][,max=N] (a trace, or a number per line)",
            from_file,
            optional=("scale", *clipped),
            takes_text=True,
        ),
    }


def _bounds(min: float = 1, max: float | None = None) -> Bounds:
    check_whole(1, min=min, max=min if max is None else max)
    return Bounds(int(min), None if max is None else int(max))


def _fixed(num_tokens: float) -> Fixed:
    check_whole(1, length=num_tokens)
    return Fixed(int(num_tokens))


def _uniform(low: float, high: float) -> Uniform:
    check_whole(1, low=low, high=high)
    return Uniform(int(low), int(high))


def _lognormal(mu: float, sigma: float, **bounds: float) -> Lognormal:
    return Lognormal(mu, sigma, _bounds(**bounds))


def _listed(*lengths: float) -> Empirical:
    for length in lengths:
        check_whole(1, length=length)
    return Empirical(tuple(int(length) for length in lengths))


def _lengths_in(path: Path, side: Side) -> tuple[int, ...]:
    lines = read_text(path).split()
    if all(line.isdigit() for line in lines):
        return tuple(_positive(int(line) for line in lines))
    rows = read_trace(path).rows
    if side == "prompt":
        return tuple(_positive(row.num_prompt_tokens for row in rows))
    return tuple(_positive(row.num_output_tokens for row in rows))


def _positive(lengths: Iterable[int]) -> Iterable[int]:
    """Return the positive lengths: failed requests of a trace have no output."""
    return (length for length in lengths if length > 0)
