"""How fast a recorded engine was, by what a profile says of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from statistics import stdev

from headway.errors import ConfigError
from headway.sim.profile.fitting import ended_before
from headway.sim.profile.machine import MachineProfile
from headway.sim.recording.observed import ObservedStep

WINDOW_S = 60.0
MIN_BUSY_S = 10.0
"""Seconds of steps without which a window says little."""


@dataclass(frozen=True, slots=True)
class Slowness:
    """Time that recorded steps took, by the time that a profile says."""

    total: float
    windows: tuple[float, ...]
    """The same for each minute that was busy enough."""

    @property
    def drift(self) -> float:
        """Standard deviation of its logarithm between the minutes."""
        return stdev(map(log, self.windows)) if len(self.windows) > 1 else 0.0


def measure_slowness(steps: Sequence[ObservedStep], profile: MachineProfile) -> Slowness:
    """Compare recorded steps, in order of time, with what a profile says of the same steps."""
    if not steps:
        raise ConfigError("there are no steps to compare with the profile")
    measured_s, predicted_s = dict[int, float](), dict[int, float]()
    for one, num_ended in zip(steps, ended_before(steps), strict=True):
        window = int((one.began_at - steps[0].began_at) // WINDOW_S)
        seconds = (
            profile.fit.predict(one.shape)
            + profile.overhead_s
            + profile.overhead_per_row_s * one.num_scheduled
            + profile.per_request_s * num_ended
        )
        measured_s[window] = measured_s.get(window, 0.0) + one.elapsed_s + one.overhead_s
        predicted_s[window] = predicted_s.get(window, 0.0) + seconds
    return Slowness(
        sum(measured_s.values()) / sum(predicted_s.values()),
        tuple(
            seconds / predicted_s[window]
            for window, seconds in measured_s.items()
            if seconds >= MIN_BUSY_S
        ),
    )
