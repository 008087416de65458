"""Profiles: fits that find known step times, files, and shapes beyond what was measured."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from headway.core.slo.steptime import StepShape
from headway.errors import ConfigError
from headway.sim.profile.catalog import find_profile
from headway.sim.profile.fitting import (
    MeasuredDelay,
    Provenance,
    fit_ended,
    fit_overhead,
    fit_profile,
    fit_steps,
    group_delays,
    measure_drift,
    residual_runs,
    without_ended,
)
from headway.sim.profile.machine import Delays, StepFit, read_profile, write_profile
from headway.sim.recording.observed import ObservedStep, read_observed
from tests.record.support import Recorder, harness_class, recorded
from tests.sim.support import COEFFICIENTS, KNOTS, make_profile

TRUE = StepFit(KNOTS, COEFFICIENTS)


def draw_steps(num: int, noise: float, seed: int = 1) -> list[ObservedStep]:
    rng = random.Random(seed)
    steps: list[ObservedStep] = []
    for number in range(num):
        decodes = rng.choice((0, 1, 2, 4, 8, 16, 32, 64))
        tokens = rng.choice((0, 0, 16, 64, 256, 448)) or (0 if decodes else 16)
        shape = StepShape(
            decodes, tokens, decodes * rng.randrange(10, 800), tokens * rng.randrange(1, 400)
        )
        seconds = TRUE.predict(shape) * rng.lognormvariate(-noise * noise / 2, noise)
        steps.append(ObservedStep(0.02 * number, shape, decodes, seconds, 0.001 + 0.0001 * decodes))
    return steps


def test_a_fit_predicts_the_mean_of_noisy_steps():
    fit = fit_steps(draw_steps(4000, noise=0.3))
    for shape in (
        StepShape(1, 0, 100, 0),
        StepShape(32, 0, 8000, 0),
        StepShape(16, 256, 4000, 40_000),
    ):
        assert fit.predict(shape) == pytest.approx(TRUE.predict(shape), rel=0.05)


def test_the_sum_of_predictions_is_that_of_the_steps():
    steps = draw_steps(1500, noise=0.4, seed=3)
    fit = fit_steps(steps)
    predicted = sum(fit.predict(one.shape) for one in steps)
    assert predicted == pytest.approx(sum(one.elapsed_s for one in steps), rel=1e-6)


def test_refits_spread_as_fits_to_other_steps_do():
    shape = StepShape(8, 64, 2000, 10_000)
    fit = fit_steps(draw_steps(1500, noise=0.3, seed=4))
    refits = [StepFit(fit.knots, one).predict(shape) for one in fit.refits]
    others = [fit_steps(draw_steps(1500, 0.3, seed)).predict(shape) for seed in range(20, 28)]

    def spread(values: list[float]) -> float:
        return fmean((one - fmean(values)) ** 2 for one in values) ** 0.5

    assert 0.4 < spread(refits) / spread(others) < 2.5


def test_residuals_keep_the_order_in_which_steps_were_slow():
    steps = draw_steps(400, noise=0.0)
    slow = [
        ObservedStep(one.began_at, one.shape, one.num_scheduled, 2 * one.elapsed_s, 0.0)
        for one in steps[100:150]
    ]
    runs = residual_runs([*steps[:100], *slow, *steps[150:]], TRUE)
    assert sorted({ratio for run in runs for ratio in run.ratios}) == [1.0, 2.0]
    assert sum(set(run.ratios) == {2.0} for run in runs) == 1


def test_overhead_has_a_part_per_step_and_one_per_request():
    found = fit_overhead(draw_steps(500, noise=0.1))
    assert (found.constant_s, found.per_row_s) == pytest.approx((0.001, 0.0001), rel=0.01)


def test_what_ended_requests_add_to_the_next_step_is_found_and_taken_off():
    rng, now, num_before = random.Random(3), 0.0, 0
    steps: list[ObservedStep] = []
    calm = draw_steps(3000, noise=0.3)
    for number, one in enumerate(calm):
        elapsed_s = one.elapsed_s + 0.002 * num_before
        # A longer step has more arrivals, which is not why it is longer.
        num_added, num_ended = round(60 * elapsed_s), rng.choice((0, 0, 1, 2))
        overhead_s = 0.001 + 0.0005 * num_added + 0.0002 * num_ended
        slowed = replace(one, began_at=now, elapsed_s=elapsed_s, overhead_s=overhead_s)
        steps.append(replace(slowed, num_added=num_added, num_ended=num_ended))
        is_idle = number % 10 == 0  # what ended does not slow a step after a pause
        num_before = 0 if is_idle else num_ended
        now += elapsed_s + overhead_s + (0.5 if is_idle else 0.0)
    per_ended_s = fit_ended(steps)
    assert per_ended_s == pytest.approx(0.002, rel=0.25)
    total_s = sum(one.elapsed_s for one in calm)
    without = without_ended(steps, per_ended_s)
    assert sum(one.elapsed_s for one in without) == pytest.approx(total_s, rel=0.01)
    assert fit_overhead(steps).per_request_s == pytest.approx(0.0007, rel=0.01)


def test_steps_after_which_no_request_ended_cost_nothing_besides():
    steps = draw_steps(600, noise=0.1)
    assert fit_ended(steps) == 0.0
    assert without_ended(steps, 0.0) == steps


def test_a_profile_of_few_steps_in_closed_loops_takes_the_cost_from_all(tmp_path: Path):
    recorder = Recorder(tmp_path)
    with recorded(harness_class(recorder)()) as engine:
        engine.add("only", list(range(100, 110)), max_tokens=2)
        engine.run()
    header = read_observed(recorder.path).header
    few, many = draw_steps(100, noise=0.1), draw_steps(900, noise=0.1)
    many = [replace(one, overhead_s=one.overhead_s + 0.004, num_ended=1) for one in many]
    delays, origin = (Delays(1, (0.0,), (0.0,)),), Provenance("m", "a test", "0", "", "")
    found = fit_profile(header, [[few, many]], delays, origin, num_closed=1)
    assert found.num_steps == 1000
    assert found.per_request_s >= 0.0039


def test_drift_is_how_much_passes_differ():
    def scaled(factor: float) -> list[list[ObservedStep]]:
        steps = draw_steps(200, noise=0.0)
        return [[ObservedStep(0.0, one.shape, 1, factor * one.elapsed_s, 0.0) for one in steps]]

    assert measure_drift([scaled(1.0), scaled(1.0)], TRUE) == pytest.approx(0.0, abs=1e-9)
    assert measure_drift([scaled(1.0), scaled(1.1)], TRUE) == pytest.approx(0.067, abs=0.002)


def test_too_few_steps_are_refused():
    with pytest.raises(ConfigError, match="299 steps were measured"):
        fit_steps(draw_steps(299, noise=0.1))


def test_delays_are_those_of_as_many_requests_in_flight():
    delays = group_delays([MeasuredDelay(1, 0.1, 0.2), MeasuredDelay(30, 0.3, 0.4)])
    assert [one.max_in_flight for one in delays] == [1, 32]
    profile = make_profile()
    assert profile.delays_with(1).to_engine_s == (0.002,)
    assert profile.delays_with(2).to_engine_s == (0.004,)
    assert profile.delays_with(1000).to_engine_s == (0.004,)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path):
    path = tmp_path / "machine.json"
    write_profile(path, make_profile())
    assert read_profile(path) == make_profile()


def test_a_step_beyond_the_measured_ones_is_told():
    profile = make_profile()
    assert not profile.is_beyond(StepShape(64, 512, 20_000, 200_000))
    assert profile.is_beyond(StepShape(1, 0, 20_001, 0))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a profile"),
        (b"{}", "not a profile"),
        (b"\xff\x00", "not a profile"),
        (b'{"format": 1, "model": 3}', "not a profile"),
    ],
)
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_profile(path)


def test_a_profile_of_another_format_is_refused(tmp_path: Path):
    path = tmp_path / "machine.json"
    write_profile(path, make_profile())
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(ConfigError, match="format 99"):
        read_profile(path)


def test_a_missing_profile_is_named():
    with pytest.raises(ConfigError, match="no file and no shipped profile 'nowhere'"):
        find_profile("nowhere")
    with pytest.raises(ConfigError, match="cannot read"):
        find_profile("nowhere.json")


@pytest.mark.parametrize(
    ("shape", "longest_s"), [(StepShape(1, 400, 0, 80_000), 0.02), (StepShape(1, 0, 100, 100), 1.0)]
)
def test_a_pause_is_not_longer_in_a_longer_step(shape: StepShape, longest_s: float):
    def elapsed_s(ratio: float) -> float:
        draw = make_profile(ratios=(ratio,)).expected().start(random.Random(0))
        return draw(shape, 0).elapsed_s

    expected = elapsed_s(1.0)
    assert elapsed_s(1.5) == pytest.approx(1.5 * expected)
    # The measured steps had 0.02 s.
    assert elapsed_s(6.0) == pytest.approx(expected + 5 * min(expected, longest_s))
