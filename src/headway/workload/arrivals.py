"""Arrival processes, and the closed loop, which has none.

All randomness comes from the `random.Random` that is passed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from math import cos, pi, sqrt
from random import Random

from headway.errors import ConfigError
from headway.workload.spec import Form, check_positive, check_whole, parse_form


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A number of clients; each sends again after its response."""

    concurrency: int

    def __post_init__(self) -> None:
        check_whole(1, concurrency=self.concurrency)

    def times(self, draw: Random) -> Iterator[float]:
        return repeat(0.0)


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent arrivals, `rate` per second."""

    rate: float

    def __post_init__(self) -> None:
        check_positive(rate=self.rate)

    @property
    def mean_rate(self) -> float:
        return self.rate

    def with_rate(self, rate: float) -> Poisson:
        return Poisson(rate)

    def part(self, share: float) -> Poisson:
        """Return a share of the arrivals, drawn at random."""
        return Poisson(share * self.rate)

    def times(self, draw: Random) -> Iterator[float]:
        at = 0.0
        while True:
            at += draw.expovariate(self.rate)
            yield at


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps of mean 1/rate with coefficient of variation `cv`.

    1 is Poisson, more is burstier, less is more even.
    """

    rate: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        check_positive(rate=self.rate, cv=self.cv)

    @property
    def mean_rate(self) -> float:
        return self.rate

    def with_rate(self, rate: float) -> Gamma:
        return replace(self, rate=rate)

    def part(self, share: float) -> Gamma:
        """Return about a share of the arrivals, drawn at random: they are more like Poisson."""
        return Gamma(share * self.rate, sqrt(share * self.cv**2 + 1.0 - share))

    def times(self, draw: Random) -> Iterator[float]:
        shape = self.cv**-2
        at = 0.0
        while True:
            at += draw.gammavariate(shape, 1.0 / (shape * self.rate))
            yield at


@dataclass(frozen=True, slots=True)
class OnOff:
    """A Poisson process of `rate` per second for `on` seconds, then `off` seconds of silence."""

    rate: float
    on: float
    off: float

    def __post_init__(self) -> None:
        check_positive(rate=self.rate, on=self.on, off=self.off)

    @property
    def mean_rate(self) -> float:
        return self.rate * self.on / (self.on + self.off)

    def with_rate(self, rate: float) -> OnOff:
        """Return the same bursts with another mean rate, silence included."""
        return replace(self, rate=rate * (self.on + self.off) / self.on)

    def part(self, share: float) -> OnOff:
        """Return a share of the arrivals, drawn at random."""
        return replace(self, rate=share * self.rate)

    def times(self, draw: Random) -> Iterator[float]:
        for busy_s in Poisson(self.rate).times(draw):
            num_bursts, into_burst_s = divmod(busy_s, self.on)
            yield num_bursts * (self.on + self.off) + into_burst_s


@dataclass(frozen=True, slots=True)
class Diurnal:
    """A Poisson process whose rate falls to `low` at night and rises to `peak` by day.

    It begins at midnight; the rate is a cosine.
    """

    peak: float
    low: float
    day: float = 86_400.0

    def __post_init__(self) -> None:
        check_positive(peak=self.peak, low=self.low, day=self.day)
        if self.low > self.peak:
            raise ConfigError(f"low={self.low:g} is above the peak of {self.peak:g}")

    @property
    def mean_rate(self) -> float:
        return (self.peak + self.low) / 2.0

    def with_rate(self, rate: float) -> Diurnal:
        factor = rate / self.mean_rate
        return replace(self, peak=factor * self.peak, low=factor * self.low)

    def part(self, share: float) -> Diurnal:
        """Return a share of the arrivals, drawn at random."""
        return self.with_rate(share * self.mean_rate)

    def times(self, draw: Random) -> Iterator[float]:
        for at in Poisson(self.peak).times(draw):
            share = (1.0 - cos(2.0 * pi * at / self.day)) / 2.0
            if draw.random() * self.peak < self.low + share * (self.peak - self.low):
                yield at


OpenArrivals = Poisson | Gamma | OnOff | Diurnal
Arrivals = ClosedLoop | OpenArrivals


def _closed(concurrency: float) -> ClosedLoop:
    check_whole(1, concurrency=concurrency)
    return ClosedLoop(int(concurrency))


ARRIVAL_FORMS: dict[str, Form[Arrivals]] = {
    "closed": Form("closed:CONCURRENCY", _closed),
    "poisson": Form("poisson:RATE", Poisson),
    "gamma": Form("gamma:RATE,cv=CV", Gamma, optional=("cv",)),
    "onoff": Form("onoff:RATE_WHILE_ON,on=SECONDS,off=SECONDS", OnOff, required=("on", "off")),
    "diurnal": Form(
        "diurnal:PEAK_RATE,low=RATE,day=SECONDS", Diurnal, required=("low",), optional=("day",)
    ),
}


def parse_arrivals(text: str) -> Arrivals:
    """Parse arrivals such as `gamma:4,cv=2`."""
    return parse_form(text, ARRIVAL_FORMS)


def parse_rates(text: str) -> tuple[float, ...]:
    """Parse rates such as `0.5,1,2`, each above 0, in rising order."""
    try:
        rates = sorted({float(part) for part in text.split(",")})
    except ValueError:
        rates = []
    if not rates or not all(0.0 < rate < float("inf") for rate in rates):
        raise ConfigError(f"{text!r}: accepted are rates per second such as 0.5,1,2")
    return tuple(rates)
