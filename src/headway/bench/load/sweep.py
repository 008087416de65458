"""A sweep over arrival rates: the throughput-latency curve and its knee.

The knee is the highest swept rate before the first one that is saturated. A rate is saturated if
any of these holds, each against the rates below it:
- the p95 TTFT is above the target, or, without a target, above 3 times that of the lowest rate
  (and above it by at least 0.1 s, for below that it is noise);
- output tokens/s rose by less than a third of what the rate rose by, relative to the rate before;
  not looked at where a run is so short that the last answers are much of it;
- more than 1 % of the requests were refused or failed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from headway.bench.load.stats import LoadSummary

MAX_AUTO_POINTS = 12
_TTFT_FACTOR = 3.0
_TTFT_NOISE_S = 0.1
_LEAST_GAIN = 1 / 3
_LEAST_LENGTH = 3.0
"""Least length of a run, in multiples of the slowest responses at the lowest rate."""
_MOST_UNSERVED = 0.01


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One rate and its result."""

    rate: float
    summary: LoadSummary
    cpu_share: float


def why_saturated(points: Sequence[SweepPoint], ttft_target_s: float | None = None) -> str | None:
    """Return why the last point is saturated; None if it is not."""
    last = points[-1]
    unserved = last.summary.unserved_share
    if unserved > _MOST_UNSERVED:
        return f"{unserved:.0%} refused or failed"
    ttft = last.summary.ttft_s.get(95)
    if ttft is None:
        return "nothing was completed"
    lowest = points[0].summary.ttft_s.get(95, 0.0)
    limit = ttft_target_s or max(_TTFT_FACTOR * lowest, lowest + _TTFT_NOISE_S)
    if ttft > limit:
        return f"p95 TTFT {ttft:.2f} s, above {limit:.2f} s"
    answer_s = points[0].summary.e2e_s.get(95, 0.0)
    if len(points) > 1 and last.summary.elapsed_s >= _LEAST_LENGTH * answer_s:
        before = points[-2]
        rate_gain = last.rate / before.rate - 1
        speed = before.summary.output_tokens_per_s
        gain = last.summary.output_tokens_per_s / speed - 1 if speed else rate_gain
        if gain < _LEAST_GAIN * rate_gain:
            return f"{gain:+.0%} output tokens/s for {rate_gain:+.0%} requests/s"
    return None


@dataclass(frozen=True, slots=True)
class Knee:
    """The knee of a curve.

    `rate` is None if the lowest rate was saturated; `why` is None if no rate was.
    """

    rate: float | None
    why: str | None


def find_knee(points: Sequence[SweepPoint], ttft_target_s: float | None = None) -> Knee:
    """Return the knee of a curve with rising rates."""
    for number in range(1, len(points) + 1):
        why = why_saturated(points[:number], ttft_target_s)
        if why is not None:
            return Knee(points[number - 2].rate if number > 1 else None, why)
    return Knee(points[-1].rate, None)


async def run_sweep(
    measure: Callable[[float], Awaitable[SweepPoint]],
    rates: Sequence[float] | None,
    first_rate: float,
    points: list[SweepPoint],
    ttft_target_s: float | None = None,
) -> None:
    """Measure each rate; without rates, double the first until saturation.

    Each point is added to `points` at once, so that an interrupted sweep keeps its points.
    """
    if rates is not None:
        for rate in rates:
            points.append(await measure(rate))  # noqa: PERF401 - a sweep may be cut short
        return
    rate = first_rate
    while len(points) < MAX_AUTO_POINTS:
        points.append(await measure(rate))
        if why_saturated(points, ttft_target_s) is not None:
            return
        rate *= 2
