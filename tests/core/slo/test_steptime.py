"""The step-time model: on real steps, on made-up ones, after few, and after a very slow one."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median
from time import perf_counter

import pytest

from headway.core.plan import ScheduledRequest, StepPlan
from headway.core.slo.steptime import (
    FORGETTING,
    RIDGE,
    StepCost,
    StepShape,
    StepTimeModel,
    shape_of,
)

STEPS = Path(__file__).parents[1] / "data" / "steps.csv"
"""Steps of SmolLM2-135M on a shared machine, noted by benchmarks/sim/step_times.py."""
TRUE = StepCost(0.02, 0.5e-3, 0.1e-3, 3e-6, 0.02e-6)
"""Far from what the model begins with, in every coefficient."""


def real_steps() -> list[tuple[StepShape, float]]:
    rows = [[int(cell) for cell in line.split(",")] for line in STEPS.read_text().split()[1:]]
    return [(StepShape(*row[:4]), row[4] / 1e6) for row in rows]


def draw_shape(draw: random.Random) -> StepShape:
    num_decodes = draw.randint(0, 64)
    shape = StepShape(num_decodes, 0, num_decodes * draw.randint(50, 800))
    return (
        shape.plus_prefill(draw.randint(1, 512), draw.randint(0, 1000))
        if draw.random() < 0.4
        else shape
    )


def trained(num_steps: int, noise: float = 0.0, cost: StepCost = TRUE) -> StepTimeModel:
    draw, model = random.Random(1), StepTimeModel()
    for _ in range(num_steps):
        shape = draw_shape(draw)
        model.observe(shape, cost.predict(shape) * draw.lognormvariate(0.0, noise))
    return model


def off_by(model: StepTimeModel, cost: StepCost = TRUE) -> float:
    draw = random.Random(2)
    shapes = [draw_shape(draw) for _ in range(200)]
    return median(abs(model.cost.predict(shape) / cost.predict(shape) - 1) for shape in shapes)


def test_real_steps_are_predicted_within_10_percent_at_the_median():
    model, errors = StepTimeModel(), []
    for number, (shape, elapsed_s) in enumerate(real_steps()):
        if number >= 100:
            errors.append(abs(model.cost.predict(shape) - elapsed_s) / elapsed_s)
        model.observe(shape, elapsed_s)
    assert median(errors) <= 0.10
    assert model.error == pytest.approx(median(errors[-128:]), abs=0.02)


def test_a_machine_unlike_the_prior_is_learned():
    assert off_by(StepTimeModel()) > 0.3
    assert off_by(trained(300)) < 0.03


def test_noise_averages_out():
    model = trained(1000, noise=0.1)
    # One that predicts with the true coefficients is off by this much: the noise itself.
    assert model.error == pytest.approx(0.067, abs=0.025)
    assert median([off_by(model), off_by(trained(900, 0.1)), off_by(trained(950, 0.1))]) < 0.08


def test_after_one_step_the_scale_is_right_and_nothing_is_negative():
    model = StepTimeModel()
    model.observe(StepShape(8, 0, 2000), 1.0)
    assert model.cost.predict(StepShape(8, 0, 2000)) == pytest.approx(1.0)
    assert model.cost.predict(StepShape(16, 0, 4000)) > 1.0
    assert 0.0 < model.cost.predict(StepShape()) < 1.0


def test_coefficients_never_become_negative():
    draw, model = random.Random(3), StepTimeModel()
    for _ in range(500):
        # More decodes go with less time here: a free fit would give them a negative price.
        shape = draw_shape(draw)
        model.observe(shape, 0.1 / (1 + shape.num_decodes))
        cost = model.cost
        assert min(cost.constant_s, cost.per_decode_s, cost.per_prefill_token_s) >= 0.0
        assert min(cost.per_context_token_s, cost.per_attended_s) >= 0.0


def test_a_step_100_times_as_slow_is_forgotten_within_a_few_steps():
    model, shape = trained(300), StepShape(20, 0, 4000)
    expected_s = TRUE.predict(shape)
    model.observe(shape, 100 * expected_s)
    assert model.cost.predict(shape) < 1.3 * expected_s
    for _ in range(8):
        model.observe(shape, expected_s)
    assert model.cost.predict(shape) == pytest.approx(expected_s, rel=0.05)
    assert off_by(model) < 0.06


def test_a_machine_that_becomes_three_times_as_slow_is_followed():
    model, shape = trained(300), StepShape(20, 0, 4000)
    for _ in range(12):
        model.observe(shape, 3 * TRUE.predict(shape))
    assert model.cost.predict(shape) == pytest.approx(3 * TRUE.predict(shape), rel=0.1)


def test_the_slow_cost_moves_less_than_the_prediction_of_the_next_step():
    model, shape = trained(300), StepShape(20, 0, 4000)
    before_s = model.slow_cost.predict(shape)
    for _ in range(3):
        model.observe(shape, 2 * TRUE.predict(shape))
    assert model.cost.predict(shape) > 1.3 * before_s
    assert model.slow_cost.predict(shape) < 1.1 * before_s


def test_the_exported_cost_says_by_how_much_it_is_off():
    model = trained(100)
    assert model.cost.error == model.slow_cost.error == model.error


def test_it_is_not_relied_on_before_it_has_seen_some_steps():
    assert not trained(3).cost.is_known
    assert trained(50).cost.is_known


def test_the_shape_of_a_plan():
    decode = ScheduledRequest("a", 40, (1,), (), True)
    chunk = ScheduledRequest("b", 10, (1, 2, 3), (), False)
    shape = shape_of(StepPlan(1, (decode, chunk), num_tokens=4))
    assert shape == StepShape(1, 3, 40, 11 + 12 + 13)


@pytest.mark.timing
def test_the_written_out_fit_is_that_of_loops_over_the_matrix():
    model, rng = StepTimeModel(), random.Random(3)
    size = 5
    squares = [[0.0] * size for _ in range(size)]
    products, weights = [0.0] * size, [1.0] * size
    for _ in range(400):
        a, b, c, d, e = shares = [rng.random() * rng.randrange(2) for _ in range(size)]
        ratio = rng.uniform(0.7, 1.5)
        model._fit((a, b, c, d, e), ratio)
        for row, share in enumerate(shares):
            products[row] = FORGETTING * products[row] + share * ratio
            for column, other in enumerate(shares):
                squares[row][column] = FORGETTING * squares[row][column] + share * other
        for row in range(size):
            fitted = 0.0
            for column in range(size):
                fitted += squares[row][column] * weights[column]
            pull = products[row] + RIDGE - fitted - RIDGE * weights[row]
            weights[row] = max(0.0, weights[row] + pull / (squares[row][row] + RIDGE))
        assert model._weights == tuple(weights)


def test_a_step_costs_microseconds_to_learn():
    model, shape = trained(50), StepShape(20, 100, 4000, 20_000)
    best_s = 1.0
    for _ in range(50):
        began_at = perf_counter()
        for _ in range(20):
            model.observe(shape, 0.05)
        best_s = min(best_s, (perf_counter() - began_at) / 20)
    assert best_s < 100e-6  # 10 or so where nothing else runs
