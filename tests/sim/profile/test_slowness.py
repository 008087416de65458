"""How fast a recorded engine was, by what a profile says of its steps."""

from __future__ import annotations

from dataclasses import replace
from math import log, sqrt

import pytest

from headway.errors import ConfigError
from headway.sim.profile.slowness import measure_slowness
from headway.sim.recording.observed import ObservedStep
from tests.sim.profile.test_profile import draw_steps
from tests.sim.support import make_profile

PROFILE = make_profile()


def steps_of(*factors: float) -> list[ObservedStep]:
    """Return a minute of busy steps for each factor, by which they are longer than profiled."""
    steps = [
        replace(
            one,
            began_at=60 * minute + 0.06 * number,
            elapsed_s=factor * one.elapsed_s,
            overhead_s=factor * (0.001 + 0.0001 * one.num_scheduled),
        )
        for minute, factor in enumerate(factors)
        for number, one in enumerate(draw_steps(990, noise=0.0))
    ]
    assert max(one.elapsed_s for one in steps) < 0.5
    return steps


def test_steps_as_profiled_have_a_slowness_of_one():
    found = measure_slowness(steps_of(1.0), PROFILE)
    assert found.total == pytest.approx(1.0)
    assert found.windows == pytest.approx((1.0,))
    assert found.drift == 0.0


def test_minutes_differ_by_the_drift():
    found = measure_slowness(steps_of(1.2, 1.5, 1.2, 1.5), PROFILE)
    assert found.total == pytest.approx(1.35)
    assert found.windows == pytest.approx((1.2, 1.5, 1.2, 1.5))
    assert found.drift == pytest.approx(log(1.5 / 1.2) / sqrt(3))


def test_requests_that_ended_before_a_step_are_expected_to_lengthen_it():
    profile = replace(PROFILE, per_request_s=0.002)
    shape = draw_steps(1, noise=0.0)[0].shape
    usual_s = PROFILE.fit.predict(shape)
    first = ObservedStep(0.0, shape, 0, usual_s, 0.001, num_ended=3)
    second = ObservedStep(usual_s + 0.001, shape, 0, usual_s + 0.006, 0.001)
    assert measure_slowness([first, second], profile).total == pytest.approx(1.0)


def test_a_minute_with_little_work_says_nothing_of_the_drift():
    steps = steps_of(1.0, 1.1)
    found = measure_slowness([*steps, replace(steps[0], began_at=150.0, elapsed_s=5.0)], PROFILE)
    assert found.windows == pytest.approx((1.0, 1.1))
    assert found.drift == pytest.approx(log(1.1) / sqrt(2))


def test_a_recording_without_steps_is_refused():
    with pytest.raises(ConfigError, match="no steps"):
        measure_slowness([], PROFILE)
