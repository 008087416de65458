"""The controller: what fits into a step, and how the limit on running requests moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headway.config import SchedulerConfig
from headway.core.slo.step_limits import (
    COOLDOWN_STEPS,
    LATENCY_TARGET_S,
    MIN_RUNNING,
    THROUGHPUT_FACTOR,
    Controller,
    StepLimits,
    StepLoad,
    largest_chunk,
)
from headway.core.slo.steptime import StepCost, StepShape
from headway.errors import ConfigError

COST = StepCost(0.01, 1e-3, 0.2e-3, 1e-6, 0.1e-6, error=0.0, num_steps=1000)
SLOW = replace(COST, per_decode_s=1.5e-3)
"""Decodes of 60 requests alone take 100 ms."""
UNKNOWN = StepCost()


def controller(**settings: Any) -> Controller:
    return Controller(SchedulerConfig(**settings))


def load(num_running: int = 20, tightest_s: float | None = 0.1) -> StepLoad:
    return StepLoad(num_running, StepShape(num_running, 0, 0), tightest_s)


def settle(
    control: Controller, at: StepLoad, step_s: float, num_steps: int, cost: StepCost = COST
) -> StepLimits:
    limits = control.decide(at, cost)
    for _ in range(num_steps):
        control.observe(at.decodes, step_s)
        limits = control.decide(at, cost)
    return limits


@pytest.mark.parametrize("start", [0, 1000])
@pytest.mark.parametrize("num_decodes", [0, 10, 60])
def test_the_chunk_is_the_largest_that_ends_in_time(num_decodes: int, start: int):
    at = StepLoad(num_decodes, StepShape(num_decodes, 0, 200 * num_decodes), 0.1, start)
    chunk = largest_chunk(at, COST, 0.1)
    assert COST.predict(at.decodes.plus_prefill(chunk, start)) <= 0.1
    assert COST.predict(at.decodes.plus_prefill(chunk + 2, start)) > 0.1


def test_nothing_fits_beside_decodes_that_are_too_long_already():
    assert largest_chunk(load(200), COST, 0.1) == 0


def test_without_targets_the_settings_stay_what_they_are():
    limits = controller(max_num_seqs=40, prefill_cap=100).decide(load(tightest_s=None), COST)
    assert limits == StepLimits(512, 64, 100, 40)


def test_nothing_is_decided_by_a_model_that_has_seen_nothing():
    assert controller().decide(load(), UNKNOWN) == StepLimits(512, 64, 512, 64)


def test_a_target_caps_prefill_and_the_floor_holds():
    limits = controller().decide(load(20), COST)
    assert 64 < limits.prefill_cap < 512
    assert COST.predict(load(20).decodes.plus_prefill(limits.prefill_cap)) <= 0.1
    assert controller().decide(load(200), COST).prefill_cap == 64


def test_a_tighter_target_means_less_prefill():
    caps = [controller().decide(load(20, target), COST).prefill_cap for target in (0.06, 0.1, 0.2)]
    assert caps == sorted(caps)
    assert caps[0] < caps[2]


def test_a_cap_that_was_set_is_never_exceeded():
    assert controller(prefill_cap=70).decide(load(1, 10.0), COST).prefill_cap == 70


def test_steps_that_are_too_long_bring_the_limit_down_by_shares():
    control, at = controller(), load(60)
    first = settle(control, at, 0.15, COOLDOWN_STEPS, SLOW).max_num_seqs
    assert first == int(0.85 * 60)
    again = settle(control, at, 0.15, COOLDOWN_STEPS - 1, SLOW)
    assert again.max_num_seqs == first, "one at a time"
    assert settle(control, load(first), 0.15, 200, SLOW).max_num_seqs == MIN_RUNNING


def test_steps_that_prefill_made_too_long_do_not():
    assert settle(controller(), load(40), 0.15, 100).max_num_seqs == 64


def test_prefill_that_cannot_be_cut_any_further_does():
    # Decodes take 25 ms of a step of 36, the least prefill 13: together more than 40 at times.
    assert settle(controller(), load(15, 0.04), 0.045, 100).max_num_seqs < 15


def test_while_decodes_are_deferred_the_limit_does_not_rise():
    control = controller()
    low = settle(control, load(60), 0.15, COOLDOWN_STEPS, SLOW).max_num_seqs
    deferred = StepLoad(low - 10, StepShape(low - 10, 0, 0), 0.1, num_deferred=10)
    assert settle(control, deferred, 0.08, 5 * COOLDOWN_STEPS).max_num_seqs == low
    assert settle(control, load(low), 0.08, COOLDOWN_STEPS).max_num_seqs == low + 1


def test_the_limit_goes_up_one_by_one_and_only_where_it_binds():
    control = controller()
    low = settle(control, load(60), 0.15, COOLDOWN_STEPS, SLOW).max_num_seqs
    # Decodes of 51 requests are predicted to take 61 ms, of a step of 90: there is room.
    assert settle(control, load(low - 1), 0.08, 5 * COOLDOWN_STEPS).max_num_seqs == low
    assert settle(control, load(low), 0.08, COOLDOWN_STEPS).max_num_seqs == low + 1


def test_between_too_long_and_room_nothing_changes():
    control = controller()
    low = settle(control, load(60), 0.15, COOLDOWN_STEPS, SLOW).max_num_seqs
    # Decodes that leave no room, in steps that are not too long.
    full = StepLoad(low, StepShape(70, 0, 0), 0.1)
    assert settle(control, full, 0.095, 10 * COOLDOWN_STEPS).max_num_seqs == low


def test_when_no_target_is_active_the_limit_is_what_it_was_set_to():
    control = controller()
    assert settle(control, load(60), 0.15, 100, SLOW).max_num_seqs < 64
    assert control.decide(load(60, None), COST).max_num_seqs == 64


def test_one_slow_step_does_not_bring_the_limit_down():
    control, at = controller(), load(60)
    settle(control, at, 0.07, 30)
    control.observe(at.decodes, 10.0)
    assert control.decide(at, COST).max_num_seqs == 64


def test_steps_without_decodes_keep_nobody_waiting():
    control = controller()
    for _ in range(50):
        control.observe(StepShape(0, 512), 1.0)
    assert control.decide(load(60), COST).max_num_seqs == 64


def test_throughput_mode_heeds_no_target():
    limits = controller(mode="throughput").decide(load(60, 0.01), COST)
    assert limits.max_num_batched_tokens == limits.prefill_cap == THROUGHPUT_FACTOR * 512
    assert (limits.max_num_seqs, limits.step_s) == (64, None)


def test_fixed_mode_heeds_no_target_either():
    assert controller(mode="fixed").decide(load(60, 0.01), COST) == StepLimits(512, 64, 512, 64)


def test_latency_mode_has_a_target_where_nobody_else_has():
    latency = controller(mode="latency").decide(load(tightest_s=None), COST)
    assert latency == controller().decide(load(tightest_s=LATENCY_TARGET_S), COST)


def test_an_unknown_mode_is_a_config_error():
    with pytest.raises(ConfigError, match="mode must be one of auto, latency, throughput, fixed"):
        SchedulerConfig(mode="fast")
